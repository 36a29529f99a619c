"""Checkpoints of Megatron's GPTModel, whose layers hold an attention and an MLP: those of this package before
it built a HybridModel, and of other software."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron_eqlen.recipe import ParallelRecipe


def save_gpt(folder: str, layout: dict[str, Any], checkpoint: str) -> None:
    """Save the weights of a Hugging Face folder as a GPTModel does; pipeline stages are even. Collective."""
    import torch.distributed as dist
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    from megatron_eqlen.hf.config import read_config
    from megatron_eqlen.models.build import build_model
    from megatron_eqlen.models.config import hybrid_arguments, transformer_config
    from megatron_eqlen.models.groups import start
    from megatron_eqlen.models.layer_specs import stack_spec
    from megatron_eqlen.models.torch_dist import sharding_options
    from megatron_eqlen.models.weights import load_hf

    parallel = ParallelRecipe(**layout)
    if not parallel_state.is_initialized():
        start(parallel, seed=1)
    (chunk,) = build_model(read_config(folder), parallel, torch.float32)
    load_hf([chunk], folder)
    arguments = hybrid_arguments(chunk.model_config, parallel)
    stages = arguments.pop("hybrid_layer_pattern").split("|")
    kinds = stack_spec(chunk.config)
    own = stages[parallel_state.get_pipeline_model_parallel_rank()]
    config = transformer_config(
        chunk.model_config, parallel, torch.float32, num_layers=chunk.config.num_layers // 2,
        hetereogenous_dist_checkpoint=len({*"".join(stages)}) > 2,
    )  # fmt: skip
    gpt = GPTModel(
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules(
            [_layer(kinds.submodules, mixer, mlp) for mixer, mlp in zip(own[::2], own[1::2], strict=True)],
            layer_norm=kinds.params["final_norm"],
        ),
        pre_process=chunk.pre_process,
        post_process=chunk.post_process,
        **arguments,
    )
    with torch.no_grad():
        for each in ("parameters", "buffers"):
            for theirs, ours in zip(getattr(gpt, each)(), getattr(chunk, each)(), strict=True):
                theirs.copy_(ours)
    if dist.get_rank() == 0:
        Path(checkpoint).mkdir(parents=True)
    dist.barrier()
    state = {"model": gpt.sharded_state_dict(metadata=sharding_options())}
    dist_checkpointing.save(state, checkpoint)


def _layer(kinds: Any, mixer: str, mlp: str) -> Any:
    """Return GPTModel's layer of the two layers of a HybridModel with these symbols."""
    first = kinds.attention_layer if mixer == "*" else kinds.gdn_layer
    second = (kinds.mlp_layer if mlp == "-" else kinds.moe_layer).submodules
    names = first.submodules.sharded_state_dict_keys_map | second.sharded_state_dict_keys_map
    own = {name: getattr(second, name) for name in ("pre_mlp_layernorm", "mlp", "mlp_bda")}
    both = replace(first.submodules, **own, sharded_state_dict_keys_map=names)
    return replace(first, submodules=both)

"""Build the chunks of a model that this rank holds."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state

from megatron_eqlen.hf.config import ModelConfig
from megatron_eqlen.models.config import hybrid_arguments, scaled_rope, transformer_config
from megatron_eqlen.models.layer_specs import stack_spec
from megatron_eqlen.models.policy_model import PolicyModel
from megatron_eqlen.models.router_replay import routers
from megatron_eqlen.recipe import ParallelRecipe


def build_model(
    model: ModelConfig,
    parallel: ParallelRecipe,
    dtype: torch.dtype,
    *,
    separate_norms: bool = False,
    **overrides: Any,
) -> list[PolicyModel]:
    """Return one chunk per virtual pipeline stage of this rank, on its device, with weights not yet set.
    ``overrides``: TransformerConfig fields. ``separate_norms``: fuse no norm into the linear layer after it,
    since adapters read that layer's input. Start Megatron's groups with the same ``parallel`` before."""
    config = transformer_config(model, parallel, dtype, **overrides)
    stages = range(parallel.virtual_pipeline) if parallel.virtual_pipeline else [None]
    arguments = hybrid_arguments(model, parallel) | {"hybrid_stack_spec": stack_spec(config, separate_norms)}
    chunks = [_chunk(model, config, stage, arguments) for stage in stages]
    for column, router in enumerate(routers(chunks)):
        router.column = column
    return chunks


def _chunk(model: ModelConfig, config: Any, vp_stage: int | None, arguments: dict[str, Any]) -> PolicyModel:
    where = {"ignore_virtual": False, "vp_stage": vp_stage}
    chunk = PolicyModel(
        config=config,
        pre_process=parallel_state.is_pipeline_first_stage(**where),
        post_process=parallel_state.is_pipeline_last_stage(**where),
        vp_stage=vp_stage,
        **arguments,
    )
    chunk.model_config = model
    # [rotated dimensions / 2] frequencies, in place of Megatron's
    if (rope := scaled_rope(model)) is not None:
        chunk.rotary_pos_emb.inv_freq = rope[0].to(chunk.rotary_pos_emb.inv_freq.device)
    # the experts' gradients are summed over their own group; Megatron-Core says so only with EP > 1, and with
    # EP = 1 and TP > 1 leaves them unsummed over the TP ranks, whose tokens differ
    for name, parameter in chunk.named_parameters():
        if ".experts." in name:
            parameter.allreduce = False  # pyright: ignore[reportAttributeAccessIssue] (Megatron's mark)
    if torch.cuda.is_available() and not next(chunk.parameters()).is_meta:
        chunk.cuda()
    return chunk

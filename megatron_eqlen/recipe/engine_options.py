"""Options of Megatron and vLLM without a key of their own: ``model.megatron`` and ``rollout.vllm``. Names are
those of their classes, whose source is read, not imported. Options that would break a run are refused."""

from __future__ import annotations

import ast
import builtins
import importlib.util
import re
import typing
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import PydanticUserError, TypeAdapter, ValidationError

MEGATRON = (
    ("megatron", "core/transformer/transformer_config.py", "TransformerConfig"),
    ("megatron", "core/model_parallel_config.py", "ModelParallelConfig"),
)
DDP = ("megatron", "core/distributed/distributed_data_parallel_config.py", "DistributedDataParallelConfig")
OPTIMIZER = ("megatron", "core/optimizer/optimizer_config.py", "OptimizerConfig")
OF_OPTIMIZER = {
    "weight_decay": (0.0, 0, 1e6), "clip_grad": (1.0, 0, 1e30), "adam_eps": (1e-8, 1e-30, 1),
    "adam_beta1": (0.9, 0, 0.9999999), "adam_beta2": (0.999, 0, 0.9999999),
}  # fmt: skip
"""Fields of the optimizer's configuration that may be given: default, least and most; keys of ``optimizer``
say the others."""
VLLM = (("vllm", "engine/arg_utils.py", "EngineArgs"),)
REFUSED = {
    "model.megatron": {
        r".*(parallel|pipeline|microbatch|p2p|gtp_|seqlen_per).*|.*num_weight_shards": "`parallel` says it",
        r"params_dtype|bf16|fp16|.*autocast.*|fp[48].*|quant_recipe|.*kitchen.*": "`model.dtype` says it",
        r"recompute_.*|moe_layer_recompute": "`parallel.recompute` says it",
        r"grad_reduce_in_fp32": "`optimizer.grad_dtype` says it",
        r"moe_router_fusion": "its kernel chooses experts itself, also where they are given",
        r"deterministic_mode|batch_invariant_mode": "`rollout.batch_invariant` says it",
        r"num_(layers|attention_heads|query_groups|moe_experts)|(moe_)?(ffn_)?hidden_size|kv_channels|norm.*"
        r"|layernorm.*|qk_.*|.*bias.*(?<!_fusion)|gated.*|activation_func.*|window.*|rotary.*|softmax.*"
        r"|attention_output_gate|linear_.*|experimental.*|moe_ffn.*|moe_layer.*|moe_shared_expert_(inter|gate).*"
        r"|moe_router_(topk|pre|score|num|group|enable|force).*|no_rope.*|use_mup|mup_.*|multi_latent.*"
        r"|apply_(query|residual).*|glu_.*|.*glu_interleave.*|mrope.*|moe_(apply|latent).*": (
            "the model's config.json says it"
        ),
        r".*dropout|moe_input_jitter_eps|moe_(token_drop|expert_capacity|expert_rank|pad_expert).*": (
            "a token's log-prob must not depend on chance or on other tokens of its batch"
        ),
        r"moe_(aux|z)_loss.*|moe_router_load.*|mtp_.*|calculate_per_token_loss|.*_loss_coeff": (
            "the loss is the objective's alone"
        ),
        r"cross_entropy_.*|masked_softmax_fusion": "attention and loss are not Megatron's",
        r"tp_comm_.*": "nothing makes its buffers",
        r".*cuda_graph.*": "rows differ in length",
        r"dsa_.*|.*mamba.*|.*inference.*|flash_decode|is_hybrid.*|.*prefill": "training reads nothing of it",
        r"perform_initialization|variable_seq_lengths|use_cpu_.*|.*_func|.*init_method.*|init_model.*|transformer_impl|moe_enable_routing.*"
        r"|hetereogenous.*|heterogeneous.*|cpu_offloading.*|use_distributed_optimizer|average_in_collective|.*fsdp.*"
        r"|overlap_param_gather|align_param_gather|num_distributed_optimizer_instances|check_for_.*|reuse_grad.*"
        r"|gradient_reduce_div_fusion|.*sharding_strategy|test_mode|_.*": "this package sets it",
    },
    "rollout.vllm": {
        r"model|tokenizer.*|skip_tokenizer_init|hf_config_path|revision|code_revision|load_format|config_format"
        r"|dtype|seed|max_model_len|hf_overrides": "`model` and the lengths of `data` and `rollout` say it",
        r"max_num_seqs|block_size|gpu_memory_utilization|kv_cache_memory_bytes"
        r"|quantization|quantization_config|spec_.*|tensor_parallel_size": "`rollout` has a key for it",
        r"(max_)?logprobs.*|.*generation_config|return_sampling_mask|enable_return_routed_experts|logits_processors"
        r"|reasoning_.*|structured_out.*|watermark.*|diffusion.*|disable_cascade_attn|.*stochastic.*": (
            "what is sampled must be what is trained"
        ),
        r"enable_prefix_caching": "forks reuse their prefix",
        r"kv_(transfer|offloading).*": "what other weights have cached there would outlive a weight sync",
        r"worker_cls|scheduler_cls|worker_extension_cls|additional_config|weight_transfer_config|enable_sleep_mode"
        r"|distributed_executor_backend|enable_lora|.*(data|pipeline|context)_parallel.*|nnodes|node_rank|master_.*"
        r"|(cpu_)?offload_.*|runner|convert|tokens_only|use_tqdm.*|_.*": "weight syncs and sleep need ours",
    },
}  # fmt: skip
"""By key: patterns of names, and why they are refused."""
UNREAD = re.compile(
    r"(attention_softmax|log_max|cp_comm|moe_per|moe_router_quantile|tp_only|first_last|num_layers)_.*|keep_fp8.*"
)
"""Options of Megatron's own attention, context parallelism, load balancing and fp8, which are not used."""


def check_options(key: str, options: Mapping[str, Any]) -> None:
    """Raise ValueError for an option of ``key`` that is refused or that its engine lacks (if installed)."""
    if not options:
        return
    # Empty where the engine is not installed: then only refused options are found.
    known: dict[str, str] = {}
    for place in (*MEGATRON, DDP) if key == "model.megatron" else VLLM:
        known |= _fields(place)
    # Of the optimizer's many fields a few may be given.
    if known and key == "model.megatron":
        known |= {name: _fields(OPTIMIZER)[name] for name in OF_OPTIMIZER}
    for name, value in options.items():
        if known and name not in known:
            near = "".join(f" (nearest: {near!r})" for near in get_close_matches(name, known, 1, 0.75))
            raise ValueError(f"{key}.{name}: the engine has no such option{near}")
        for pattern, reason in REFUSED[key].items():
            if re.fullmatch(pattern, name):
                raise ValueError(f"{key}.{name}: refused: {reason}")
        if name in known and not _is_of(value, known[name]):
            raise ValueError(f"{key}.{name}: expected {known[name]}, found {value!r}")


class MegatronOptions(NamedTuple):
    """``model.megatron``: fields of Megatron's model, of its DDP, and of its optimizer, with our defaults."""

    model: dict[str, Any]
    ddp: dict[str, Any]
    optimizer: dict[str, Any]


def split_megatron(options: Mapping[str, Any]) -> MegatronOptions:
    # Fields that DDP's configuration has alone; the model's wins where both have one.
    of_ddp = _fields(DDP).keys() - {name for place in MEGATRON for name in _fields(place)}
    ddp = {name: value for name, value in options.items() if name in of_ddp}
    optimizer = {name: options.get(name, default) for name, (default, *_) in OF_OPTIMIZER.items()}
    model = {name: value for name, value in options.items() if name not in ddp | optimizer}
    return MegatronOptions(model, ddp, optimizer)


def _is_of(value: Any, kind: str) -> bool:
    """Return False if the value is not of the annotated type ``kind``; True if only the engine can tell."""
    # The annotation is source text, such as ``Literal['nccl', 'mpi'] | None``.
    try:
        TypeAdapter(eval(kind, vars(typing) | {"__builtins__": builtins})).validate_python(value, strict=True)
    except ValidationError:
        return False
    except (NameError, PydanticUserError):
        return True
    return True


@cache
def _fields(place: tuple[str, str, str]) -> dict[str, str]:
    """Return the fields of the dataclass ``place`` (package, file, class) with their annotations."""
    package, file, name = place
    spec = importlib.util.find_spec(package)  # of a top-level package: imports nothing
    folders = (spec.submodule_search_locations if spec else None) or ()
    for path in (Path(folder, file) for folder in folders):
        if path.is_file():
            body = ast.parse(path.read_text(encoding="utf-8")).body
            found = next(each for each in body if isinstance(each, ast.ClassDef) and each.name == name)
            fields = [each for each in found.body if isinstance(each, ast.AnnAssign)]
            return {ast.unparse(field.target): ast.unparse(field.annotation) for field in fields}
    return {}

"""vLLM's Gated DeltaNet for CPUs in float32: its C++ kernels have bfloat16 alone.

In the context, Transformers' functions compute what those kernels compute. The layer around them stays
vLLM's, with its caches of states and the choice of the state from which a request continues.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor


class _Torch:
    """torch where float32 passes for bfloat16, on a processor without instructions for it."""

    bfloat16 = torch.float32
    cpu = SimpleNamespace(_is_avx512_bf16_supported=lambda: False, _is_amx_tile_supported=lambda: False)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _gates(A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return (log of the decay, beta), each [1, tokens, value heads] float32."""
    return (-A_log.exp() * F.softplus(a + dt_bias))[None], b.sigmoid()[None]


def _repeated(heads: Tensor, count: int) -> Tensor:
    return heads.repeat_interleave(count // heads.shape[2], dim=2)


def _prefill(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, *, initial_state: Tensor,
    cu_seqlens: Tensor, initial_state_indices: Tensor, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Compute sequences that lie one after the other; states are read and written in place."""
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule as rule

    query, key = (_repeated(x, value.shape[2]) for x in (query, key))
    out, bounds = torch.empty_like(value), cu_seqlens.tolist()
    for start, end, slot in zip(bounds[:-1], bounds[1:], initial_state_indices.tolist(), strict=True):
        parts = (x[:, start:end] for x in (query, key, value, g, beta))
        out[:, start:end], state = rule(
            *parts, initial_state=initial_state[slot : slot + 1], output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        initial_state[slot] = state[0]
    return out, None


def _decode(
    A_log: Tensor, dt_bias: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, *,
    initial_state_source: Tensor, initial_state_indices: Tensor, **_: Any,
) -> Tensor:  # fmt: skip
    """Compute one token of each sequence."""
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule as rule

    q, k = (_repeated(x, v.shape[2]) for x in (q, k))
    decay, beta = _gates(A_log, a, b, dt_bias)
    slots = initial_state_indices.long()
    q, k, v, decay, beta = (x.transpose(0, 1) for x in (q, k, v, decay, beta))
    out, initial_state_source[slots] = rule(
        q, k, v, decay, beta, initial_state=initial_state_source[slots], output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    return out


@contextlib.contextmanager
def in_float32() -> Iterator[None]:
    """Let engines that run in the context have Gated DeltaNet in float32."""
    from vllm import _custom_ops
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    from megatron_eqlen.engines import vllm_args

    with (
        patch.object(vllm_args, "_supported_dtype", lambda path, model, dtype: dtype),
        patch.object(gdn_attention, "torch", _Torch()),
        patch.object(_custom_ops, "chunk_gated_delta_rule_cpu", _prefill),
        patch.object(_custom_ops, "fused_sigmoid_gating_delta_rule_update_cpu", _decode),
        patch.object(_custom_ops, "fused_gdn_gating_cpu", _gates),
    ):
        yield

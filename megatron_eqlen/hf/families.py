"""Model families, and their trained tensors by Hugging Face's and Megatron's names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

from megatron_eqlen.hf import qwen3, qwen3_moe, qwen3_next
from megatron_eqlen.hf.config import Family, ModelConfig
from megatron_eqlen.hf.weight_map import Weight

FAMILIES: dict[Family, Callable[[ModelConfig], Iterator[Weight]]] = {
    "qwen3": qwen3.weights,
    "qwen3_moe": qwen3_moe.weights,
    "qwen3_next": qwen3_next.weights,
}


@cache
def weight_map(model: ModelConfig) -> tuple[Weight, ...]:
    """Return every trained tensor of ``model``, in the model's order."""
    return tuple(FAMILIES[model.model_type](model))

"""Adapters of low rank (LoRA, arXiv:2106.09685) by PEFT's and Megatron's names.

An adapter adds (alpha / rank) B A x to a linear layer's W x, with A [rank, in] and B [out, rank]. A layer of
Megatron's may compute several of Hugging Face's (query, key, value; gate, up): these share A, not B's rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from megatron_eqlen.hf.config import ModelConfig
from megatron_eqlen.hf.families import weight_map
from megatron_eqlen.hf.hub import is_name
from megatron_eqlen.hf.weight_map import Stacked, Weight

TARGETS = {
    "attention": r"self_attention\.linear_(qkv|proj)\.weight",
    "delta_net": r"self_attention\.(in|out)_proj\.weight",
    "mlp": r"mlp\.(shared_experts\.)?linear_fc[12]\.weight",
    "experts": r"mlp\.experts\.local_experts\.\d+\.linear_fc[12]\.weight",
}
"""``lora.targets`` -> names of the weights in a layer that have adapters."""


@dataclass(frozen=True)
class AdapterWeights:
    """Weight of a linear layer, and the two matrices of its adapter."""

    base: Weight
    A: Weight
    B: Weight

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of the Hugging Face modules that the adapter belongs to."""
        return tuple(name.removesuffix(".weight") for name in self.base.hf)


@cache
def adapter_map(model: ModelConfig, rank: int, targets: tuple[str, ...] | None) -> tuple[AdapterWeights, ...]:
    """Return every adapter of ``model``, in the model's order. ``targets``: keys of TARGETS; None: all.
    Raises ValueError if the model has no layer of a target, or if the rank is above that of a matrix."""
    found = [
        (target, weight)
        for weight in weight_map(model)
        for target, names in TARGETS.items()
        if re.fullmatch(rf"decoder\.layers\.\d+\.({names})", weight.megatron)
    ]
    present = [target for target in TARGETS if target in dict(found)]
    if absent := [target for target in targets or () if target not in present]:
        lacks = f"a {model.model_type} model has no {', '.join(absent)}"
        raise ValueError(f"lora.targets: {lacks}: expected some of {', '.join(present)}")
    kinds = present if targets is None else targets
    weights = [weight for target, weight in found if target in kinds]
    for weight in weights:
        # [rows, columns] of the layer's matrix; rows of all modules that it fuses.
        rows, columns = sum(rows for rows, _ in weight.shapes), weight.shapes[0][1]
        if rank > min(rows, columns):
            matrix = f"{weight.megatron}, which has {rows} rows and {columns} columns"
            expected = f"at most {min(rows, columns)}"
            raise ValueError(f"lora.rank: {rank} is above the rank of {matrix}: expected {expected}")
    return tuple(_adapter(weight, rank) for weight in weights)


def peft_tensors(adapter: AdapterWeights) -> Iterator[tuple[str, str]]:
    """Yield (name in a PEFT folder, name in ``A.hf`` or ``B.hf``) of each of an adapter's tensors."""
    # PEFT has a matrix A for each module, so the shared one is written for each.
    for module, of_module in zip(adapter.modules, adapter.B.hf, strict=True):
        yield f"base_model.model.{module}.lora_A.weight", adapter.A.hf[0]
        yield f"base_model.model.{module}.lora_B.weight", of_module


def peft_config(adapters: Sequence[AdapterWeights], rank: int, alpha: float, base: str) -> dict[str, Any]:
    """Return the content of ``adapter_config.json``. ``base``: the base's name, or folder (its last part)."""
    modules = sorted({module.rpartition(".")[2] for adapter in adapters for module in adapter.modules})
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base if is_name(base) else Path(base).name,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": modules,
    }


def _adapter(base: Weight, rank: int) -> AdapterWeights:
    stem, columns = base.megatron.removesuffix("weight"), base.shapes[0][1]
    # W divided by rows (dim 0): A is whole, and B divided as W is. By columns: A divided, B whole.
    modules = [name.removesuffix("weight") for name in base.hf]
    divides_rows = base.dim == 0
    return AdapterWeights(
        base,
        A=Weight(
            f"{stem}adapter.A",
            (f"{modules[0]}lora_A.weight",),
            ((rank, columns),),
            dim=None if divides_rows else base.dim,
            expert=base.expert,
        ),
        B=Weight(
            f"{stem}adapter.B",
            tuple(f"{module}lora_B.weight" for module in modules),
            tuple((rows, rank) for rows, _ in base.shapes),
            dim=0 if divides_rows else None,
            sections=base.sections if divides_rows else (),
            arrangement=base.arrangement if divides_rows else Stacked(),
            expert=base.expert,
        ),
    )

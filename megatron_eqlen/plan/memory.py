"""GPU memory in bytes for each phase of ``recipe/phases.py``, and the check whether it fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from megatron_eqlen.hf.config import ModelConfig
from megatron_eqlen.plan import engine
from megatron_eqlen.plan.activations import Activations
from megatron_eqlen.plan.trainer import Trainer, sent_tensors, trainer
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.recipe.phases import phases

RUNTIME = 2.5e9
"""CUDA's context, the trainer's NCCL groups, cuBLAS; an allowance."""
UNUSABLE = 0.05
"""Share of the GPU that fragmentation takes; an allowance."""


@dataclass(frozen=True)
class Memory:
    """Memory of one GPU on the pipeline stage that needs most."""

    recipe: Recipe
    model: ModelConfig
    stages: list[Trainer]
    activations: Activations
    parts: dict[str, float]
    """Bytes of each part of ``phases.MemoryPart``, and of ``runtime``."""
    table: dict[str, tuple[str, ...]]
    """Parts on the GPU, by phase."""

    @property
    def total(self) -> float:
        return self.recipe.cluster.gpu_memory_gib * engine.GIB

    @property
    def usable(self) -> float:
        return (1 - UNUSABLE) * self.total

    @cached_property
    def phases(self) -> dict[str, float]:
        """Bytes in use, by phase."""
        return {phase: sum(self.parts[part] for part in parts) for phase, parts in self.table.items()}

    @property
    def peak(self) -> float:
        return max(self.phases.values())

    def problems(self) -> list[str]:
        """Return the reasons why the recipe does not fit; empty if it fits or uses no GPU."""
        if self.recipe.cluster.device == "cpu":
            return []
        problems = [
            f"{phase}: {_gb(need)} of {_gb(self.usable)} usable"
            for phase, need in self.phases.items()
            if need > self.usable
        ]
        if self.recipe.rollout.engine == "colocated":
            problems += (f"start: {text}" for text in self._engine_problems())
        return problems

    def _engine_problems(self) -> Iterator[str]:
        beside = sum(self.parts[part] for part in self.table["start"] if part not in ("engine", "kv_cache"))
        wanted, free = engine.requested(self.recipe), self.total - beside
        if wanted > free:
            share = self.recipe.rollout.gpu_memory_utilization
            yield f"vLLM wants {_gb(wanted)} free (rollout.gpu_memory_utilization {share}), found {_gb(free)}"
        cache, path = engine.kv_cache(self.recipe, self.model), engine.longest_path(self.recipe, self.model)
        if cache < path:
            yield (
                f"{_gb(cache)} are left for the KV cache, and the longest path "
                f"({self.recipe.longest_path_text}) needs {_gb(path)}"
            )


def memory(recipe: Recipe, model: ModelConfig) -> Memory:
    """Return the memory plan of the recipe. Call ``layout.check`` first."""
    stages = trainer(recipe, model)
    most = max(stages, key=lambda stage: stage.total)
    return Memory(recipe, model, stages, most.activations, _parts(recipe, model, most), _table(recipe))


def _parts(recipe: Recipe, model: ModelConfig, rank: Trainer) -> dict[str, float]:
    parts = {
        "runtime": RUNTIME,
        "weights": rank.weights,
        "gradients": rank.gradients,
        "optimizer": rank.optimizer,
        "activations": rank.passing,
        "sent_tensors": sent_tensors(recipe, model),
    }
    if recipe.rollout.engine == "colocated":
        parts |= {
            "engine": engine.weights(recipe, model) + engine.WORKSPACE,
            "kv_cache": max(engine.kv_cache(recipe, model), 0.0),
            "sleeping_engine": engine.ASLEEP,
        }
    return parts


def _table(recipe: Recipe) -> dict[str, tuple[str, ...]]:
    return {phase.name: ("runtime", *phase.parts) for phase in phases(recipe)}


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"

"""GPU memory in bytes for each phase of ``recipe/phases.py``, and the check whether it fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from megatron_eqlen.job import Job
from megatron_eqlen.plan import engine
from megatron_eqlen.plan.activations import Activations
from megatron_eqlen.plan.trainer import Trainer, sent_tensors, teacher, trainer
from megatron_eqlen.recipe.phases import phases

RUNTIME = 1.5e9
"""CUDA's context, cuBLAS; an allowance."""
COMMUNICATOR = 0.8e9
"""Buffers of an NCCL communicator, from its first collective on; an allowance. Measured elsewhere: 0.54 GB of
2 and 0.69 GB of more ranks on A100 (NVIDIA/nccl issue 964); 7 to 9.5 GB in all on 8 H100 (verl PR 6408)."""
UNUSABLE = 0.05
"""Share of the GPU that fragmentation takes; an allowance."""


@dataclass(frozen=True)
class Memory:
    """Memory of one GPU on the pipeline stage that needs most."""

    job: Job
    stages: list[Trainer]
    activations: Activations
    parts: dict[str, float]
    """Bytes of each part of ``phases.MemoryPart``, of ``runtime``, and of the trainer's ``communicators``."""
    table: dict[str, tuple[str, ...]]
    """Parts on the GPU, by phase."""

    @property
    def total(self) -> float:
        return self.job.recipe.cluster.gpu_memory_gib * engine.GIB

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

    def problems(self, servers: bool = True) -> list[str]:
        """Return the reasons why the recipe does not fit; empty if it fits or uses no GPU. ``servers``: also
        those of vLLM servers on GPUs like the trainer's."""
        if (recipe := self.job.recipe).cluster.device == "cpu":
            return []
        over = {phase: need for phase, need in self.phases.items() if need > self.usable}
        problems = [f"{phase}: {_gb(need)} of {_gb(self.usable)} usable" for phase, need in over.items()]
        if recipe.colocated or (servers and recipe.generates):
            where = "start" if recipe.colocated else "servers on GPUs of this size"
            problems += (f"{where}: {text}" for text in self._engine_problems())
        return problems

    def _engine_problems(self) -> Iterator[str]:
        # What is on the GPU when vLLM starts: the trainer's parts, if it is there.
        there = self.table["start"] if self.job.recipe.colocated else ("runtime",)
        beside = sum(self.parts[part] for part in there if part not in ("engine", "kv_cache"))
        wanted, free = engine.requested(self.job.recipe), self.total - beside
        if wanted > free:
            share = self.job.recipe.rollout.gpu_memory_utilization
            yield f"vLLM wants {_gb(wanted)} free (rollout.gpu_memory_utilization {share}), found {_gb(free)}"
        path = engine.sequence_bytes(self.job, self.job.recipe.longest_context)
        cache = engine.kv_cache(self.job)  # with less than a path needs vLLM does not start
        if cache < path:
            needs = f"the longest path ({self.job.recipe.longest_context_text}) needs {_gb(path)}"
            yield f"{_gb(cache)} are left for the KV cache, and {needs}"


def memory(job: Job) -> Memory:
    """Return the memory plan of the job. Call ``check_layout`` first."""
    stages = trainer(job)
    table = {phase.name: ("runtime", "communicators", *phase.parts) for phase in phases(job.recipe)}
    needs = [Memory(job, stages, stage.activations, _parts(job, stage), table) for stage in stages]
    # One stage has the most weights, another the most activations: the phases tell which needs most.
    return max(needs, key=lambda need: (len(need.problems()), need.peak // 1e9, sum(need.phases.values())))


def _parts(job: Job, rank: Trainer) -> dict[str, float]:
    parts = {
        "runtime": RUNTIME,
        "communicators": COMMUNICATOR * len(communicators(job)),
        "weights": rank.weights,
        "gradients": rank.gradients,
        "optimizer": rank.optimizer,
        "activations": rank.passing,
        "sent_tensors": sent_tensors(job),
    }
    if job.teacher:
        # Its forward pass keeps one layer at a time; nothing waits for a backward pass.
        taught = teacher(job)
        at = taught.activations
        parts["teacher"] = taught.weights + at.layer + at.passing + at.head
    if job.recipe.colocated:
        parts |= {
            "engine": engine.weights(job) + engine.WORKSPACE,
            # Less than nothing is left: ``problems`` says so.
            "kv_cache": max(engine.kv_cache(job), 0.0),
            "sleeping_engine": engine.ASLEEP,
        }
    return parts


def communicators(job: Job) -> list[str]:
    """Return the trainer's groups of more than one rank that carry GPU tensors; each has its own NCCL
    communicator, even with the ranks of another. vLLM's are part of the engine."""
    parallel, world, model = job.recipe.parallel, job.recipe.world_size, job.model
    # Ranks that hold the same dense weights; experts have groups of their own.
    data = world // (parallel.tensor * parallel.pipeline)
    experts = parallel.expert * parallel.expert_tensor
    sizes = {
        "world": world,
        "optimizer": world,
        "tensor": parallel.tensor,
        "pipeline": parallel.pipeline,
        "data": data,
        "data and context": data,
        "embedding": parallel.pipeline if model.tie_word_embeddings else 1,
    }
    if model.experts:
        sizes |= {
            "expert": parallel.expert,
            "expert and tensor": experts,
            "expert data": world // (parallel.pipeline * experts),
        }
    return [name for name, size in sizes.items() if size > 1]


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"

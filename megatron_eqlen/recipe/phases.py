"""Contents of a GPU's memory in each phase of a run, with a colocated engine.

    load ─► start ─► sync ─► evaluate ─► generate ─► train ─► sync ─► evaluate ─► checkpoint ─► generate ...
                                         └────────────────── a step ──────────────────────┘  or ─► export

``rollout.park_trainer`` and ``optimizer.offload`` decide what the trainer keeps. A teacher's weights are
there between generate and train alone (``teach``).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from megatron_eqlen.recipe import Recipe

MemoryPart = Literal[
    "weights", "gradients", "optimizer", "activations", "teacher", "sent_tensors", "engine", "kv_cache",
    "sleeping_engine",
]  # fmt: skip
"""``optimizer``: main weights, Adam's moments. ``activations``: of a row, with logits and loss. ``teacher``:
weights, and a row in one layer. ``sent_tensors``: the two largest. ``engine``: weights, graphs, sampler."""

HostPart = Literal["optimizer", "weights", "reference", "teacher"]
"""``reference``: the reference model's weights, and the policy's while the reference's are swapped in."""


class Phase(NamedTuple):
    """Period of a run in which the same parts are on the GPU."""

    name: str
    parts: tuple[MemoryPart, ...]


def phases(recipe: Recipe) -> list[Phase]:
    """Return the phases in the order of their first occurrence."""
    parked = recipe.parked
    weights: list[MemoryPart] = ["weights"]
    state: list[MemoryPart] = ["gradients"] if recipe.optimizer.offload else ["gradients", "optimizer"]
    trainer = weights + state
    # The trainer's parts beside an engine that is awake; only what is there can be sent.
    kept = {"none": trainer, "state": weights, "all": []}[parked]
    synced = trainer if parked == "none" else weights
    colocated = recipe.colocated
    awake: list[MemoryPart] = ["engine", "kv_cache"] if colocated else []
    woken: list[MemoryPart] = ["engine"] if colocated else []
    asleep: list[MemoryPart] = ["sleeping_engine"] if colocated else []
    # A trained demonstration is not generated; without benchmarks there is no engine at all.
    absent = ("generate",) * recipe.supervised + ("start", "sync", "evaluate") * (not recipe.generates)
    every = [
        Phase("load", (*trainer,)),
        Phase("start", (*kept, *awake)),
        Phase("sync", (*synced, "sent_tensors", *woken)),
        Phase("evaluate", (*kept, *awake)),
        Phase("generate", (*kept, *awake)),
        *([Phase("teach", (*trainer, "teacher", *asleep))] if recipe.teacher.path else []),
        Phase("train", (*trainer, "activations", *asleep)),
        Phase("checkpoint", (*kept, *awake)),
        Phase("export", (*synced, "sent_tensors", *asleep)),
    ]
    return [phase for phase in every if phase.name not in absent]


def on_host(recipe: Recipe) -> tuple[HostPart, ...]:
    """Return the parts that the trainer keeps in host memory from its first parking to its end."""
    parked = recipe.parked
    parts: list[HostPart] = []
    if recipe.optimizer.offload or parked != "none":
        parts.append("optimizer")
    if parked == "all":
        parts.append("weights")
    if recipe.loss.kl_coef and not recipe.lora.rank:  # without its adapters the policy is the reference
        parts.append("reference")
    if recipe.teacher.path:
        parts.append("teacher")
    return tuple(parts)

"""Bytes of host memory that a node needs, and of disk that a run fills."""

from __future__ import annotations

import math

from megatron_eqlen.hf.config import ModelConfig
from megatron_eqlen.job import Job
from megatron_eqlen.plan import engine, trainer
from megatron_eqlen.plan.activations import BYTES
from megatron_eqlen.plan.trainer import MAIN_WEIGHT, MOMENTS, RankBuffers, Trainer, optimizer_bytes, trained
from megatron_eqlen.plan.workload import Workload
from megatron_eqlen.recipe import RolloutRecipe
from megatron_eqlen.recipe.phases import on_host

PROCESS = 6e9
"""Bytes of a rank beyond the counted parts: Python, PyTorch, vLLM, the data; an allowance."""
TOKEN = 8
"""Bytes of a generated token: its id and its log-prob."""
TOKEN_ON_DISK = 5.8
"""Bytes of a recorded token, compressed; measured on random ids and log-probs."""


def host_parts(job: Job, stages: list[Trainer], work: Workload) -> dict[str, float]:
    """Return the host memory of one node, part by part, for the pipeline stage that holds most."""
    recipe = job.recipe
    cluster, optimizer, kept = recipe.cluster, recipe.optimizer, on_host(recipe)
    most = max(stages, key=lambda stage: stage.weights)
    rank, width = most.parameters, BYTES[recipe.model.dtype]
    parts = dict.fromkeys(("optimizer", "weights", "reference", "teacher", "checkpoint", "rollouts"), 0.0)
    if optimizer.offload:  # Megatron pins the gradients that it copies to the host, in float32
        state = (MAIN_WEIGHT + MOMENTS) * rank.shard
        parts["optimizer"] = state + pinned(rank, MAIN_WEIGHT, sharded=True)
    elif "optimizer" in kept:
        # In bfloat16 main weights and two moments, in float32 the moments alone.
        tensors = 3 if recipe.model.dtype == "bfloat16" else 2
        parts["optimizer"] = tensors * pinned(rank, optimizer_bytes(recipe) // tensors, sharded=True)
    if "weights" in kept:  # one block per Megatron buffer, and per frozen parameter
        blocks = [*(buffer.elements for buffer in rank.buffers), *rank.frozen]
        parts["weights"] = sum(power_of_two(width * elements) for elements in blocks)
    if "reference" in kept:  # plus the policy's weights while the reference is swapped in
        parts["reference"] = 2 * pinned(rank, width, sharded=False)
    if "teacher" in kept:
        parts["teacher"] = pinned(trainer.teacher(job).parameters, width, sharded=False)
    # On a CPU the trainer's state is there too, and an engine's weights, which it keeps asleep.
    if cluster.device == "cpu":
        parts |= {"optimizer": most.optimizer, "weights": most.weights, "gradients": most.gradients}
        parts["engine"] = engine.weights(job) if recipe.colocated else 0.0
    # So far for one rank; what follows is for the node.
    parts = {name: cluster.processes_per_node * size for name, size in parts.items()}
    parts["checkpoint"] = staged_bytes(job, rank)
    tokens = (work.generated + work.given) / work.share / cluster.nodes  # those that are carried over, too
    copies = 1 + recipe.parallel.tensor * recipe.parallel.pipeline  # graded on one rank, trained on these
    parts["rollouts"] = copies * tokens * token_bytes(recipe.rollout)
    if recipe.rollout.keep_routes:  # each stage keeps its own layers' routes
        parts["routes"] = (1 + recipe.parallel.tensor) * tokens * route_bytes(job.model)
    parts["processes"] = cluster.processes_per_node * PROCESS
    return parts


def pinned(rank: RankBuffers, each: int, *, sharded: bool) -> float:
    """Return the bytes of a pinned copy, ``each`` a number. ``sharded``: one data-parallel rank's part."""
    return sum(
        power_of_two(each * size / (buffer.ranks if sharded else 1))
        for buffer in rank.buffers
        for size in buffer.sizes
    )


def power_of_two(size: float) -> float:
    """Round up to a power of two, as PyTorch does for pinned memory (ATen/core/CachingHostAllocator.h) unless
    ``PYTORCH_ALLOC_CONF=pinned_max_round_threshold_mb`` is set."""
    return 2.0 ** math.ceil(math.log2(size))


def checkpoint_bytes(job: Job) -> float:
    """Return the bytes of a checkpoint: trained weights, their float32 main weights (always) and moments."""
    return trained(job.model, job.recipe.lora) * (BYTES[job.recipe.model.dtype] + MAIN_WEIGHT + MOMENTS)


def staged_bytes(job: Job, rank: RankBuffers) -> float:
    """Return the bytes that a node stages while a checkpoint is written: the weights, each parameter at most
    once. The optimizer state is written in place, unless it is on the GPU."""
    recipe, each = job.recipe, BYTES[job.recipe.model.dtype]
    if recipe.parked == "none" and not recipe.optimizer.offload:
        each += optimizer_bytes(recipe)
    return each * min(trained(job.model, recipe.lora), recipe.cluster.processes_per_node * rank.elements)


def export_bytes(job: Job) -> float:
    # In the wider of the trained and the base's dtype (hf/folder.py): float32, also of float16 and bfloat16.
    dtype = job.recipe.model.dtype if job.model.dtype in ("bfloat16", "") else "float32"
    return trainer.total(job.model) * BYTES[dtype]


def token_bytes(rollout: RolloutRecipe) -> float:
    """Return a generated token's bytes in memory, with at most ``mask_width`` ids of its sampling mask."""
    return TOKEN + (4 * rollout.mask_width + 1 if rollout.mask_width else 0)


def route_bytes(model: ModelConfig) -> int:
    """Return the bytes of a token's routes (``tokens.ROUTES``), which vLLM keeps as uint8 or uint16."""
    if (experts := model.experts) is None:
        return 0
    # Numbers of experts up to 255 need a byte.
    return sum(experts.layers) * experts.num_experts_per_tok * (1 if experts.num_experts <= 256 else 2)


def recorded_bytes(job: Job, work: Workload) -> float:
    """Return the bytes of one step's recorded rollouts; routes are counted uncompressed."""
    rollout = job.recipe.rollout
    token = TOKEN_ON_DISK + token_bytes(rollout) - TOKEN
    if rollout.keep_routes and rollout.record_routes:
        token += route_bytes(job.model)
    return (work.generated + work.given) * token

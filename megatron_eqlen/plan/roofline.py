"""Roofline of a step: its FLOPs over a share of the GPUs' peak, its bytes over a share of their bandwidth.

    generation = decode steps x max(bytes read / bandwidth, FLOPs / peak)
    training   = FLOPs / (peak x (1 - idle)) + gradients' bytes / network

It shows what bounds a step on 8 or 4,096 GPUs (bytes or FLOPs, the longest response, too few rows, the
network), and predicts no run. The shares are those of NeMo-RL's published steps on H100
(about/performance-summary.md, v0.4; tests/pure/test_plan.py has the rows). Not counted: graders, weight
syncs, checkpoints, evaluations, and what tensor and expert parallelism exchange.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_eqlen.hf.config import ModelConfig
from megatron_eqlen.job import Job
from megatron_eqlen.plan import engine
from megatron_eqlen.plan.activations import BYTES
from megatron_eqlen.plan.flops import GPUS, Gpu, active_parameters, forward_flops, training_flops
from megatron_eqlen.plan.trainer import rank_buffers
from megatron_eqlen.plan.workload import Workload

DENSE, EXPERTS, BANDWIDTH, NETWORK = 0.4, 0.1, 0.3, 0.6
"""Assumed shares of a data sheet: FLOPs without and with experts, memory bandwidth in decoding, network."""
ASSUMPTIONS = (
    f"assumed: {DENSE:.0%} of the peak FLOPs ({EXPERTS:.0%} with experts), {BANDWIDTH:.0%} of memory "
    f"bandwidth, {NETWORK:.0%} of",
    "the network; responses of rollout.max_response_length tokens; no graders, syncs, evaluations. NeMo-RL's",
    "published steps on H100 take 1.0 to 1.4 times as long, with 235B 1.5 times. A run measures its time.",
)


@dataclass(frozen=True)
class Roofline:
    """Seconds of one step."""

    gpu: Gpu
    decode_steps: float
    batch: float
    """Mean number of sequences that an engine decodes at once."""
    generation: float
    rows: float
    """Rows of a data-parallel replica in one update."""
    idle: float
    """Share of training in which a replica waits: for rows, or for the pipeline's other stages."""
    training: float
    """Includes ``gradients``."""
    gradients: float
    """Exchange of gradients and weights between nodes, as if no computation hid it."""
    seconds: float
    balanced: int | None = None
    """With ``rollout.staleness``, servers that keep up with training; None: the longest response decides."""


def rooflines(job: Job, work: Workload) -> list[Roofline]:
    """Return times on known GPUs of the least memory that suffices; empty on CPUs. ``check_layout`` first."""
    cluster = job.recipe.cluster
    # Of known GPUs the smallest that has the recipe's memory, perhaps several of that size.
    enough = [gpu.memory_gib for gpu in GPUS if gpu.memory_gib >= cluster.gpu_memory_gib]
    if cluster.device == "cpu" or not enough:
        return []
    return [roofline(job, work, gpu) for gpu in GPUS if gpu.memory_gib == min(enough)]


def roofline(job: Job, work: Workload, gpu: Gpu) -> Roofline:
    recipe, model = job.recipe, job.model
    parallel, rollout, updates = recipe.parallel, recipe.rollout, recipe.loss.minibatches * recipe.loss.epochs
    servers = rollout.engine == "server"
    # Generation. Each decode step reads the weights once and the cache of each sequence.
    engines = len(rollout.servers) if servers else recipe.world_size // rollout.tensor_parallel
    fit = engine.kv_cache(job) / engine.sequence_bytes(job, work.context)
    held = min(work.tracks / engines, rollout.max_num_seqs, fit)
    least = work.share * rollout.max_response_length if work.generated else 0
    # As many as the longest response has tokens in a step, or more where not all fit at once.
    steps = max(least, work.generated / (engines * max(held, 1.0)))
    batch = work.generated / (engines * steps) if steps else 0.0
    compute = EXPERTS if model.experts else DENSE
    read = engine.weights(job) + batch * work.context * engine.kv_bytes_per_token(job)
    computed = batch * forward_flops(model, work.context) / rollout.tensor_parallel
    generation = steps * max(read / (BANDWIDTH * gpu.bandwidth), computed / (compute * gpu.flops))

    # Training. Replicas wait where there is less than a row for each, and while the pipeline fills.
    replicas = recipe.world_size / (parallel.tensor * parallel.pipeline)
    rows = work.trained / (recipe.loss.minibatches * recipe.packing.max_tokens_per_row * replicas)
    # The pipeline's bubble: the time of (stages - 1) rows, a part of it with virtual stages.
    waiting = (parallel.pipeline - 1) / (parallel.virtual_pipeline or 1)
    busy = rows / (max(1.0, rows) + waiting)
    flops = training_flops(job, work.trained, work.context)
    flops += recipe.loss.epochs * work.trained * _recomputed(parallel.recompute, model, work.context)
    computing = flops / (busy * recipe.world_size * compute * gpu.flops)
    buffers = rank_buffers(model, parallel, recipe.world_size, recipe.lora)
    # Gradients are reduced, and updated weights gathered.
    each = BYTES[recipe.optimizer.grad_dtype] + BYTES[recipe.model.dtype]
    sent = updates * each * max(rank.elements for rank in buffers)
    gradients = sent / (NETWORK * gpu.network) if recipe.cluster.nodes > 1 else 0.0
    training = computing + gradients
    # With staleness both go on at the same time.
    seconds = max(generation, training) if rollout.staleness else generation + training
    # More servers help only while the batch decides, not the longest response.
    balanced = math.ceil(engines * generation / training) if rollout.staleness and steps > least else None
    return Roofline(gpu, steps, batch, generation, rows, 1 - busy, training, gradients, seconds, balanced)


def _recomputed(recompute: str, model: ModelConfig, context: float) -> float:
    """Return the FLOPs that a backward pass repeats for a position (``parallel.recompute``)."""
    if recompute == "full":
        return forward_flops(model, context)
    # Two operations a parameter.
    return 2 * active_parameters(model, ".mlp.") if recompute == "mlp" else 0.0

"""Tokens per second and hours per step: estimated from a GPU's data sheet and assumed shares of it, and
achieved by a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_eqlen.hf.config import ModelConfig
from megatron_eqlen.metrics import (
    HARVEST_FLOPS,
    HARVEST_GENERATED_TOKENS,
    HARVEST_MFU,
    HARVEST_TOKENS_PER_GPU,
    PACKING_EXPANDED_TOKENS,
    PACKING_UNIQUE_TOKENS,
    TIME_HARVEST,
    TIME_TRAIN,
    TRAIN_EXPANDED_PER_GPU,
    TRAIN_FLOPS,
    TRAIN_MFU,
    TRAIN_TOKENS_PER_GPU,
)
from megatron_eqlen.packing.simulated import MEDIAN
from megatron_eqlen.plan import engine
from megatron_eqlen.plan.activations import BYTES
from megatron_eqlen.plan.exchange import leaving_share, step_bytes
from megatron_eqlen.plan.flops import (
    active_parameters,
    counted,
    forward_flops,
    training_flops,
    training_passes,
)
from megatron_eqlen.plan.workload import Workload
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.types import Metrics


@dataclass(frozen=True)
class Gpu:
    """Figures of a GPU's data sheet, and assumed shares of them."""

    name: str
    memory_gib: float
    flops: float
    """Dense bfloat16 FLOPs per second."""
    bandwidth: float
    """Memory bandwidth in bytes per second."""
    training: float
    """Share of ``flops`` that training a dense model reaches, recomputation included; an assumption."""
    near: float
    """Bytes per second from GPUs of the same node: NVLink, or PCIe 4.0."""
    far: float
    """Bytes per second from GPUs of other nodes: the GPU's share of the network in its maker's nodes (200 and
    400 Gbit/s InfiniBand per GPU; RTX 4090: 25 Gbit/s); an assumption."""


GPUS = (
    Gpu("RTX 4090", 24, 165e12, 1.01e12, 0.40, 32e9, 3e9),
    Gpu("A100", 80, 312e12, 2.04e12, 0.45, 300e9, 25e9),
    Gpu("H100", 80, 989e12, 3.35e12, 0.33, 450e9, 50e9),
    Gpu("H200", 141, 989e12, 4.8e12, 0.33, 450e9, 50e9),
)
"""Known GPUs; H100 and H200 are SXM modules."""
LINKS = 0.7
"""Share of ``near`` and ``far`` that context-parallel ranks reach; an assumption."""
EXPERTS = 0.4
"""Factor on ``training`` for models with experts: small matrices, token exchange; an assumption."""
DECODING_BANDWIDTH, DECODING_FLOPS = 0.6, 0.4
"""Shares of ``bandwidth`` and ``flops`` that decoding reaches; assumptions."""
STEP_FLOOR = 0.012
"""Minimum seconds of a decode step: scheduling and sampling on the host."""
_REACHED = ", ".join(f"{gpu.training:.0%} ({gpu.name})" for gpu in GPUS)
ASSUMPTIONS = (
    f"training reaches {_REACHED} of the FLOPs, with experts {EXPERTS:.0%} of that;",
    f"decoding {DECODING_BANDWIDTH:.0%} of the bandwidth, a step takes {1e3 * STEP_FLOOR:.0f} ms at least;",
    f"responses are log-normal, their median {MEDIAN:.0%} of the limit; no graders, no evaluations",
)
"""Lines that state the assumptions."""
CONTEXT_ASSUMPTIONS = (
    f"context-parallel ranks compute nothing while they exchange, at {LINKS:.0%} of what links bring,",
    "GB/s in a node and between nodes: "
    + ", ".join(f"{gpu.near / 1e9:.0f} and {gpu.far / 1e9:.0f} ({gpu.name})" for gpu in GPUS),
)
"""Further lines, for context parallelism."""


@dataclass(frozen=True)
class Speed:
    """Estimated speed of one step on ``gpu``."""

    gpu: Gpu
    generation: float
    """Seconds of generation."""
    training: float
    exchange: float
    """Seconds of ``training`` that context-parallel ranks spend on exchanging keys, values and heads."""
    tokens_per_second: float
    """Generated tokens per second of the whole step, over all GPUs."""

    @property
    def seconds(self) -> float:
        return self.generation + self.training


def gpu_named(device: str | None) -> Gpu | None:
    """Return the GPU with the given device name (``NVIDIA H100 80GB HBM3``); None for unknown GPUs and for
    slower cards of the same name (``NVIDIA H100 PCIe``, ``NVIDIA H100 NVL``)."""
    if not device or any(card in device.upper() for card in ("PCIE", "NVL")):
        return None
    return next((gpu for gpu in GPUS if gpu.name in device), None)


def speeds(recipe: Recipe, model: ModelConfig, work: Workload) -> list[Speed]:
    """Return the speeds on the known GPUs with the smallest sufficient memory; empty on CPUs."""
    if recipe.cluster.device == "cpu":
        return []
    enough = [gpu.memory_gib for gpu in GPUS if gpu.memory_gib >= recipe.cluster.gpu_memory_gib]
    return [speed(recipe, model, work, gpu) for gpu in GPUS if enough and gpu.memory_gib == min(enough)]


def speed(recipe: Recipe, model: ModelConfig, work: Workload, gpu: Gpu) -> Speed:
    generation = _generation_seconds(recipe, model, work, gpu)
    exchange = _exchange_seconds(recipe, model, work, gpu)
    training = _computing_seconds(recipe, model, work, gpu) + exchange
    return Speed(gpu, generation, training, exchange, work.generated / (generation + training))


def _computing_seconds(recipe: Recipe, model: ModelConfig, work: Workload, gpu: Gpu) -> float:
    """Return the seconds of training's computation, recomputation included."""
    flops = training_flops(recipe, model, work.trained, work.context)
    if recipe.parallel.recompute == "full":
        flops *= 1 + recipe.loss.epochs / training_passes(recipe)
    reached = gpu.training * (EXPERTS if model.experts else 1.0) * gpu.flops
    return flops / (recipe.world_size * reached)


def _exchange_seconds(recipe: Recipe, model: ModelConfig, work: Workload, gpu: Gpu) -> float:
    """Return the seconds of the exchange, with both kinds of link used in turn."""
    if recipe.parallel.context == 1:
        return 0.0
    far = leaving_share(recipe)
    return step_bytes(recipe, model, work) * (far / gpu.far + (1 - far) / gpu.near) / LINKS


def _generation_seconds(recipe: Recipe, model: ModelConfig, work: Workload, gpu: Gpu) -> float:
    """Return the seconds of all tokens at full batches, or of the longest response's steps if that is
    more."""
    servers = recipe.rollout.engine == "server"
    ranks = recipe.rollout.tensor_parallel
    replicas = len(recipe.rollout.servers) if servers else recipe.world_size // ranks
    batch = max(1.0, min(work.tracks / replicas, engine.sequences_at_once(recipe, model, work.cached)))
    read = _weights_read(recipe, model, batch) + batch * work.context * engine.kv_bytes_per_token(
        recipe, model
    )
    read += 2 * batch * engine.state_bytes_per_sequence(recipe, model)
    flops = batch * forward_flops(model, work.context) / ranks
    step = max(read / (DECODING_BANDWIDTH * gpu.bandwidth), flops / (DECODING_FLOPS * gpu.flops), STEP_FLOOR)
    full = work.generated / (replicas * batch) * step
    return max(full, recipe.rollout.max_response_length * STEP_FLOOR)


def _weights_read(recipe: Recipe, model: ModelConfig, batch: float) -> float:
    """Return the bytes of weights that a decode step reads on one GPU; only experts that a token chose are
    read."""
    all_weights = engine.weights(recipe, model)
    if model.experts is None:
        return all_weights
    share = model.experts.num_experts_per_tok / model.experts.num_experts
    touched = 1 - (1 - share) ** batch
    active = active_parameters(model) * BYTES[recipe.model.dtype] / recipe.rollout.tensor_parallel
    return active + touched * max(all_weights - active, 0.0)


def achieved(recipe: Recipe, model: ModelConfig, metrics: Mapping[str, float], device: str | None) -> Metrics:
    """Return the throughput of a step with the given ``metrics``. ``device``: the GPUs' name; None: a CPU.

    Model FLOPs utilisation divides the model's own FLOPs by the stage's time and the GPU's peak bfloat16
    rate; it is reported only for known GPUs. Rates are tokens per second and GPU;
    training has two: each token of a tree once, and every side with its own copy of the prefix.
    """
    flops = counted(recipe, model, metrics)
    gpu = gpu_named(device)
    engine = recipe.gpus - recipe.world_size if recipe.rollout.engine == "server" else recipe.world_size
    found: Metrics = dict(flops)
    if (training := metrics.get(TIME_TRAIN, 0.0) * recipe.world_size) > 0:
        epochs = recipe.loss.epochs
        found[TRAIN_TOKENS_PER_GPU] = epochs * metrics.get(PACKING_UNIQUE_TOKENS, 0.0) / training
        found[TRAIN_EXPANDED_PER_GPU] = epochs * metrics.get(PACKING_EXPANDED_TOKENS, 0.0) / training
        if gpu is not None:
            found[TRAIN_MFU] = flops[TRAIN_FLOPS] / (training * gpu.flops)
    if (harvest := metrics.get(TIME_HARVEST, 0.0) * engine) > 0 and flops[HARVEST_FLOPS]:
        found[HARVEST_TOKENS_PER_GPU] = metrics.get(HARVEST_GENERATED_TOKENS, 0.0) / harvest
        if gpu is not None:
            found[HARVEST_MFU] = flops[HARVEST_FLOPS] / (harvest * gpu.flops)
    return found

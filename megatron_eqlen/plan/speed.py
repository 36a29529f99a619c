"""Tokens per second and hours per step: estimated from a GPU's data sheet, and achieved by a step.

The estimate divides the work of each part by the rate on the data sheet times the share of it that is reached
(``Reached``). The shares are fitted to public measurements; ``tools/bench.py speed`` repeats the fit and
prints the errors on measurements that were not fitted. For a GPU of P FLOPs and W bytes per second:

    step = generation + training          (with rollout.staleness: the larger of the two)
    training = bubble / P (linear FLOPs / share + attention FLOPs / (share attention))
               + exchanged bytes / (link rate x links) + updates on the host
    bubble = (max(1, rows) + (PP - 1) / virtual stages) / rows        (rows per update and replica)
    generation = steps x decode(1) + tokens / batch x (decode(batch) - decode(1))
                 + prefill FLOPs / (P decoding)
    decode(batch) = floor + max(bytes read / (W bandwidth), FLOPs / (P decoding)) + all-reduces

``share``: ``ampere`` or ``hopper``. Models with experts: linear FLOPs and the maximum in decoding are divided
by ``experts`` as well. ``steps``: the longest response, and the rounds before it if the KV cache does not
hold all tracks. Exchanged: tensor, context and expert parallelism, and gradients, which
``parallel.overlap_grad_reduce`` hides. Graders, weight syncs, parking and checkpoints are not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import exp
from typing import Literal

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
from megatron_eqlen.packing.simulated import MEDIAN, repeated_share
from megatron_eqlen.plan import engine
from megatron_eqlen.plan.activations import BYTES
from megatron_eqlen.plan.exchange import exchanges
from megatron_eqlen.plan.flops import (
    active_parameters,
    counted,
    forward_flops,
    frozen_passes,
    training_passes,
)
from megatron_eqlen.plan.parameters import rank_buffers
from megatron_eqlen.plan.workload import Workload
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.types import Metrics


@dataclass(frozen=True)
class Gpu:
    """Figures of a GPU's data sheet."""

    name: str
    memory_gib: float
    flops: float
    """Dense bfloat16 FLOPs per second."""
    bandwidth: float
    """Memory bandwidth in bytes per second."""
    generation: Literal["ampere", "hopper"]
    """Field of ``Reached`` with the share of ``flops`` that training reaches; Ada counts as Ampere, which
    no measurement supports."""
    near: float
    """Bytes per second from GPUs of the same node: NVLink, or PCIe 4.0."""
    far: float
    """Bytes per second from GPUs of other nodes: the GPU's share of the network in its maker's nodes (200 and
    400 Gbit/s InfiniBand per GPU; RTX 4090: 25 Gbit/s); an assumption."""


GPUS = (
    Gpu("RTX 4090", 24, 165e12, 1.01e12, "ampere", 32e9, 3e9),
    Gpu("A100", 80, 312e12, 2.04e12, "ampere", 300e9, 25e9),
    Gpu("H100", 80, 989e12, 3.35e12, "hopper", 450e9, 50e9),
    Gpu("H200", 141, 989e12, 4.8e12, "hopper", 450e9, 50e9),
)
"""Known GPUs; H100 and H200 are SXM modules."""


@dataclass(frozen=True)
class Reached:
    """Shares of the data sheet that are reached."""

    ampere: float
    """Share of the FLOPs that matrices reach in training, recomputation included, on A100."""
    hopper: float
    """The same on H100 and H200."""
    experts: float
    """Factor on that share, and on the speed of decoding, for models with experts."""
    attention: float
    """Factor on that share for attention."""
    links: float
    """Share of the links' rate; high, because others overlap part of the exchange."""
    bandwidth: float
    """Share of the memory bandwidth in decoding."""
    decoding: float
    """Share of the FLOPs in decoding and prefilling."""
    floor: float
    """Seconds of a decode step beyond reading and computing: scheduling, sampling, launches."""


REACHED = Reached(
    ampere=0.58,
    hopper=0.4,
    experts=0.61,
    attention=0.49,
    links=1.0,
    bandwidth=0.59,
    decoding=0.63,
    floor=0.001,
)
"""The fit to half of ``tools/benchmarks/measurements.yaml`` (``tools/bench.py speed``)."""
INTERVAL = 0.47
"""90% quantile of |log(estimate / measured)|, each source estimated by a fit to the others."""
ALL_REDUCE, FAR_ALL_REDUCE = 10e-6, 50e-6
"""Seconds of a small all-reduce among an engine's ranks, in a node and across nodes; assumptions."""
HOST_UPDATE = 2.9e-9
"""Seconds of Adam on the host per parameter of a rank: 9.6 s for 106B parameters on 32 ranks
(github.com/THUDM/slime, issue 1139)."""


def interval(value: float) -> tuple[float, float]:
    """Return the interval around an estimate in which nine of ten measurements of other software lie."""
    return value * exp(-INTERVAL), value * exp(INTERVAL)


ASSUMPTIONS = (
    "[in brackets]: nine of ten public measurements lie there under a fit to other sources; none is ours",
    f"fitted: training {REACHED.ampere:.0%} (A100) and {REACHED.hopper:.0%} (H100) of the FLOPs, attention "
    f"{REACHED.attention:.0%} and experts {REACHED.experts:.0%} of that;",
    f"links {REACHED.links:.0%}; decoding {REACHED.bandwidth:.0%} of the bandwidth or {REACHED.decoding:.0%} "
    f"of the FLOPs, and {1e3 * REACHED.floor:.0f} ms a step",
    f"assumed: responses log-normal, median {MEDIAN:.0%} of the limit; no graders, weight syncs, evaluations",
)
"""Lines that state the fit and the assumptions."""


@dataclass(frozen=True)
class Decoding:
    """Work of a decode step of an engine: seconds at the rates of the data sheet."""

    experts: bool
    reading: float
    computing: float
    exchange: float
    latency: float

    def seconds(self, reached: Reached) -> float:
        work = max(self.reading / reached.bandwidth, self.computing / reached.decoding)
        work /= reached.experts if self.experts else 1.0
        return reached.floor + work + self.exchange / reached.links + self.latency


@dataclass(frozen=True)
class Demand:
    """Work of one step of training: seconds at the rates of the data sheet."""

    gpu: Gpu
    experts: bool
    linear: float
    """Training's FLOPs without attention, recomputation and pipeline bubble included."""
    attention: float
    exchange: dict[str, float]
    """Exchange by kind: ``tensor``, ``context``, ``experts``, ``gradients``."""
    hidden: bool
    """True if gradients are exchanged during the backward pass."""
    host: float
    """Seconds of updates on the host."""
    steps: float
    """Decode steps of an engine."""
    full_steps: float
    """Decode steps of an engine if all were at full batches."""
    full: Decoding
    """A step at full batch."""
    single: Decoding
    """A step with one sequence."""
    prefill: float

    def generation(self, reached: Reached) -> float:
        single = self.single.seconds(reached)
        more = max(0.0, self.full.seconds(reached) - single)
        return self.steps * single + self.full_steps * more + self.prefill / reached.decoding

    def training(self, reached: Reached) -> float:
        share = getattr(reached, self.gpu.generation)
        dense = share * (reached.experts if self.experts else 1.0)
        computing = self.linear / dense + self.attention / (share * reached.attention)
        exchange = {kind: seconds / reached.links for kind, seconds in self.exchange.items()}
        gradients = exchange.pop("gradients", 0.0)
        exposed = max(0.0, gradients - computing) if self.hidden else gradients
        return computing + sum(exchange.values()) + exposed + self.host


@dataclass(frozen=True)
class Speed:
    """Estimated speed of one step on ``gpu``."""

    gpu: Gpu
    generation: float
    """Seconds of generation."""
    training: float
    exchange: dict[str, float]
    """Seconds of ``training`` that ranks exchange, by kind (see ``Demand``)."""
    seconds: float
    tokens_per_second: float
    """Generated tokens per second of the whole step, over all GPUs."""


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


def speed(recipe: Recipe, model: ModelConfig, work: Workload, gpu: Gpu, reached: Reached = REACHED) -> Speed:
    need = demand(recipe, model, work, gpu)
    generation, training = need.generation(reached), need.training(reached)
    overlap = recipe.rollout.staleness > 0
    seconds = max(generation, training) if overlap else generation + training
    exchange = {kind: seconds / reached.links for kind, seconds in need.exchange.items()}
    return Speed(gpu, generation, training, exchange, seconds, work.generated / seconds)


def demand(recipe: Recipe, model: ModelConfig, work: Workload, gpu: Gpu) -> Demand:
    """Return the work of a step. Call ``layout.check`` first."""
    work = _packed(recipe, work)
    servers = recipe.rollout.engine == "server"
    engines = len(recipe.rollout.servers) if servers else recipe.world_size // recipe.rollout.tensor_parallel
    held = max(1.0, min(work.tracks / engines, engine.sequences_at_once(recipe, model, work.cached)))
    rounds = work.tracks / (engines * held)  # the last one runs until its longest response ends
    steps = max(0.0, rounds - 1) * work.generated / work.tracks + recipe.rollout.max_response_length
    per_gpu = bubble(recipe, work) / (recipe.world_size * gpu.flops)
    linear, attention = _training_flops(recipe, model, work)
    prefill = work.prompts * forward_flops(model, recipe.data.max_prompt_length / 2)
    exchange = exchanges(recipe, model, work).items()
    return Demand(
        gpu,
        model.experts is not None,
        linear * per_gpu,
        attention * per_gpu,
        {kind: size.far / gpu.far + size.near / gpu.near for kind, size in exchange},
        recipe.parallel.overlap_grad_reduce,
        _host_update(recipe, model),
        steps,
        work.generated / (engines * held),
        decoding(recipe, model, gpu, held, work.context),
        decoding(recipe, model, gpu, 1.0, work.context),
        prefill / (engines * recipe.rollout.tensor_parallel * gpu.flops),
    )


def _packed(recipe: Recipe, work: Workload) -> Workload:
    """Count the trunks that rows repeat because they are shorter than a tree."""
    if recipe.sampling != "equal_length" or recipe.packing.layout != "tree":
        return work
    limit, prompt = recipe.rollout.max_response_length, recipe.data.max_prompt_length
    repeated = _repeated_share(recipe.packing.max_tokens_per_row, limit, prompt)
    return replace(work, trained=work.trained / (1 - repeated))


_repeated_share = cache(repeated_share)


def _training_flops(recipe: Recipe, model: ModelConfig, work: Workload) -> tuple[float, float]:
    """Return the FLOPs of training, recomputation included: without attention, and of attention."""
    passes = training_passes(recipe)
    again = {"none": (0, 0), "selective": (0, 1), "full": (1, 1)}[recipe.parallel.recompute]
    linear = forward_flops(model, 0.0)
    each = linear, forward_flops(model, work.context) - linear
    first, second = (
        work.trained * (passes + more * recipe.loss.epochs) * flops
        for more, flops in zip(again, each, strict=True)
    )
    return first - frozen_passes(recipe) * work.trained * linear, second


def bubble(recipe: Recipe, work: Workload) -> float:
    """Return the time of the pipelines over that of evenly divided work without waiting. Data-parallel
    replicas without a row wait for those with one."""
    parallel = recipe.parallel
    replicas = recipe.world_size / (parallel.tensor * parallel.context * parallel.pipeline)
    rows = work.trained / (recipe.loss.minibatches * recipe.packing.max_tokens_per_row * replicas)
    return (max(1.0, rows) + (parallel.pipeline - 1) / (parallel.virtual_pipeline or 1)) / rows


def _host_update(recipe: Recipe, model: ModelConfig) -> float:
    if not recipe.optimizer.offload:
        return 0.0
    shard = max(rank.shard for rank in rank_buffers(model, recipe.parallel, recipe.world_size, recipe.lora))
    return recipe.loss.minibatches * recipe.loss.epochs * shard * HOST_UPDATE


def decoding(recipe: Recipe, model: ModelConfig, gpu: Gpu, batch: float, context: float) -> Decoding:
    """Return the work of a decode step of ``batch`` sequences that see ``context`` tokens."""
    ranks, inside = recipe.rollout.tensor_parallel, recipe.cluster.processes_per_node
    cached = batch * context * engine.kv_bytes_per_token(recipe, model)
    state = 2 * batch * engine.state_bytes_per_sequence(recipe, model)
    reduced = 4 * model.num_hidden_layers * batch * model.hidden_size * BYTES[recipe.model.dtype]
    link, latency = (gpu.near, ALL_REDUCE) if ranks <= inside else (gpu.far, FAR_ALL_REDUCE)
    return Decoding(
        model.experts is not None,
        (_weights_read(recipe, model, batch) + cached + state) / gpu.bandwidth,
        batch * forward_flops(model, context) / (ranks * gpu.flops),
        reduced * (ranks - 1) / ranks / link,
        2 * model.num_hidden_layers * latency if ranks > 1 else 0.0,
    )


def _weights_read(recipe: Recipe, model: ModelConfig, batch: float) -> float:
    """Return the bytes of weights that a decode step reads on one GPU; only experts that a token chose are
    read."""
    total, ranks = engine.weights(recipe, model), recipe.rollout.tensor_parallel
    active = active_parameters(model) / ranks * total / engine.parameters(model, ranks)
    if model.experts is None or total <= active:
        return total
    share = model.experts.num_experts_per_tok / model.experts.num_experts
    touched = 1 - (1 - share) ** batch
    return active + (touched - share) / (1 - share) * (total - active)


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

"""Floating-point operations of a forward pass, from the model's shapes, and of a step, from its tokens, and
the rates of known GPUs, for plans and runs. Only the model's own work counts, so the same tokens give the
same number on any machine: no recomputation, of activations or after cache evictions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import prod

from megatron_eqlen.hf.config import ModelConfig
from megatron_eqlen.hf.families import weight_map
from megatron_eqlen.job import Job
from megatron_eqlen.types import Metrics


@dataclass(frozen=True)
class Gpu:
    name: str
    memory_gib: float
    flops: float
    """Dense bfloat16 FLOPs per second."""
    bandwidth: float
    """Memory bandwidth in bytes per second."""
    network: float
    """Bytes per second from other nodes: the GPU's share of the network in its maker's nodes (200 and 400
    Gbit/s InfiniBand; RTX 4090: 25 Gbit/s); an assumption."""


GPUS = (
    Gpu("RTX 4090", 24, 165e12, 1.01e12, 3e9),
    Gpu("A100", 80, 312e12, 2.04e12, 25e9),
    Gpu("H100", 80, 989e12, 3.35e12, 50e9),
    Gpu("H200", 141, 989e12, 4.8e12, 50e9),
)
"""Known GPUs; H100 and H200 are SXM modules."""


def gpu_named(device: str | None) -> Gpu | None:
    """Return the GPU with this device name (``NVIDIA H100 80GB HBM3``); None for unknown GPUs and for slower
    cards of the same name (``NVIDIA H100 PCIe``, ``NVIDIA H100 NVL``)."""
    if not device or any(card in device.upper() for card in ("PCIE", "NVL", "4090 D", "LAPTOP")):
        return None
    # Whole words: an RTX A1000 is no A100.
    return next((gpu for gpu in GPUS if f" {gpu.name} " in f" {device.replace('-', ' ')} "), None)


@cache
def active_parameters(model: ModelConfig, part: str = "") -> float:
    """Return the parameters that compute one token: all but the embedding table and the experts that it is
    not routed to. ``part``: count only tensors with this in their name in Megatron-Core."""
    routed = model.experts.num_experts_per_tok / model.experts.num_experts if model.experts else 1.0
    return sum(
        sum(prod(shape) for shape in weight.shapes) * (1.0 if weight.expert is None else routed)
        for weight in weight_map(model)
        # A tied embedding is also the head, which computes; an untied one is only looked up.
        if (model.tie_word_embeddings or not weight.megatron.startswith("embedding."))
        and part in weight.megatron
    )


def attention_layers(model: ModelConfig) -> int:
    """Return the number of layers whose cost grows with the context (not those with a fixed state)."""
    return model.num_hidden_layers - (sum(model.delta_net.layers) if model.delta_net else 0)


def forward_flops(model: ModelConfig, context: float) -> float:
    """Return the forward pass's operations for a token that sees ``context`` tokens: 2 x active parameters, 4
    x layers x heads x head_dim per pair, nothing for Gated DeltaNet's recurrence."""
    # A query times a key and a weight times a value: two products, of 2 x head_dim operations each.
    pairs = 4 * attention_layers(model) * model.num_attention_heads * model.head_dim
    return 2 * active_parameters(model) + pairs * context


def pair_cost(model: ModelConfig) -> float:
    """Return the cost of a visible (query, key) pair in all attention layers relative to a position in all
    linear layers: 4 x layers x heads x head_dim over 2 x active parameters."""
    return 2 * attention_layers(model) * model.num_attention_heads * model.head_dim / active_parameters(model)


def training_passes(job: Job) -> float:
    """Return forward passes a position: forward, backward (two), reference and old log-probs."""
    loss = job.recipe.loss
    # With one update the log-probs before it are those of the update itself.
    old = job.objective.has_ratio and loss.minibatches * loss.epochs > 1
    return 3.0 * loss.epochs + (loss.kl_coef > 0) + old


def training_flops(job: Job, trained: float, context: float) -> float:
    """Return the FLOPs of training ``trained`` positions beside ``context``, without frozen gradients."""
    loss, model = job.recipe.loss, job.model
    # Gradients of frozen weights would be as many operations as the linear layers' forward pass.
    frozen = loss.epochs * forward_flops(model, context=0.0) if job.recipe.lora.rank else 0.0
    teacher = forward_flops(job.teacher.model, context) if job.teacher else 0.0
    return trained * (training_passes(job) * forward_flops(model, context) - frozen + teacher)


def counted(job: Job, metrics: Mapping[str, float]) -> Metrics:
    """Return a step's FLOPs, from its metrics; replayed rollouts count no generation."""
    of = defaultdict(float, metrics)
    generated = of["harvest/generated_tokens"] * forward_flops(job.model, of["harvest/context"])
    prefilled = of["harvest/prefilled_tokens"] * forward_flops(job.model, of["harvest/prefill_context"])
    trained = training_flops(job, of["packing/tokens"], of["packing/context"])
    return {"harvest/flops": generated + prefilled, "train/flops": trained}


def achieved(job: Job, metrics: Mapping[str, float], device: str | None) -> Metrics:
    """Return the throughput of a step with these ``metrics``. ``device``: the GPUs' name; None: a CPU.

    Model FLOPs utilisation divides the model's own FLOPs by the stage's time and the GPU's peak bfloat16
    rate, for known GPUs only. Rates are tokens per second and GPU; training has two: each token of a tree
    once, and every side with its own copy of the prefix.
    """
    recipe, of, flops, gpu = job.recipe, defaultdict(float, metrics), counted(job, metrics), gpu_named(device)
    # GPUs that generate: the servers', or the trainer's own.
    engine = recipe.gpus - recipe.world_size if recipe.rollout.engine == "server" else recipe.world_size
    reached: Metrics = dict(flops)
    if (training := of["time/train"] * recipe.world_size) > 0:
        epochs = recipe.loss.epochs
        reached["train/tokens_per_gpu_second"] = epochs * of["packing/unique_tokens"] / training
        reached["train/expanded_tokens_per_gpu_second"] = epochs * of["packing/expanded_tokens"] / training
        if gpu is not None:
            reached["train/mfu"] = flops["train/flops"] / (training * gpu.flops)
    if (harvest := of["time/harvest"] * engine) > 0 and flops["harvest/flops"]:
        generated = of["harvest/generated_tokens"]
        # Tokens of an attempt that was killed took none of this stage's time.
        new = generated - of["harvest/resumed_tokens"]
        reached["harvest/tokens_per_gpu_second"] = new / harvest
        if gpu is not None:
            # FLOPs are of all tokens, so only the new ones' share counts.
            reached["harvest/mfu"] = flops["harvest/flops"] * new / (generated or 1) / (harvest * gpu.flops)
    return reached

"""The policy loss of every objective: a plain weighted sum over supervised tokens.

    loss = sum_t weight_t x (importance_t x policy_t + kl_coef x kl_t)

``policy_t`` is the clipped (or soft, or plain) surrogate of the token's advantage, ``kl_t`` the estimate of
the divergence from the reference model, ``importance_t`` the truncated correction of the train-inference
mismatch. The weights hold every averaging factor, so the number is the same for any packing, micro-batch
split and parallel layout; nothing is divided here, and nothing may be divided after. All arithmetic is
float64: a row has few numbers, and sums over rows then differ by round-off only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_eqlen.objectives.objective import Objective
from megatron_eqlen.recipe import LossRecipe
from megatron_eqlen.types import Metrics

VESPO_LOG_LIMIT = 20.0
"""VESPO clamps the log of a sequence's importance weight to +-20."""


@dataclass(frozen=True)
class LossMetrics:
    """What one row adds to a step's metrics. Every row has the same names in the same order."""

    tokens: torch.Tensor
    """Supervised tokens: the denominator of every mean."""
    means: dict[str, torch.Tensor]
    """Sums over supervised tokens."""
    totals: dict[str, torch.Tensor]
    """Weighted sums: parts of the loss."""
    maxima: dict[str, torch.Tensor]
    """-inf for a row without supervised tokens."""


def policy_loss(
    logprobs: torch.Tensor,
    entropy: torch.Tensor,
    *,
    weights: torch.Tensor,
    advantages: torch.Tensor,
    segment_ids: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    objective: Objective,
    loss: LossRecipe,
    old_logprobs: torch.Tensor | None = None,
    ref_logprobs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, LossMetrics]:
    """The row's part of the loss (a float64 scalar with gradient) and of the metrics.

    All tensors are [n]: a row's positions, or any of them that include the supervised ones (weight > 0). Only
    those are looked at. A segment lies whole in one row. ``old_logprobs`` None: this is the batch's first
    and only update, the policy is the old policy. ``ref_logprobs`` are needed where ``loss.kl_coef > 0``.
    """
    if loss.kl_coef and ref_logprobs is None:
        raise ValueError(f"loss.kl_coef: {loss.kl_coef} needs the reference model's log-probs, found none")
    at = weights > 0
    logp, entropy, weights, advantages, rollout = (
        x[at].double() for x in (logprobs, entropy, weights, advantages, rollout_logprobs)
    )
    segments = _Segments(segment_ids[at])
    recomputed = logp.detach() if old_logprobs is None else old_logprobs[at].double()
    old = rollout if loss.old_logprobs == "rollout" else recomputed
    policy, ratios = _surrogate(logp, old, advantages, segments, objective)
    importance, mismatch = _importance(recomputed, rollout, segments, loss)
    kl = _kl(logp, ref_logprobs[at].double(), loss) if loss.kl_coef else torch.zeros_like(logp)
    policy_sum, kl_sum = (weights * importance * policy).sum(), loss.kl_coef * (weights * kl).sum()
    with torch.no_grad():
        means = {
            "loss/entropy": entropy,
            "loss/ref_kl": kl,
            "loss/policy_kl": old - logp,
            **ratios,
            **mismatch,
        }
        metrics = LossMetrics(
            tokens=torch.tensor(float(len(logp)), dtype=torch.float64, device=logp.device),
            means={name: values.detach().double().sum() for name, values in means.items()},
            totals={"loss/policy": policy_sum.detach().clone(), "loss/kl_penalty": kl_sum.detach().clone()},
            maxima={
                "loss/ratio_max": _largest(ratios["loss/ratio"]),
                "loss/mismatch_max": _largest((rollout - recomputed).abs()),
            },
        )
    return policy_sum + kl_sum, metrics


def reduce_metrics(rows: Sequence[LossMetrics], group: dist.ProcessGroup | None = None) -> Metrics:
    """The step's metrics from all rows of all ranks of ``group`` (data parallel; None: this rank's only)."""
    means, totals, maxima = rows[0].means, rows[0].totals, rows[0].maxima
    sums = torch.stack([torch.stack([r.tokens, *r.means.values(), *r.totals.values()]) for r in rows]).sum(0)
    peaks = torch.stack([torch.stack(list(r.maxima.values())) for r in rows]).amax(0)
    if group is not None:
        dist.all_reduce(sums, group=group)
        dist.all_reduce(peaks, dist.ReduceOp.MAX, group=group)
    tokens, *values = sums.tolist()
    metrics = dict(zip([*means, *totals], values, strict=True))
    metrics |= {name: metrics[name] / tokens if tokens else 0.0 for name in means}
    metrics |= {name: value if tokens else 0.0 for name, value in zip(maxima, peaks.tolist(), strict=True)}
    metrics["loss/total"] = sum(metrics[name] for name in totals)
    metrics["loss/tokens"] = tokens
    return metrics


class _Segments:
    """Sums over the tokens of each segment, given back to every token of it."""

    def __init__(self, segment_ids: torch.Tensor) -> None:
        _, self.number, counts = torch.unique(segment_ids, return_inverse=True, return_counts=True)
        self.count = len(counts)
        self.length = counts[self.number]

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        return values.new_zeros(self.count).index_add(0, self.number, values)[self.number]


def _surrogate(
    logp: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, segments: _Segments, objective: Objective
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """[n] loss of each token before its weight, and the ratio's metrics."""
    log_ratio = logp - old
    if objective.ratio == "sequence":
        log_ratio = segments.sum(log_ratio) / segments.length
    if objective.ratio == "vespo":
        log_ratio = segments.sum(log_ratio).clamp(-VESPO_LOG_LIMIT, VESPO_LOG_LIMIT)
    ratio = log_ratio.exp()
    metrics = {"loss/ratio": ratio, "loss/ratio_deviation": (ratio - 1).abs()}
    if objective.ratio == "none":
        return -advantages * logp, metrics
    if objective.ratio == "vespo":
        kernel = _vespo_kernel(log_ratio.detach(), advantages, objective)
        return -kernel * advantages * logp, metrics | {"loss/vespo_kernel": kernel}
    policy, clips = _clipped(ratio, advantages, objective)
    return policy, metrics | clips


def _clipped(
    ratio: torch.Tensor, advantages: torch.Tensor, objective: Objective
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """PPO's pessimistic minimum with separate bounds, and the dual clip below it."""
    low, high = 1 - objective.clip_ratio_low, 1 + objective.clip_ratio_high
    policy = torch.maximum(-ratio * advantages, -ratio.clamp(low, high) * advantages)
    dual = torch.zeros_like(advantages, dtype=torch.bool)
    if objective.clip_ratio_c is not None:
        ceiling = -objective.clip_ratio_c * advantages
        dual = (advantages < 0) & (policy > ceiling)
        policy = torch.where(dual, ceiling, policy)
    return policy, {
        "loss/clip_fraction_low": (advantages < 0) & (ratio < low),
        "loss/clip_fraction_high": (advantages > 0) & (ratio > high),
        "loss/clip_fraction_dual": dual,
    }


def _vespo_kernel(log_weight: torch.Tensor, advantages: torch.Tensor, objective: Objective) -> torch.Tensor:
    """phi(W) = W^k exp(lambda (1 - W)), with its own (k, lambda) for each sign of the advantage."""
    (k_plus, lam_plus), (k_minus, lam_minus) = objective.vespo_positive, objective.vespo_negative
    positive = advantages >= 0
    k = torch.where(positive, k_plus, k_minus)
    lam = torch.where(positive, lam_plus, lam_minus)
    return (k * log_weight + lam * (1 - log_weight.exp())).exp()


def _importance(
    trainer: torch.Tensor, rollout: torch.Tensor, segments: _Segments, loss: LossRecipe
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """[n] truncated importance weights min(pi_trainer / pi_rollout, threshold), and mismatch metrics."""
    log_weight = trainer - rollout
    metrics = {"loss/mismatch_kl": -log_weight, "loss/mismatch_mean": log_weight.abs()}
    if loss.rollout_is == "none":
        return torch.ones_like(log_weight), metrics
    if loss.rollout_is == "sequence":
        log_weight = segments.sum(log_weight)
    limit = math.log(loss.rollout_is_threshold)
    weight = log_weight.clamp(max=limit).exp()
    return weight, metrics | {"loss/is_weight": weight, "loss/is_truncated_fraction": log_weight > limit}


def _kl(logp: torch.Tensor, ref: torch.Tensor, loss: LossRecipe) -> torch.Tensor:
    """[n] estimates of KL(policy || reference) at the sampled tokens."""
    difference = ref - logp
    if loss.kl_estimator == "k1":
        return -difference
    if loss.kl_estimator == "k2":
        return difference.square() / 2
    return difference.exp() - difference - 1


def _largest(values: torch.Tensor) -> torch.Tensor:
    return values.max() if len(values) else values.new_tensor(-torch.inf)

"""Policy loss of every objective: a plain weighted sum over supervised tokens.

    loss = sum_t weight_t x (importance_t x policy_t + kept_t x kl_coef x kl_t)

``policy_t`` is the clipped (or soft, or plain) surrogate of the token's advantage, ``kl_t`` the estimate of
the divergence from the reference model, ``importance_t`` and ``kept_t`` the correction of the train-inference
mismatch (``mismatch``). The weights hold every averaging factor, so the number is the same for any packing,
micro-batch split and parallel layout; nothing is divided here, and nothing may be divided after. All
arithmetic is float64: a row has few numbers, and sums over rows then differ by round-off only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_eqlen.metrics import (
    COMPARED,
    KL_PENALTY,
    LOSS,
    LOSS_CLIP_FRACTION_HIGH,
    LOSS_CLIP_FRACTION_LOW,
    LOSS_ENTROPY,
    LOSS_RATIO,
    LOSS_REF_KL,
    MISMATCH_OF_COMPARED,
    POLICY_LOSS,
    RATIO_QUANTILES,
    TOKENS,
    Mean,
    metric,
)
from megatron_eqlen.objectives.objective import Objective
from megatron_eqlen.recipe import LossRecipe
from megatron_eqlen.training import log_ratios
from megatron_eqlen.training.mismatch import correct
from megatron_eqlen.training.segments import Segments
from megatron_eqlen.types import Metrics

EXPONENT_LIMIT = 20.0
"""Bound of log-ratios and of the exponent of k3, +-20 as in verl (core_algos.py): e^20 is far beyond any clip
range, and no loss overflows. The gradient is 0 there. VESPO bounds the log of a sequence's weight in the same
way."""


@dataclass(frozen=True)
class RowLoss:
    """Loss and metrics of one row. Every row has the same metrics in the same order."""

    metrics: dict[str, torch.Tensor]
    """Row's value of each metric: a sum over its tokens, or its maximum (-inf without supervised tokens)."""
    tokens: torch.Tensor
    """[n] float64: contribution of each supervised token to the loss."""
    log_ratio: torch.Tensor
    """[n] float64: the trainer's log-prob minus the engine's, for each supervised token."""
    compared: torch.Tensor
    """[n] bool: both log-probs belong to the same weights."""


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
    compared: torch.Tensor | None = None,
) -> tuple[torch.Tensor, RowLoss]:
    """Return the row's part of the loss (a float64 scalar with gradient) and of the metrics.

    All tensors are [n]: a row's positions, or any of them that include the supervised positions (weight > 0).
    Only supervised positions are read. A segment lies in one row. ``old_logprobs`` None: the first and only
    update of the batch, so the policy is the old policy. ``ref_logprobs`` are needed if ``loss.kl_coef > 0``.
    ``compared``, bool: tokens that the policy's own weights sampled; None: all.
    """
    # supervised positions
    at = weights > 0
    logp, entropy, weights, advantages, rollout = (
        x[at].double() for x in (logprobs, entropy, weights, advantages, rollout_logprobs)
    )
    segments = Segments(segment_ids[at])
    # ratio, policy loss and KL penalty
    recomputed = logp.detach() if old_logprobs is None else old_logprobs[at].double()
    old = rollout if loss.old_logprobs == "rollout" else recomputed
    correction = correct(recomputed, rollout, segments, loss)
    log_ratio = _log_ratio(logp, old, correction.kept, segments, objective)
    policy, ratios = _surrogate(logp, log_ratio, advantages, objective)
    kl, kl_clamped = 0 * weights, 0 * weights
    if loss.kl_coef:
        if ref_logprobs is None:
            raise ValueError(f"loss.kl_coef: {loss.kl_coef} needs the reference's log-probs, found none")
        kl, kl_clamped = _kl(logp, ref_logprobs[at].double(), loss)
    # weighted sums
    policy_part, kl_part = weights * correction.importance * policy, weights * correction.kept * kl
    policy_sum, kl_sum = policy_part.sum(), loss.kl_coef * kl_part.sum()
    with torch.no_grad():
        metrics = {
            TOKENS: torch.ones_like(logp),
            LOSS_ENTROPY: entropy,
            LOSS_REF_KL: kl,
            "loss/kl_clamped_fraction": kl_clamped,
            "loss/policy_kl": old - logp,
            "loss/ratio_max": ratios[LOSS_RATIO],
            **ratios,
            **correction.metrics,
        }
        same = torch.ones_like(at)[at] if compared is None else compared[at]
        if compared is not None:
            metrics |= {COMPARED: same.double(), MISMATCH_OF_COMPARED: correction.log_ratio.abs() * same}
        of_row = {name: _of_row(name, values) for name, values in metrics.items()}
        of_row |= {POLICY_LOSS: policy_sum.detach().clone(), KL_PENALTY: kl_sum.detach().clone()}
        tokens = policy_part.detach() + loss.kl_coef * kl_part.detach()
        row = RowLoss(of_row, tokens, correction.log_ratio, same)
    return policy_sum + kl_sum, row


def reduce_metrics(rows: Sequence[RowLoss], group: dist.ProcessGroup | None = None) -> Metrics:
    """Return the step's metrics from all rows of all ranks of ``group`` (data parallel; None: this rank's
    only)."""
    names = list(rows[0].metrics)
    values = torch.stack([torch.stack(list(row.metrics.values())) for row in rows])
    sums, peaks = values.sum(0), values.nan_to_num(torch.inf, torch.inf, -torch.inf).amax(0)  # MAX drops NaN
    counts = log_ratios.count(torch.cat([row.log_ratio for row in rows]))
    if group is not None:
        dist.all_reduce(counts, group=group)
        dist.all_reduce(sums, group=group)
        dist.all_reduce(peaks, dist.ReduceOp.MAX, group=group)
    totals = dict(zip(names, sums.tolist(), strict=True))
    totals[LOSS] = totals[POLICY_LOSS] + totals[KL_PENALTY]
    largest = dict(zip(names, peaks.tolist(), strict=True))
    if not totals[TOKENS]:
        return dict.fromkeys((*totals, *(ratio.name for ratio in RATIO_QUANTILES.values())), 0.0)
    quantiles = {
        ratio.name: math.exp(log_ratios.quantile(counts, at)) for at, ratio in RATIO_QUANTILES.items()
    }
    return {name: _merged(name, totals, largest) for name in totals} | quantiles


def _merged(name: str, totals: Metrics, largest: Metrics) -> float:
    way = metric(name).merge
    if isinstance(way, Mean):
        return totals[name] / (sum(totals[count] for count in way.counts) or 1.0)  # 0 if nothing was compared
    return largest[name] if way == "max" else totals[name]


def _of_row(name: str, values: torch.Tensor) -> torch.Tensor:
    return _largest(values) if metric(name).merge == "max" else values.detach().double().sum()


def _log_ratio(
    logp: torch.Tensor, old: torch.Tensor, kept: torch.Tensor, segments: Segments, objective: Objective
) -> torch.Tensor:
    """Return [n] log-ratios that multiply each token's advantage. Rejected tokens (``kept`` 0) are excluded
    from the mean or sum of their segment, as in verl, which multiplies its response mask by the rejection
    mask first."""
    log_ratio = logp - old
    if objective.ratio not in ("sequence", "vespo"):
        return log_ratio
    total = segments.sum(log_ratio.masked_fill(kept == 0, 0.0))
    if objective.ratio == "vespo":
        return total
    mean = total / segments.sum(kept).clamp(min=1)  # a segment may have no kept token
    return mean.detach() + (logp - logp.detach())  # GSPO-token: the mean's value, each token's own gradient


def _surrogate(
    logp: torch.Tensor, log_ratio: torch.Tensor, advantages: torch.Tensor, objective: Objective
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return [n] the loss of each token before its weight, and the ratio's metrics."""
    log_ratio, clamped = _clamp(log_ratio)
    ratio = log_ratio.exp()
    metrics = {
        LOSS_RATIO: ratio,
        "loss/ratio_deviation": (ratio - 1).abs(),
        "loss/ratio_clamped_fraction": clamped,
    }
    if objective.ratio == "none":
        return -advantages * logp, metrics
    if objective.ratio == "vespo":
        kernel = _vespo_kernel(log_ratio.detach(), advantages, objective)
        return -kernel * advantages * logp, metrics | {"loss/vespo_kernel": kernel}
    if objective.ratio == "cispo":
        low, high = _bounds(objective)
        clips = _clip_fractions(ratio, advantages, low, high)
        return -ratio.detach().clamp(low, high) * advantages * logp, metrics | clips
    policy, clips = _clipped(ratio, advantages, objective)
    return policy, metrics | clips


def _clipped(
    ratio: torch.Tensor, advantages: torch.Tensor, objective: Objective
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return PPO's clipped loss with separate bounds and the dual clip."""
    low, high = _bounds(objective)
    policy = torch.maximum(-ratio * advantages, -ratio.clamp(low, high) * advantages)
    dual = torch.zeros_like(advantages, dtype=torch.bool)
    if objective.clip_ratio_c is not None:
        ceiling = -objective.clip_ratio_c * advantages
        dual = (advantages < 0) & (policy > ceiling)
        policy = torch.where(dual, ceiling, policy)
    return policy, _clip_fractions(ratio, advantages, low, high) | {"loss/clip_fraction_dual": dual}


def _bounds(objective: Objective) -> tuple[float, float]:
    """Return the lower and upper bound of the ratio."""
    below, above = objective.clip_ratio_low, objective.clip_ratio_high
    return -math.inf if below is None else 1 - below, math.inf if above is None else 1 + above


def _clip_fractions(
    ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float
) -> dict[str, torch.Tensor]:
    return {
        LOSS_CLIP_FRACTION_LOW: (advantages < 0) & (ratio < low),
        LOSS_CLIP_FRACTION_HIGH: (advantages > 0) & (ratio > high),
    }


def _vespo_kernel(log_weight: torch.Tensor, advantages: torch.Tensor, objective: Objective) -> torch.Tensor:
    """Return phi(W) = W^k exp(lambda (1 - W)), with separate (k, lambda) for each sign of the advantage."""
    (k_plus, lam_plus), (k_minus, lam_minus) = objective.vespo_positive, objective.vespo_negative
    positive = advantages >= 0
    k = torch.where(positive, k_plus, k_minus)
    lam = torch.where(positive, lam_plus, lam_minus)
    return (k * log_weight + lam * (1 - log_weight.exp())).exp()


def _kl(logp: torch.Tensor, ref: torch.Tensor, loss: LossRecipe) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [n] estimates of KL(policy || reference) at the sampled tokens, and a mask of clamped
    exponents."""
    difference = ref - logp
    if loss.kl_estimator == "k1":
        return -difference, torch.zeros_like(logp, dtype=torch.bool)
    if loss.kl_estimator == "k2":
        return difference.square() / 2, torch.zeros_like(logp, dtype=torch.bool)
    difference, clamped = _clamp(difference)
    return difference.exp() - difference - 1, clamped


def _clamp(exponent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values clamped to +-EXPONENT_LIMIT, and a mask of the clamped values."""
    return exponent.clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT), exponent.abs() > EXPONENT_LIMIT


def _largest(values: torch.Tensor) -> torch.Tensor:
    return values.detach().max() if len(values) else values.new_tensor(-torch.inf)

"""Policy loss of every objective: a plain weighted sum over supervised tokens.

    loss = sum_t weight_t x (importance_t x policy_t + kept_t x kl_coef x kl_t)

``policy_t`` is the objective's surrogate (``objectives.surrogates``), ``kl_t`` the estimate of the divergence
from the reference model, ``importance_t`` and ``kept_t`` correct the train-inference mismatch (``mismatch``).
The weights hold every averaging factor: nothing is divided here or later, so packing, micro-batches and
parallel layout do not change the loss. All is float64: sums over rows differ by round-off only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_eqlen import metrics as m
from megatron_eqlen.objectives.objective import Objective
from megatron_eqlen.objectives.parts import checked_surrogate
from megatron_eqlen.objectives.segments import Segments
from megatron_eqlen.objectives.surrogates import EXPONENT_LIMIT, SupervisedTokens, clamped, importance_ratio
from megatron_eqlen.recipe import LossRecipe
from megatron_eqlen.training.mismatch import DIVERGENCES, correct
from megatron_eqlen.types import Metrics


@dataclass(frozen=True)
class RowLoss:
    """Loss and metrics of one row. Every row has the same metrics in the same order."""

    metrics: dict[str, torch.Tensor]
    """A row's value of each metric: a sum over its tokens, or their maximum (-inf without tokens)."""
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
    rollout_logprobs: torch.Tensor | None,
    objective: Objective,
    loss: LossRecipe,
    others: Mapping[str, torch.Tensor] = {},
    compared: torch.Tensor | None = None,
) -> tuple[torch.Tensor, RowLoss]:
    """Return the row's part of the loss (a float64 scalar with gradient) and of the metrics.

    All tensors are [n]: a row's positions, or any of them that include the supervised positions (weight > 0),
    which alone are read. A segment lies in one row. ``others``: log-probs of other policies (``Row.others``).
    Without ``old`` this is the only update of the batch, so the policy is the old policy. ``loss.kl_coef >
    0`` needs ``ref``. With ``teacher`` the reverse KL to it, times ``loss.teacher_coef``, is taken from the
    advantages. ``compared``, bool: tokens that the policy's own weights sampled; None: all.
    ``rollout_logprobs``: None for responses that no engine sampled, which have neither ratios nor a mismatch.
    """
    # supervised positions
    at = weights > 0
    logp, entropy, weights, advantages = (x[at].double() for x in (logprobs, entropy, weights, advantages))
    rollout = logp.detach() if rollout_logprobs is None else rollout_logprobs[at].double()
    segments = Segments(segment_ids[at])
    others = {policy: known[at].double() for policy, known in others.items()}
    measured: dict[str, torch.Tensor] = {}
    if "teacher" in others:
        # log pi - log teacher as a cost of each token: its policy gradient is that of the reverse KL
        measured["loss/teacher_kl"] = logp.detach() - others["teacher"]
        advantages = advantages - loss.teacher_coef * measured["loss/teacher_kl"]
    # ratio, policy loss and KL penalty
    recomputed = others.get("old", logp.detach())
    old = rollout if loss.old_logprobs == "rollout" else recomputed
    correction = correct(recomputed, rollout, segments, loss)
    # copies: a surrogate of a user's own may change what it gets
    given = (values.clone() for values in (logp, old, advantages, correction.kept))
    policy, ratios = checked_surrogate(objective.surrogate, SupervisedTokens(*given, sequences=segments))
    kl, kl_clamped = 0 * weights, 0 * weights
    if loss.kl_coef:
        if "ref" not in others:
            raise ValueError(f"loss.kl_coef: {loss.kl_coef} needs the reference's log-probs, found none")
        kl, kl_clamped = _kl(logp, others["ref"], loss)
    # weighted sums
    # [n] float64; rejected tokens have no KL penalty either, others have it without importance weights
    policy_part, kl_part = weights * correction.importance * policy, weights * correction.kept * kl
    policy_sum, kl_sum = policy_part.sum(), loss.kl_coef * kl_part.sum()
    with torch.no_grad():
        # surrogates without a ratio still show how far the policy has moved
        if "loss/ratio" not in ratios:
            ratios = importance_ratio(logp - old)[1] | ratios
        metrics = {
            "loss/tokens": torch.ones_like(logp),
            "loss/entropy": entropy,
            "loss/ref_kl": kl,
            "loss/kl_clamped_fraction": kl_clamped,
            **measured,
        }
        if rollout_logprobs is None:
            metrics["loss/nll"] = -logp
        else:
            metrics |= {"loss/policy_kl": old - logp, "loss/ratio_max": ratios["loss/ratio"]}
            metrics |= ratios | correction.metrics
        same = torch.ones_like(at)[at] if compared is None else compared[at]
        if compared is not None:
            metrics |= {
                "mismatch/compared_tokens": same.double(),
                "mismatch/compared_abs_diff": correction.log_ratio.abs() * same,
            }
        of_row = {name: _of_row(name, values) for name, values in metrics.items()}
        of_row |= {"loss/policy": policy_sum.detach().clone(), "loss/kl_penalty": kl_sum.detach().clone()}
        tokens = policy_part.detach() + loss.kl_coef * kl_part.detach()
        row = RowLoss(of_row, tokens, correction.log_ratio, same)
    return policy_sum + kl_sum, row


def reduce_metrics(rows: Sequence[RowLoss], group: dist.ProcessGroup | None = None) -> Metrics:
    """Return a step's metrics from all rows of ``group`` (data parallel; None: this rank's only)."""
    names = list(rows[0].metrics)
    if some := {name for row in rows for name in {*names} ^ {*row.metrics}}:
        raise ValueError(f"loss.surrogate: expected the same metrics of all rows, found {some} of some")
    # [rows, metrics] float64
    values = torch.stack([torch.stack([row.metrics[name] for name in names]) for row in rows])
    sums, peaks = values.sum(0), values.nan_to_num(torch.inf, torch.inf, -torch.inf).amax(0)  # MAX drops NaN
    if group is not None:
        dist.all_reduce(sums, group=group)
        dist.all_reduce(peaks, dist.ReduceOp.MAX, group=group)
    totals = dict(zip(names, sums.tolist(), strict=True))
    totals["loss/total"] = totals["loss/policy"] + totals["loss/kl_penalty"]
    largest = dict(zip(names, peaks.tolist(), strict=True))
    if not totals["loss/tokens"]:
        return dict.fromkeys(totals, 0.0)
    return {name: _merged(name, totals, largest) for name in totals}


def _merged(name: str, totals: Metrics, largest: Metrics) -> float:
    way = m.metric(name).merge
    if counts := m.counts(way):
        return totals[name] / (sum(totals[count] for count in counts) or 1.0)  # 0 if nothing was compared
    return largest[name] if way == "max" else totals[name]


def _of_row(name: str, values: torch.Tensor) -> torch.Tensor:
    values = values.detach()
    if m.metric(name).merge == "max":
        return values.max() if len(values) else values.new_tensor(-torch.inf)
    return values.double().sum()


def _kl(logp: torch.Tensor, ref: torch.Tensor, loss: LossRecipe) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [n] estimates of KL(policy || reference), and a mask of clamped exponents."""
    difference, bounded = ref - logp, torch.zeros_like(logp, dtype=torch.bool)
    # k3 has an exponential, which a single token could make infinite
    if loss.kl_estimator == "k3":
        difference, bounded = clamped(difference), difference.abs() > EXPONENT_LIMIT
    return DIVERGENCES[loss.kl_estimator](difference), bounded

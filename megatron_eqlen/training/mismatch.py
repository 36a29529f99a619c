"""Mismatch of trainer and engine, and its correction in the loss (docs/objectives.md has the keys).

    rho_t = pi_trainer(y_t) / pi_engine(y_t)        of the weights that sampled, in two programs

Tokens that ``rollout_rs`` rejects are excluded from the ratio of their segment (GSPO, LUSPO, VESPO), as in
verl, whose rejection mask multiplies the response mask first (0.8, ``rollout_corr_helper.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_eqlen.objectives.segments import Segments
from megatron_eqlen.objectives.surrogates import clamped
from megatron_eqlen.recipe import LossRecipe

LEAST = 1e-6

DIVERGENCES: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda log_rho: -log_rho,
    "k2": lambda log_rho: log_rho.square() / 2,
    "k3": lambda log_rho: log_rho.exp() - 1 - log_rho,
}
"""Estimates of KL(engine || trainer), or KL(policy || reference), from log (second / first)."""


@dataclass(frozen=True)
class Correction:
    """Factors of the policy loss and the KL penalty of each token; no gradient flows here."""

    importance: Tensor
    """[n] float64, factor of the policy loss, including ``kept``."""
    kept: Tensor
    """[n] float64: 0 for tokens without gradient, else 1."""
    log_ratio: Tensor
    """[n] float64, log rho."""
    metrics: dict[str, Tensor]
    """[n] each; values per segment are spread over its tokens."""


def correct(trainer: Tensor, engine: Tensor, segments: Segments, loss: LossRecipe) -> Correction:
    """Return the correction for supervised tokens; both log-probs are [n] float64."""
    difference = trainer - engine
    log_rho = clamped(difference)
    of_segment = segments.sum(difference)
    # [n]; values of a sequence are divided by its length, so that the sum over its tokens is one value
    metrics = {
        "mismatch/kl": -difference,
        "mismatch/logprob_abs_diff": difference.abs(),
        "mismatch/logprob_abs_diff_max": difference.abs(),
        "mismatch/equal_tokens": difference == 0,
        "mismatch/k3_kl": DIVERGENCES["k3"](log_rho),
        "mismatch/chi2_token": (2 * log_rho).exp() - 1,
        "mismatch/sequences": 1 / segments.length,
        "mismatch/chi2_seq": ((2 * clamped(of_segment)).exp() - 1) / segments.length,
        "mismatch/log_ppl_abs_diff": (of_segment / segments.length).abs() / segments.length,
    }
    importance, of_importance = _importance(difference, segments, loss)
    kept, of_kept = _kept(trainer, engine, segments, loss)
    return Correction(importance * kept, kept, difference, metrics | of_importance | of_kept)


def _importance(log_rho: Tensor, segments: Segments, loss: LossRecipe) -> tuple[Tensor, dict[str, Tensor]]:
    if loss.rollout_is == "none":
        return torch.ones_like(log_rho), {}
    # [n] ratio of trainer to engine: of each token, or of its sequence's product
    raw = clamped(segments.sum(log_rho) if loss.rollout_is == "sequence" else log_rho).exp()
    threshold = loss.rollout_is_threshold
    # a band masks what lies outside (IcePop); a number truncates (TIS)
    if isinstance(threshold, tuple):
        beyond = (raw < threshold[0]) | (raw > threshold[1])
        weight = raw.masked_fill(beyond, 0.0)
    else:
        beyond = raw > threshold
        weight = raw.clamp(max=threshold)
    return weight, {"mismatch/rollout_is_mean": weight, "mismatch/rollout_is_truncated_fraction": beyond}


def _kept(
    trainer: Tensor, engine: Tensor, segments: Segments, loss: LossRecipe
) -> tuple[Tensor, dict[str, Tensor]]:
    log_rho = trainer - engine
    kept = torch.ones_like(log_rho, dtype=torch.bool)
    if not loss.rollout_rs:
        return kept.to(log_rho), {}
    for name, bound in loss.rollout_rs.items():
        kept &= _within(name, bound, trainer, engine, segments)
    # [n] bool
    any_masked = segments.max((~kept).to(log_rho))
    return kept.to(log_rho), {
        "mismatch/rollout_rs_masked_fraction": ~kept,
        "mismatch/rollout_rs_seq_masked_fraction": any_masked / segments.length,
    }


def binary_kl(trainer: Tensor, engine: Tensor) -> Tensor:
    """Return [n], the larger of KL(trainer || engine) and KL(engine || trainer), where each token is drawn or
    another one is. Probabilities stay ``LEAST`` away from 0 and 1."""
    p, q = (logprobs.exp().clamp(LEAST, 1 - LEAST) for logprobs in (trainer, engine))
    drawn, other = (p / q).log(), ((1 - p) / (1 - q)).log()
    return (p * drawn + (1 - p) * other).maximum(-q * drawn - (1 - q) * other)


def _within(
    name: str, bound: float | tuple[float, float], trainer: Tensor, engine: Tensor, segments: Segments
) -> Tensor:
    """Return [n] bool: the tokens that the option ``name`` (``token_k1``, ``seq_mean_k3``, ...) keeps."""
    # `token_k1`, `seq_mean_k3`, `binary_kl`
    level, _, estimate = name.rpartition("_")
    if level == "binary":
        divergence = binary_kl(trainer, engine)
    else:
        divergence = DIVERGENCES[estimate](clamped(trainer - engine))
    if level.startswith("seq"):
        # [n]: of the token's sequence
        divergence = {"sum": segments.sum, "mean": segments.mean, "max": segments.max}[level[4:]](divergence)
    if isinstance(bound, tuple):
        return (divergence >= math.log(bound[0])) & (divergence <= math.log(bound[1]))
    # k1 has a sign: the ratio may be off either way
    if estimate == "k1":
        return divergence.abs() <= abs(math.log(bound))
    return divergence <= bound

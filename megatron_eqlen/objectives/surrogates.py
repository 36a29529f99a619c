"""Surrogates: the loss of each token before its weight, as a function of log-probs and advantages. Its
gradient with respect to ``tokens.logprobs`` is what trains. The fields of a built-in surrogate are its
options; one that is named like a key of the recipe's ``loss`` section takes the key's value. Does not import
torch, which takes seconds: recipes are read and planned without it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch

    from megatron_eqlen.objectives.segments import Segments

EXPONENT_LIMIT = 20.0
"""Bound of log-ratios, also of trainer and engine, of k3's exponent and of VESPO's log weight, +-20 as in
verl (core_algos.py): e^20 is beyond any clip range, and no loss overflows. The gradient is 0 there."""


@dataclass(frozen=True)
class SupervisedTokens:
    """Supervised tokens of a row. All tensors are [n] float64; only ``logprobs`` has a gradient."""

    logprobs: torch.Tensor
    """Log-probs of the policy that is trained."""
    old_logprobs: torch.Tensor
    """Log-probs of the policy that the ratio starts from (``loss.old_logprobs``)."""
    advantages: torch.Tensor
    kept: torch.Tensor
    """1; 0 for tokens that the correction of the mismatch rejects, whose loss is multiplied by 0."""
    sequences: Segments
    """Sides of pairs, completions, or steps of sampled trees. No sequence is in two rows."""

    @property
    def log_ratio(self) -> torch.Tensor:
        return self.logprobs - self.old_logprobs

    @property
    def kept_log_ratio(self) -> torch.Tensor:
        """Log-ratios for sums over sequences, without rejected tokens (see ``training/mismatch.py``)."""
        return self.log_ratio.masked_fill(self.kept == 0, 0.0)


TokenMetrics = dict[str, "torch.Tensor"]
"""[n] values of metrics that ``metrics.yaml`` declares."""

Surrogate = Callable[[SupervisedTokens], tuple["torch.Tensor", TokenMetrics]]
"""Supervised tokens -> ([n] loss of each token before its weight, metrics). Attributes: ``has_ratio`` False:
the old log-probs are not read; ``refuses``: why it cannot be used with a setting."""


@dataclass(frozen=True)
class Ppo:
    """Clipped ratio of each token, with separate bounds and the dual clip. None: no bound."""

    clip_ratio_low: float | None = 0.2
    """The ratio is clipped below 1 - this."""
    clip_ratio_high: float | None = 0.2
    clip_ratio_c: float | None = None
    """Dual clip: with a negative advantage the loss of a token is at most -c x advantage."""

    def __call__(self, tokens: SupervisedTokens) -> tuple[torch.Tensor, TokenMetrics]:
        ratio, metrics = importance_ratio(self.ratio_of(tokens))
        advantages, (low, high, most) = tokens.advantages, self.bounds(tokens)
        # the pessimistic one of two losses: of the ratio, and of the clipped ratio
        policy = (-ratio * advantages).maximum(-ratio.clamp(low, high) * advantages)
        ceiling = -most * advantages
        dual = (advantages < 0) & (policy > ceiling)
        clips = _clip_fractions(ratio, advantages, low, high) | {"loss/clip_fraction_dual": dual}
        return ceiling.where(dual, policy), metrics | clips

    def ratio_of(self, tokens: SupervisedTokens) -> torch.Tensor:
        """Return the log-ratio that multiplies each token's advantage."""
        return tokens.log_ratio

    def bounds(self, tokens: SupervisedTokens) -> tuple[Any, Any, Any]:
        """Return the least and the greatest ratio, and the greatest one of the dual clip: numbers, or [n]."""
        return *_bounds(self.clip_ratio_low, self.clip_ratio_high), self.clip_ratio_c or math.inf


@dataclass(frozen=True)
class Gspo(Ppo):
    """Clipped geometric mean of a sequence's ratios, with each token's own gradient (GSPO-token)."""

    clip_ratio_low: float | None = 3e-4
    clip_ratio_high: float | None = 4e-4

    def ratio_of(self, tokens: SupervisedTokens) -> torch.Tensor:
        kept = tokens.sequences.sum(tokens.kept).clamp(min=1)  # a sequence may have no kept token
        return _own_gradient(tokens.sequences.sum(tokens.kept_log_ratio) / kept, tokens)


@dataclass(frozen=True)
class Ctpo(Ppo):
    """Product of the ratios of a response up to each token, the exact correction of its prefix, with the
    token's own gradient. Bounds of its log grow with the root of the position (CTPO, arXiv 2605.07331)."""

    clip_ratio_low: float | None = 0.025
    """The log of the product at token t = 1, 2, ... is clipped below -this x sqrt(t)."""
    clip_ratio_high: float | None = 0.05
    clip_ratio_c: float | None = 0.05
    bounds_are_logs: ClassVar = True
    refuses: ClassVar = dict.fromkeys(
        ("equal_length", "tree"),
        "it multiplies the ratios of a response from its first token on, which another segment has; use "
        "sampling: independent",
    )

    def ratio_of(self, tokens: SupervisedTokens) -> torch.Tensor:
        return _own_gradient(tokens.sequences.cumsum(tokens.kept_log_ratio), tokens)

    def bounds(self, tokens: SupervisedTokens) -> tuple[Any, Any, Any]:
        # root of the token's position among those that are kept
        scale = tokens.sequences.cumsum(tokens.kept).clamp(min=1).sqrt()
        steps = (self.clip_ratio_low, self.clip_ratio_high, self.clip_ratio_c)
        low, high, most = (scale * (math.inf if step is None else step) for step in steps)
        return (-low).exp(), high.exp(), most.exp()


@dataclass(frozen=True)
class Reinforce:
    """Plain -A log pi."""

    has_ratio: ClassVar[bool] = False
    refuses: ClassVar = {
        "clip_ratio": "a plain policy gradient has no clipped ratio to bound: set loss.clip_ratio_low and "
        "loss.clip_ratio_high too"
    }

    def __call__(self, tokens: SupervisedTokens) -> tuple[torch.Tensor, TokenMetrics]:
        return -tokens.advantages * tokens.logprobs, {}


@dataclass(frozen=True)
class Cispo:
    """Clipped ratio of each token, detached, in front of -A log pi."""

    clip_ratio_low: float | None = 1.0
    clip_ratio_high: float | None = 4.0
    refuses: ClassVar = {
        "clip_ratio": "cispo clips only the weight in front of log pi, so there is no clipped loss to bound"
    }

    def __call__(self, tokens: SupervisedTokens) -> tuple[torch.Tensor, TokenMetrics]:
        ratio, metrics = importance_ratio(tokens.log_ratio)
        low, high = _bounds(self.clip_ratio_low, self.clip_ratio_high)
        clips = _clip_fractions(ratio, tokens.advantages, low, high)
        return -ratio.detach().clamp(low, high) * tokens.advantages * tokens.logprobs, metrics | clips


@dataclass(frozen=True)
class Vespo:
    """Detached kernel phi(W) = W^k exp(lambda (1 - W)) before -A log pi; W multiplies a sequence's ratios."""

    positive: tuple[float, float] = (2.0, 3.0)
    """(k, lambda) where the advantage is >= 0."""
    negative: tuple[float, float] = (3.0, 2.0)
    refuses: ClassVar = {
        "clip_ratio": "vespo has a soft kernel in place of clipping",
        "rollout_is": "its kernel takes an importance weight already; use loss.old_logprobs: rollout to take "
        "it over the engine's log-probs",
    }

    def __call__(self, tokens: SupervisedTokens) -> tuple[torch.Tensor, TokenMetrics]:
        log_ratio = tokens.sequences.sum(tokens.kept_log_ratio)
        _, metrics = importance_ratio(log_ratio)
        log_weight, rises = clamped(log_ratio.detach()), tokens.advantages >= 0
        k, lam = (_either(rises, *sides) for sides in zip(self.positive, self.negative, strict=True))
        kernel = (k * log_weight + lam * (1 - log_weight.exp())).exp()
        return -kernel * tokens.advantages * tokens.logprobs, metrics | {"loss/vespo_kernel": kernel}


@dataclass(frozen=True)
class Sapo:
    """Soft gate 4 / tau x sigmoid(tau (ratio - 1)) in place of a clip (SAPO, arXiv 2511.20347)."""

    positive: float = 1.0
    """tau where the advantage is above 0. A larger one closes the gate earlier."""
    negative: float = 1.05
    refuses: ClassVar = {"clip_ratio": "sapo has a soft gate in place of clipping"}

    def __call__(self, tokens: SupervisedTokens) -> tuple[torch.Tensor, TokenMetrics]:
        ratio, metrics = importance_ratio(tokens.log_ratio)
        tau = _either(tokens.advantages > 0, self.positive, self.negative)
        return -4 / tau * (tau * (ratio - 1)).sigmoid() * tokens.advantages, metrics


@dataclass(frozen=True)
class Dppo:
    """Detached ratio in front of -A log pi; a token whose probability has moved too far in the direction of
    its advantage has no gradient (DPPO with the binary total variation, arXiv 2602.04879). A rare token may
    have any ratio then: it is truncated, as in verl (``dppo_tv`` of core_algos.py)."""

    clip_ratio_low: float | None = 0.15
    """The probability may fall by this (a difference, not a ratio). None: no bound."""
    clip_ratio_high: float | None = 0.15
    clip_ratio_c: float | None = 20.0
    """Most that a ratio counts."""

    def __call__(self, tokens: SupervisedTokens) -> tuple[torch.Tensor, TokenMetrics]:
        ratio, metrics = importance_ratio(tokens.log_ratio)
        most = self.clip_ratio_c or math.inf
        moved = (tokens.logprobs.exp() - tokens.old_logprobs.exp()).detach()
        low, high = _bounds(self.clip_ratio_low, self.clip_ratio_high, around=0)
        clips = _clip_fractions(moved, tokens.advantages, low, high)
        # no gradient where the probability has moved too far already in the direction of the advantage
        within = ~(clips["loss/clip_fraction_low"] | clips["loss/clip_fraction_high"])
        clips["loss/clip_fraction_dual"] = within & (ratio > most)
        factor = within * ratio.detach().clamp(max=most)
        return -factor * tokens.advantages * tokens.logprobs, metrics | clips


SURROGATES: dict[str, Surrogate] = {
    "ppo": Ppo(),
    "gspo": Gspo(),
    "ctpo": Ctpo(),
    "reinforce": Reinforce(),
    "cispo": Cispo(),
    "vespo": Vespo(),
    "sapo": Sapo(),
    "dppo": Dppo(),
}


def importance_ratio(log_ratio: torch.Tensor) -> tuple[torch.Tensor, TokenMetrics]:
    """Return the ratio, its log clamped to +-EXPONENT_LIMIT, and its metrics."""
    ratio = clamped(log_ratio).exp()
    return ratio, {
        "loss/ratio": ratio,
        "loss/ratio_deviation": (ratio - 1).abs(),
        "loss/ratio_clamped_fraction": log_ratio.abs() > EXPONENT_LIMIT,
    }


def clamped(exponent: torch.Tensor) -> torch.Tensor:
    return exponent.clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT)


def _own_gradient(log_ratio: torch.Tensor, tokens: SupervisedTokens) -> torch.Tensor:
    """Return the value of ``log_ratio`` with the gradient of each token's own log-prob."""
    return log_ratio.detach() + (tokens.logprobs - tokens.logprobs.detach())


def _either(rises: torch.Tensor, above: float, below: float) -> torch.Tensor:
    return rises.double() * above + (~rises).double() * below


def _bounds(below: float | None, above: float | None, around: float = 1) -> tuple[float, float]:
    """Return the bounds of the ratio, or of a value that is ``around`` while the policy is unchanged."""
    return -math.inf if below is None else around - below, math.inf if above is None else around + above


def _clip_fractions(value: torch.Tensor, advantages: torch.Tensor, low: float, high: float) -> TokenMetrics:
    return {
        "loss/clip_fraction_low": (advantages < 0) & (value < low),
        "loss/clip_fraction_high": (advantages > 0) & (value > high),
    }

"""Arithmetic of our samplers: log-probs at the recipe's temperature, draws fixed by seed and position.

``sampler`` feeds it from vLLM's model runners.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

NUMBERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "entropy": lambda probabilities, logs: -(probabilities * logs).sum(-1)
}
"""Number of each sampled token, by the column's name: (probabilities, log-probs) of the distribution that it
was drawn from, both [rows, candidates] float64, log-probs of removed tokens 0 -> [rows]."""

TIES = 64
"""Most ties at its limit that top-k keeps; further tied tokens are dropped."""


@dataclass
class Limits:
    """Sampling parameters of a step's rows."""

    temperature: Tensor
    """[rows] float32"""
    top_k: Tensor | None
    """[rows] int32, the vocabulary's size where it is off; None if it is off for all rows."""
    top_p: Tensor | None
    """[rows] float32; None if it is off for all rows."""
    min_p: Callable[[Tensor], Tensor]
    """Logits [rows, candidates] to logits in which the tokens that min-p removes are -inf."""
    most_kept: int | None
    """Most tokens that top-k keeps of a row, ties included; None if it is off for some row."""


@dataclass(frozen=True)
class DrawSettings:
    """Settings of ``PathDraws``: the columns that it returns beside tokens."""

    processed: bool
    """Log-probs are normalized over the kept set: greater by minus the log of the kept mass."""
    mask_width: int = 0
    """Most tokens of a kept set that are returned; 0 returns none."""
    numbers: tuple[str, ...] = ()
    """Names of columns of ``NUMBERS`` that are returned."""


class PathDraws:
    """Samples a batch so that token t of a path depends on the logits, its seed and t alone.

    One uniform number per row, a hash of (seed, t), picks the token by the inverse of the cumulative
    distribution.

    Log-probs are ``log_softmax(logits / temperature)`` at the token, unless ``settings.processed``.

    If top-k is on, the work after the log-softmax covers its tokens alone instead of the vocabulary; in
    float64 the sums are the same.

    The kept set is returned in the field that vLLM has for the ids of the most likely tokens: the drawn
    token, then ``settings.mask_width`` kept ones; if fewer were kept, the drawn token fills the rest. Values
    of ``settings.numbers`` follow in the same field as log-probs of the ids -1, -2, ...
    """

    def start(self, device: torch.device, settings: DrawSettings) -> None:
        """Set the attributes; called by a sampler's constructor after that of vLLM's sampler."""
        self.settings = settings
        self.removed = torch.zeros((), dtype=torch.float64, device=device)
        self.sampled = 0

    def draw(
        self, logits: Tensor, limits: Limits, draws: np.ndarray
    ) -> tuple[Tensor, LogprobsTensors, Tensor]:
        """Return a token for each row ([rows] int64), what is recorded of it, and the mass of its kept set
        ([rows] float64).

        ``logits``: [rows, vocabulary], any float dtype. ``draws``: [rows] float64 in [0, 1).
        """
        logits = logits.float() / limits.temperature.unsqueeze(1)
        logprobs = logits.log_softmax(-1)
        ids = _candidates(logits, limits.most_kept)
        if ids is not None:
            logits, logprobs = logits.gather(1, ids), logprobs.gather(1, ids)
        logits = limits.min_p(logits)
        logits = apply_top_k_top_p(logits, limits.top_k, limits.top_p)
        kept = torch.where(logits > -torch.inf, logprobs, -torch.inf).exp()
        if self.settings.mask_width:  # of ties at top-k's limit those with the lowest ids
            masses, likely = kept.sort(descending=True, stable=True)
            masses, likely = masses[:, : self.settings.mask_width], likely[:, : self.settings.mask_width]
            kept = torch.zeros_like(kept).scatter(1, likely, masses)
        cumulative = kept.cumsum(-1, dtype=torch.float64)
        mass = cumulative[:, -1:]
        targets = torch.from_numpy(draws).to(logits.device, non_blocking=True).unsqueeze(1) * mass
        drawn = torch.searchsorted(cumulative, targets, right=True)
        numbers = self._numbers(kept, logprobs, mass)
        tokens, logprobs = _at(ids, drawn), logprobs.gather(1, drawn)
        if self.settings.processed:
            logprobs = logprobs - mass.log().float()
        columns = tokens
        if self.settings.mask_width:
            columns = torch.cat((tokens, torch.where(masses.gt(0), _at(ids, likely), tokens)), 1)
            logprobs = logprobs.expand(-1, columns.shape[1])  # the drawn token's; others are not read
        if self.settings.numbers:
            names = torch.arange(-1, -1 - len(self.settings.numbers), -1, device=columns.device)
            columns = torch.cat((columns, names.expand(len(columns), -1)), 1)
            logprobs = torch.cat((logprobs, numbers), 1)
        ranks = torch.zeros(len(tokens), dtype=torch.int64, device=tokens.device)  # not read
        recorded = LogprobsTensors(columns.to(torch.int32), logprobs.contiguous(), ranks)
        return tokens.squeeze(1), recorded, mass.squeeze(1)

    def take_removed_mass(self) -> tuple[float, int]:
        total = float(self.removed), self.sampled
        self.removed.zero_()
        self.sampled = 0
        return total

    def _numbers(self, kept: Tensor, logprobs: Tensor, mass: Tensor) -> Tensor:
        """Return [rows, numbers] float32, the values of ``numbers``."""
        if not self.settings.numbers:
            return kept[:, :0]
        probabilities = kept.double() / mass
        logs = torch.where(kept > 0, logprobs.double() - mass.log(), 0.0)
        return torch.stack([NUMBERS[name](probabilities, logs) for name in self.settings.numbers], 1).float()

    def count_removed(self, mass: Tensor, counted: np.ndarray) -> None:
        """Add the removed probability of rows. ``mass``: [rows] float64, of their kept sets. ``counted``:
        [rows] bool, False for rows whose samples vLLM discards. Nothing here waits for the GPU."""
        removed = (1 - mass).clamp(min=0)
        if not counted.all():  # an index of booleans would wait for their number
            rows = torch.from_numpy(counted).to(mass.device, non_blocking=True)
            removed = torch.where(rows, removed, 0.0)
        self.removed += removed.sum()
        self.sampled += int(counted.sum())


def _candidates(logits: Tensor, most_kept: int | None) -> Tensor | None:
    """Return [rows, c] int64: the tokens that top-k may keep, by ascending id; None: the whole
    vocabulary."""
    if most_kept is None or most_kept >= logits.shape[1]:
        return None
    return logits.topk(most_kept, sorted=False).indices.sort().values


def _at(ids: Tensor | None, columns: Tensor) -> Tensor:
    """Return the token ids of ``columns``, which are columns of ``ids`` or else of the vocabulary."""
    return columns if ids is None else ids.gather(1, columns)


def uniform(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return numbers in [0, 1) that only ``seeds`` and ``positions`` (both uint64, same shape) determine:
    splitmix64's finalizer applied twice, upper 32 bits."""
    with np.errstate(over="ignore"):
        state = _mix(_mix(seeds) + (positions + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))
    return (state >> np.uint64(32)).astype(np.float64) * 2.0**-32


def _mix(state: np.ndarray) -> np.ndarray:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))

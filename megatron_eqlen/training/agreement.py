"""Reactions to a mismatch of trainer and engine on the tokens that they share (``rollout.mismatch``).

The mismatch is the mean |log-prob difference| over those tokens of an update that were sampled by the weights
which the update trains; it is undefined if older weights sampled all tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import fmean

import numpy as np
import torch

from megatron_eqlen.metrics import COMPARED, MISMATCH, MISMATCH_OF_COMPARED
from megatron_eqlen.recipe import MismatchRecipe, RolloutRecipe
from megatron_eqlen.training.finite import Problem
from megatron_eqlen.training.forward import supervised_positions
from megatron_eqlen.training.policy_loss import RowLoss
from megatron_eqlen.training.rows import Rows
from megatron_eqlen.types import Metrics, WorstToken


class MismatchError(ValueError):
    """Trainer and engine disagree by more than ``rollout.mismatch`` allows. The run can be resumed."""


class MismatchWatch:
    """Mismatch of the newest steps of a run."""

    def __init__(self, options: MismatchRecipe) -> None:
        self.options = options
        self.newest: deque[float] = deque(maxlen=options.window)
        self.above = False

    def see(self, mismatch: float | None) -> str | None:
        """Add a step's mismatch; None: no update was taken. Return a warning once when the mean rises above
        the tolerance, and again only after it has been below."""
        if mismatch is None:
            return None
        self.newest.append(mismatch)
        mean, before = fmean(self.newest), self.above
        self.above = not mean <= self.options.tolerance  # NaN counts as above
        if not self.above or before:
            return None
        steps = "the last step" if len(self.newest) == 1 else f"the last {len(self.newest)} steps"
        return (
            f"log-probs of trainer and engine differ by {mean:.2g} on average of {steps}, "
            f"rollout.mismatch.tolerance is {self.options.tolerance:g}"
        )


def mismatch_of(measured: Metrics) -> float | None:
    """Return the mismatch of an update, from its metrics."""
    if COMPARED not in measured:
        return measured[MISMATCH]
    return measured[MISMATCH_OF_COMPARED] if measured[COMPARED] else None


def mismatch_problem(
    mismatch: float | None, worst: WorstToken | None, rollout: RolloutRecipe
) -> Problem | None:
    """Return the reason to skip an update with this mismatch, if the recipe says ``skip``; None otherwise."""
    options = rollout.mismatch
    if options.then != "skip" or mismatch is None or mismatch <= options.tolerance:
        return None
    limit = f"rollout.mismatch.tolerance is {options.tolerance:g}"
    text = f"log-probs differ by {mismatch:.2g} on average, {limit}; most in {worst}"
    return Problem(5, text, "trainer and engine disagree")


def worst_token(rows: Rows, losses: Sequence[RowLoss]) -> WorstToken | None:
    """Return the worst token of this rank's rows; None if none of their tokens can be compared."""
    differences = [torch.where(loss.compared, loss.log_ratio.abs(), -1.0) for loss in losses]
    peaks = [float(values.max()) if len(values) else -1.0 for values in differences]
    number = int(np.argmax(peaks))
    if not peaks[number] >= 0:
        return None
    row, log_ratio = rows[number], losses[number].log_ratio
    n = int(differences[number].argmax())
    at = supervised_positions(row)[n]
    segment = int(row.segment_ids[at])
    tree, node = rows.planned.forest.of_segment(segment)
    engine = float(row.column("logprobs")[at])
    return WorstToken(
        peaks[number],
        tree,
        node,
        int((row.segment_ids[:at] == segment).sum()),
        engine + float(log_ratio[n]),
        engine,
    )

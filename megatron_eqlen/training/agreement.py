"""What is done where trainer and engine disagree about the tokens that they share (``rollout.mismatch``).

The mismatch is the mean |log-prob difference| of an update's tokens, of those that the weights sampled which
it trains: where older weights sampled all of them, there is none.
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
    """Trainer and engine disagree by more than ``rollout.mismatch`` allows. The run can go on."""


class MismatchWatch:
    """The mismatch of the newest steps of a run."""

    def __init__(self, options: MismatchRecipe) -> None:
        self.options = options
        self.newest: deque[float] = deque(maxlen=options.window)
        self.above = False

    def see(self, mismatch: float | None) -> str | None:
        """Take a step's mismatch; None: no update was taken. Returns what there is to say, once when the mean
        rises above the tolerance, and not again until it has been below."""
        if mismatch is None:
            return None
        self.newest.append(mismatch)
        mean, before = fmean(self.newest), self.above
        self.above = not mean <= self.options.tolerance  # NaN is not below it
        if not self.above or before:
            return None
        steps = "the last step" if len(self.newest) == 1 else f"the last {len(self.newest)} steps"
        return (
            f"log-probs of trainer and engine differ by {mean:.2g} on average of {steps}, "
            f"rollout.mismatch.tolerance is {self.options.tolerance:g}"
        )


def mismatch_of(measured: Metrics) -> float | None:
    """The mismatch of an update, from its metrics."""
    if COMPARED not in measured:
        return measured[MISMATCH]
    return measured[MISMATCH_OF_COMPARED] if measured[COMPARED] else None


def mismatch_problem(
    mismatch: float | None, worst: WorstToken | None, rollout: RolloutRecipe
) -> Problem | None:
    """Why an update with this mismatch is not taken, where the recipe says ``skip``."""
    options = rollout.mismatch
    if options.then != "skip" or mismatch is None or mismatch <= options.tolerance:
        return None
    limit = f"rollout.mismatch.tolerance is {options.tolerance:g}"
    text = f"log-probs differ by {mismatch:.2g} on average, {limit}; most in {worst}"
    return Problem(5, text, "trainer and engine disagree")


def worst_token(rows: Rows, losses: Sequence[RowLoss]) -> WorstToken | None:
    """Of this rank's rows; None if no token of theirs can be compared."""
    differences = [torch.where(loss.compared, loss.log_ratio.abs(), -1.0) for loss in losses]
    peaks = [float(one.max()) if len(one) else -1.0 for one in differences]
    number = int(np.argmax(peaks))
    if not peaks[number] >= 0:
        return None
    row, log_ratio = rows[number], losses[number].log_ratio
    n = int(differences[number].argmax())
    at = supervised_positions(row)[n]
    segment = int(row.segment_ids[at])
    tree, node = rows.planned.forest.of_segment(segment)
    engine = float(row.rollout_logprobs[at])
    return WorstToken(
        peaks[number],
        tree,
        node,
        int((row.segment_ids[:at] == segment).sum()),
        engine + float(log_ratio[n]),
        engine,
    )

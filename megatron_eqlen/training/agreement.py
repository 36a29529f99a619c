"""What is done where trainer and engine disagree about the tokens that they share (``rollout.mismatch``).

The mismatch is the mean |log-prob difference| of an update's tokens, of the weights that sampled them.
"""

from __future__ import annotations

from collections import deque
from statistics import fmean

from megatron_eqlen.recipe import MismatchRecipe, RolloutRecipe
from megatron_eqlen.training.finite import Problem


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


def mismatch_problem(mismatch: float, rollout: RolloutRecipe) -> Problem | None:
    """Why an update with this mismatch is not taken, where the recipe says ``skip``."""
    options = rollout.mismatch
    if options.then != "skip" or mismatch <= options.tolerance:
        return None
    text = (
        f"log-probs differ by {mismatch:.2g} on average, rollout.mismatch.tolerance is {options.tolerance:g}"
    )
    return Problem(5, text, "trainer and engine disagree")

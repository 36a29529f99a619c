"""What ends a run: a number of steps, of GPU hours, or whichever comes first."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Budget:
    """At least one of the two is set."""

    steps: int | None
    gpu_hours: float | None

    def ended_by(self, steps: int, gpu_hours: float) -> str | None:
        """The recipe's key whose limit is reached after ``steps`` steps and so many GPU hours, if one is."""
        if self.gpu_hours is not None and gpu_hours >= self.gpu_hours:
            return "gpu_hours"
        return "steps" if self.steps is not None and steps >= self.steps else None

    def steps_left(self, steps: int, gpu_hours: float) -> float | None:
        """At the mean cost of the steps so far; None where that is not known yet."""
        left = [] if self.steps is None else [float(self.steps - steps)]
        if self.gpu_hours is not None and steps and gpu_hours:
            left.append((self.gpu_hours - gpu_hours) * steps / gpu_hours)
        return max(0.0, min(left)) if left else None

    def describe(self) -> str:
        """``500 steps or 64 GPU hours, whichever comes first``."""
        limits = [f"{self.steps} steps"] if self.steps is not None else []
        limits += [f"{self.gpu_hours:g} GPU hours"] if self.gpu_hours is not None else []
        return " or ".join(limits) + (", whichever comes first" if len(limits) == 2 else "")

    def outcome(self, steps: int, gpu_hours: float) -> str:
        """How far a run came and, where it has ended and could have ended otherwise, which limit it was."""
        done = [f"{steps} of {self.steps} steps" if self.steps is not None else f"{steps} steps"]
        if self.gpu_hours is not None:
            done.append(f"{gpu_hours:.3g} of {self.gpu_hours:g} GPU hours")
        by = self.ended_by(steps, gpu_hours)
        return ", ".join(done) + (f" (ended by {by})" if by and self.gpu_hours is not None else "")

"""What ends a run: a number of steps, GPU hours, generated tokens or FLOPs, whichever of those that are set
comes first."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields

UNITS = {
    "steps": "steps",
    "gpu_hours": "GPU hours",
    "generated_tokens": "generated tokens",
    "flops": "FLOPs",
}
"""What a run spends, by the recipe's key that limits it."""
COSTS = tuple(key for key in UNITS if key != "steps")
"""What methods are compared at equal amounts of."""


@dataclass(frozen=True)
class Spent:
    """How far a run has come. Evaluations are not counted."""

    steps: int = 0
    gpu_hours: float = 0.0
    generated_tokens: float = 0.0
    flops: float = 0.0
    """Of the model, estimated from tokens (``plan/flops.py``): the same on any machine."""


@dataclass(frozen=True)
class Budget:
    """The limits of ``Spent``; None is no limit. At least one is set."""

    steps: int | None = None
    gpu_hours: float | None = None
    generated_tokens: float | None = None
    flops: float | None = None

    def limits(self) -> Iterator[tuple[str, float]]:
        """Those that are set, by the recipe's key."""
        for field in fields(self):
            if (limit := getattr(self, field.name)) is not None:
                yield field.name, limit

    def ended_by(self, spent: Spent) -> str | None:
        """The recipe's key whose limit is reached, if one is; ``steps`` only where no other is."""
        reached = [key for key, limit in self.limits() if getattr(spent, key) >= limit]
        return reached[-1] if reached else None

    def steps_left(self, spent: Spent) -> float | None:
        """At the mean cost of the steps so far; None where that is not known yet."""
        left = [
            (limit - getattr(spent, key)) * spent.steps / getattr(spent, key)
            for key, limit in self.limits()
            if key != "steps" and getattr(spent, key)
        ]
        left += [float(self.steps - spent.steps)] if self.steps is not None else []
        return max(0.0, min(left)) if left else None

    def seconds_left(self, spent: Spent, step_seconds: Collection[float]) -> float | None:
        """At the mean of what the newest steps took; None where either is not known yet."""
        left = self.steps_left(spent)
        if not step_seconds or left is None:
            return None
        return sum(step_seconds) / len(step_seconds) * left

    def describe(self) -> str:
        """``500 steps or 64 GPU hours, whichever comes first``."""
        limits = [f"{limit:g} {UNITS[key]}" for key, limit in self.limits()]
        return " or ".join(limits) + (", whichever comes first" if len(limits) > 1 else "")

    def outcome(self, spent: Spent) -> str:
        """How far a run came and, where it has ended and could have ended otherwise, which limit it was."""
        done = [f"{spent.steps} of {self.steps} steps" if self.steps is not None else f"{spent.steps} steps"]
        costs = [(key, limit) for key, limit in self.limits() if key != "steps"]
        done += [f"{getattr(spent, key):.3g} of {limit:g} {UNITS[key]}" for key, limit in costs]
        by = self.ended_by(spent)
        return ", ".join(done) + (f" (ended by {by})" if by and costs else "")

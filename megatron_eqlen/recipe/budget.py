"""Limits of a run: steps, GPU hours, generated tokens or FLOPs. The first that is reached ends the run."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields

UNITS = {"steps": "steps", "gpu_hours": "GPU hours", "generated_tokens": "generated tokens", "flops": "FLOPs"}
"""Units of a run's costs, by the recipe's key that limits them."""
COSTS = tuple(key for key in UNITS if key != "steps")
"""Costs at which methods are compared."""


@dataclass(frozen=True)
class Spent:
    """Costs of a run so far, without evaluations."""

    steps: int = 0
    gpu_hours: float = 0.0
    generated_tokens: float = 0.0
    flops: float = 0.0
    """FLOPs of the model, estimated from tokens (``plan/flops.py``): the same on any machine."""


@dataclass(frozen=True)
class Budget:
    """Limits of ``Spent``; None is no limit. At least one is set."""

    steps: int | None = None
    gpu_hours: float | None = None
    generated_tokens: float | None = None
    flops: float | None = None

    def limits(self) -> Iterator[tuple[str, float]]:
        """Yield the limits that are set, with the recipe's keys."""
        for field in fields(self):
            if (limit := getattr(self, field.name)) is not None:
                yield field.name, limit

    def ended_by(self, spent: Spent) -> str | None:
        """Return the recipe's key of the limit that is reached, if any; ``steps`` only if no other is."""
        reached = [key for key, limit in self.limits() if getattr(spent, key) >= limit]
        # ``steps`` is the first field, so that a cost that ended the run comes after it.
        return reached[-1] if reached else None

    def steps_left(self, spent: Spent) -> float | None:
        """Return the remaining steps at the mean cost so far; None if the cost is not known yet."""
        remaining = [
            (limit - getattr(spent, key)) * spent.steps / getattr(spent, key)
            for key, limit in self.limits()
            if key != "steps" and getattr(spent, key)
        ]
        remaining += [float(self.steps - spent.steps)] if self.steps is not None else []
        return max(0.0, min(remaining)) if remaining else None

    def seconds_left(self, spent: Spent, step_seconds: Collection[float]) -> float | None:
        """Return the remaining seconds at the mean time of the newest steps; None if it is not known yet."""
        steps = self.steps_left(spent)
        if not step_seconds or steps is None:
            return None
        return sum(step_seconds) / len(step_seconds) * steps

    def describe(self) -> str:
        """Return a text like ``500 steps or 64 GPU hours, whichever comes first``."""
        limits = [f"{limit:g} {UNITS[key]}" for key, limit in self.limits()]
        return " or ".join(limits) + (", whichever comes first" if len(limits) > 1 else "")

    def outcome(self, spent: Spent) -> str:
        """Return the costs so far and, for an ended run with several limits, the limit that ended it."""
        done = [f"{spent.steps} of {self.steps} steps" if self.steps is not None else f"{spent.steps} steps"]
        costs = [(key, limit) for key, limit in self.limits() if key != "steps"]
        done += [f"{getattr(spent, key):.3g} of {limit:g} {UNITS[key]}" for key, limit in costs]
        by = self.ended_by(spent)
        return ", ".join(done) + (f" (ended by {by})" if by and costs else "")

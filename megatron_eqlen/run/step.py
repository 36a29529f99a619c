"""A step of training as a value: each function of the loop takes one and returns a new one. Nothing here
lives longer than the step, so two steps can exist at once."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_eqlen.files import step_name
from megatron_eqlen.metrics import check, in_turn
from megatron_eqlen.types import Metrics, Prompt, Rollout, TokenTree


@dataclass(frozen=True)
class Batch:
    """The rollouts of some of a step's prompts."""

    rollouts: list[Rollout]
    """After ``harvest`` those that this rank grades; after ``score`` all ranks' rollouts, graded, in training
    order; skeletons where another rank graded them."""
    metrics: Metrics
    data_position: dict[str, Any] | None
    """Position of the data source after these prompts; on rank 0 alone."""
    prompts: Sequence[Prompt] = ()
    """Prompts of all replicas, the same on every rank."""
    drawn: Sequence[TokenTree] = ()
    """Lines among all that was generated (``agreement.drawn_lines``)."""


@dataclass(frozen=True)
class Step:
    """Results of a step so far, the same on every rank unless a field says otherwise."""

    number: int
    """Number of earlier steps in the run."""
    policy_version: int
    """Number of optimizer steps that made the weights which generate. With ``rollout.staleness``, the oldest
    that may generate; once the step is taken, the version that it trains."""
    started: float = field(default_factory=time.perf_counter)
    rollouts: tuple[Rollout, ...] = ()
    """Rollouts of all replicas, scored, in training order; with dynamic sampling only those kept. Complete on
    the rank that graded them, skeletons elsewhere."""
    drawn: tuple[TokenTree, ...] = ()
    """Lines to compare with the engine, among all that was generated."""
    batch_metrics: tuple[Metrics, ...] = ()
    """Metrics of generation and scoring, for each batch of prompts."""
    stage_metrics: Metrics = field(default_factory=dict)
    """Metrics of the other stages."""
    data_position: dict[str, Any] | None = None
    """Position of the data source after the step's prompts; on rank 0 alone."""

    @property
    def name(self) -> str:
        return step_name(self.number)

    @property
    def prompts(self) -> int:
        """Number of prompts that have rollouts in this step."""
        return len({rollout.prompt_id for rollout in self.rollouts})

    @property
    def metrics(self) -> Metrics:
        """All metrics. Raises MetricError for a name that is not declared."""
        return check(in_turn(self.batch_metrics) | self.stage_metrics)

    def add(self, batch: Batch) -> Step:
        """Return this step with another batch of scored rollouts."""
        return dataclasses.replace(
            self,
            rollouts=(*self.rollouts, *batch.rollouts),
            drawn=(*self.drawn, *batch.drawn),
            batch_metrics=(*self.batch_metrics, batch.metrics),
            data_position=batch.data_position,
        )

    def log(self, metrics: Metrics) -> Step:
        """Return this step with more metrics."""
        return dataclasses.replace(self, stage_metrics=self.stage_metrics | metrics)

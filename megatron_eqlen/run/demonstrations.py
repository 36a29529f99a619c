"""Demonstrations in place of sampled rollouts (``objective: sft``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from megatron_eqlen.data.prompts import PromptSource, position_metrics
from megatron_eqlen.evaluation.result import EvaluationResult
from megatron_eqlen.processes.distributed import agree
from megatron_eqlen.recipe import BenchmarkRecipe
from megatron_eqlen.run.generation import Generator
from megatron_eqlen.run.rollouts import Rollouts
from megatron_eqlen.run.session import Session
from megatron_eqlen.run.step import Batch, Step
from megatron_eqlen.sampling.tree import INDEPENDENT
from megatron_eqlen.training.policy import Policy
from megatron_eqlen.types import Demonstration, Grade, Metrics, Part, Rollout


class Demonstrations(Rollouts):
    """Rollouts that are rows of the data: one part each, whose reward is 1. Every rank holds all tokens.
    ``source``: on rank 0 only. ``engine``: evaluates, with the newest weights; None without benchmarks."""

    def __init__(self, session: Session, source: PromptSource | None, engine: Generator | None) -> None:
        self.session, self.source, self.engine = session, source, engine
        self.benchmarks = engine.benchmarks if engine else ()
        self.newest: Policy | None = None
        """Policy whose weights the engine lacks."""

    def collect(self, step: Step) -> Step:
        with self.session.stage("harvest") as seconds:
            rows = agree(self._draw)
        position = self.source.state_dict() if self.source is not None else None
        rollouts = [demonstrated(row, step.policy_version) for row in rows]
        measured = seconds | position_metrics(position) | INDEPENDENT.harvest_metrics(rollouts)
        return step.add(Batch(rollouts, measured, position))

    def _draw(self) -> list[Demonstration]:
        assert self.source is not None
        return cast(list[Demonstration], self.source.next(self.session.recipe.data.prompts_per_step))

    def go_to(self, data_position: dict[str, Any] | None) -> None:
        if self.source is not None and data_position is not None:
            self.source.load_state_dict(data_position)

    def sleep(self) -> None:
        # with weights still to be sent it sleeps already: only an evaluation wakes it
        if self.engine is not None and self.newest is None:
            self.engine.sleep()

    def update_weights(self, policy: Policy) -> Metrics:
        self.newest = policy
        return {}

    def evaluate(
        self, benchmark: BenchmarkRecipe, responses: Path, earlier: EvaluationResult | None
    ) -> EvaluationResult:
        assert self.engine is not None
        if self.newest is not None:
            self.engine.update_weights(self.newest)
            self.newest = None
        return self.engine.evaluate(benchmark, responses, earlier)


def demonstrated(row: Demonstration, policy_version: int) -> Rollout:
    part = Part(row.response, "stop", Grade(1.0, "demonstrated"))
    return Rollout(row, 0, INDEPENDENT.name, policy_version, [part])

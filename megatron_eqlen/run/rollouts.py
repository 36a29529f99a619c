"""Rollouts of a step, wherever they come from, and the stages that all their sources share.

    prompts ─► harvest (what this rank grades) ─► score (all ranks', as skeletons) ─► select ─► Step.add

Prompts are split over the engine replicas for generation, and a replica's rollouts over its ranks for
grading. Every rank then has the rollouts that it graded, and skeletons of all others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_eqlen.engines.teacher_server import TeacherServer
from megatron_eqlen.evaluation.result import EvaluationResult
from megatron_eqlen.metrics import at_once
from megatron_eqlen.objectives import dynamic_sampling
from megatron_eqlen.objectives.units import due_rollouts
from megatron_eqlen.processes.distributed import gather
from megatron_eqlen.recipe import BenchmarkRecipe
from megatron_eqlen.record.partial import CarryOver
from megatron_eqlen.rewards.measured import refuse_too_many, scored
from megatron_eqlen.run.replicas import rollouts_of_all_ranks
from megatron_eqlen.run.session import Session
from megatron_eqlen.run.step import Batch, Step
from megatron_eqlen.sampling.profile import profile_metrics
from megatron_eqlen.tokens import TEACHER
from megatron_eqlen.training.agreement import drawn_lines
from megatron_eqlen.training.policy import Policy
from megatron_eqlen.types import Metrics, Prompt, Rollout


class Rollouts:
    """The loop's rollouts: a ``Generator``, ``Ahead`` of one, a ``replay.Replay``, or ``Demonstrations``."""

    carried = CarryOver()
    """Rollouts between the newest step and the next one."""
    benchmarks: Sequence[BenchmarkRecipe] = ()
    """Benchmarks that ``evaluate`` accepts."""
    from_engine = False
    """True if an engine samples them with the policy's weights; recorded ones may come from any weights."""

    def collect(self, step: Step) -> Step:
        """Return the step with its scored rollouts."""
        raise NotImplementedError

    def check(self, first: int, steps: int | None) -> None:
        """Raise ValueError if rollouts of the steps ``first`` (from 0) to ``steps - 1`` are not available."""

    def sleep(self) -> None:
        """Free the accelerator's memory for the trainer."""

    def update_weights(self, policy: Policy) -> Metrics:
        """Bring the policy's weights to the engine, if there is one; return the time it took."""
        return {}

    def settle(self) -> None:
        """Wait for the harvests under way: an evaluation has the engine for itself."""

    def evaluate(
        self, benchmark: BenchmarkRecipe, responses: Path, earlier: EvaluationResult | None
    ) -> EvaluationResult:
        """Evaluate a benchmark with the engine's weights. ``responses``: folder in which the benchmark's
        responses have a folder, with those of an earlier try. ``earlier``: returned if they gave it."""
        raise AssertionError("without an engine there are no benchmarks")

    def go_to(self, data_position: dict[str, Any] | None) -> None:
        """Continue drawing prompts after ``data_position`` (of a checkpoint)."""


class InTurn(Rollouts, ABC):
    """Collects rollouts when a step asks for them, from as many batches of prompts as it needs."""

    session: Session

    def collect(self, step: Step) -> Step:
        while prompts := self.prompts(step):
            graded = self.score(step, self.harvest(step, prompts))
            step = step.add(select(graded, step, self.session))
        return step

    @abstractmethod
    def prompts(self, step: Step) -> list[Prompt]:
        """Return the next prompts for ``step``, the same on every rank; none when it has enough."""

    @abstractmethod
    def harvest(self, step: Step, prompts: list[Prompt]) -> Batch:
        """Generate the rollouts of ``prompts``, and return those that this rank grades."""

    def score(self, step: Step, harvested: Batch) -> Batch:
        """Grade this rank's rollouts, where no grade is recorded; return all ranks'. Raises UnscoredError."""
        mine, reward = harvested.rollouts, self.session.recipe.reward
        with self.session.stage("score", reward.step_timeout) as seconds:
            self.teach(mine)
            calls = at_once(gather([self.session.scorer.score(mine, reward.step_timeout)]))
            everyone = rollouts_of_all_ranks(mine, harvested.prompts)
            refuse_too_many(everyone, reward)
            self.record(step, mine)
        return replace(harvested, rollouts=everyone, metrics=harvested.metrics | seconds | calls)

    def record(self, step: Step, graded: Sequence[Rollout]) -> None:
        """Record the grades of this rank's rollouts, where they are not read from a record."""

    @cached_property
    def teacher(self) -> TeacherServer:
        """Server at ``teacher.url``, checked."""
        recipe = self.session.recipe
        server = TeacherServer(recipe.teacher.url, recipe.rollout.request_timeout)
        self.session.ends_with(server.close)
        server.check(self.session.tokenizer, recipe.longest_path)
        return server

    def teach(self, rollouts: Sequence[Rollout]) -> None:
        """Fill the column ``teacher`` where it is missing, if ``teacher.url`` is set."""
        parts = (part for rollout in rollouts for part in rollout.parts)
        if self.session.recipe.teacher.url and not all(TEACHER.name in part.tokens for part in parts):
            self.teacher.fill(rollouts)


def select(graded: Batch, step: Step, session: Session) -> Batch:
    """Return the batch with reward metrics and only the rollouts that the step trains. Dynamic sampling
    leaves out prompts without unequal rewards, and those beyond ``data.prompts_per_step``."""
    recipe = session.recipe
    kept, measured = scored(graded.rollouts, recipe.reward)
    rollouts = due_rollouts(kept)
    metrics = graded.metrics | measured | profile_metrics(rollouts, recipe)
    if session.objective.dynamic_sampling:
        room = recipe.data.prompts_per_step - step.prompts
        rollouts, metrics["objective/filtered_prompts"] = dynamic_sampling.select(rollouts, session.job, room)
    # among all that were graded: those that training keeps are a selection
    drawn = drawn_lines(graded.rollouts, recipe, step.number) if recipe.rollout.comparable else ()
    return Batch(rollouts, metrics, graded.data_position, drawn=drawn)

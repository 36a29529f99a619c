"""Harvests of later steps while earlier ones train (``rollout.staleness: K``, with servers).

    all ranks        collect n ─► train n ─► sync ─► collect n+1 ─► train n+1 ─► sync ─► ...
                        │ begins n+K              ▲ takes n+1
    rank 0's thread     └─► harvest, score n+1 .. n+K, one after the other ─►

The thread does everything that precedes a step's token trees, on rank 0 alone: it uses the servers and the
graders, but no process group. A sync pauses its requests, which then continue under the new weights. The
harvest of step n begins when step n - K is taken: no token is older than the weights that step n - K trained.

With ``rollout.carry_over`` a harvest resumes suspended rollouts: tokens may be older by as many steps.

A checkpoint after step n holds the data source's position after step n's prompts, and the ages of tokens in
steps that had begun: a resumed run draws the same prompts again and resumes from their record.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from megatron_eqlen.evaluation.result import EvaluationResult
from megatron_eqlen.processes import distributed
from megatron_eqlen.processes.distributed import agree
from megatron_eqlen.recipe import BenchmarkRecipe
from megatron_eqlen.record.partial import CarryOver
from megatron_eqlen.run.generation import Generator
from megatron_eqlen.run.replicas import rollouts_of_all_ranks
from megatron_eqlen.run.rollouts import Rollouts
from megatron_eqlen.run.step import Step
from megatron_eqlen.training.policy import Policy
from megatron_eqlen.types import Metrics


class Ahead(Rollouts):
    """``Rollouts`` of a ``Generator`` over servers, harvested ahead."""

    from_engine = True

    def __init__(self, generator: Generator) -> None:
        self.generator, self.session = generator, generator.session
        self.benchmarks = generator.benchmarks
        self.staleness, self.steps = self.session.recipe.rollout.staleness, self.session.recipe.steps
        self.oldest: dict[int, int] = {}
        """Oldest policy version of a token, for each step begun and not taken; the same on every rank."""
        self.under_way: deque[Future[Step]] = deque()
        """Steps that have begun and are not taken, on rank 0 alone."""
        self.begun = 0
        """Number of the next step to begin."""
        self._thread = ThreadPoolExecutor(1, "harvest")
        self.session.ends_with(self.close)

    def collect(self, step: Step) -> Step:
        """Begin all steps that may begin with the engine's present weights, and wait for this one."""
        self._begin_from(step)
        with self.session.stage("wait") as seconds:
            taken = on_every_rank(self.under_way.popleft().result() if distributed.is_rank0() else None)
        del self.oldest[step.number]
        self.carried = CarryOver.at(taken.data_position)
        # a resumed run begins the steps under way again, with the ages that they have now
        position = {"source": taken.data_position, "oldest": list(self.oldest.items())}
        # version and clock are those of the step that trains, not of the moment when its harvest began
        known = {"policy_version": step.policy_version, "started": step.started, "data_position": position}
        return dataclasses.replace(taken, **known).log(seconds)

    def _begin_from(self, step: Step) -> None:
        last = step.number + self.staleness
        end = last + 1 if self.steps is None else min(last + 1, self.steps)
        # the first call begins K + 1 steps, each later one a single step
        for number in range(max(self.begun, step.number), end):
            # a checkpoint may have brought the age of this step
            oldest = self.oldest.setdefault(number, step.policy_version)
            if distributed.is_rank0():
                harvest = distributed.alone()(self.generator.collect)
                self.under_way.append(self._thread.submit(harvest, Step(number, oldest)))
        self.begun = end

    def settle(self) -> None:
        with self.session.stage("wait"):
            wait(self.under_way)
            agree(lambda: None)  # the other ranks wait, too

    def evaluate(
        self, benchmark: BenchmarkRecipe, responses: Path, earlier: EvaluationResult | None
    ) -> EvaluationResult:
        return self.generator.evaluate(benchmark, responses, earlier)

    def go_to(self, data_position: dict[str, Any] | None) -> None:
        position = data_position or {"source": None, "oldest": []}
        self.oldest = dict(position["oldest"])
        self.carried = CarryOver.at(position["source"])
        self.generator.go_to(position["source"])

    def update_weights(self, policy: Policy) -> Metrics:
        return self.generator.update_weights(policy)

    def close(self) -> None:
        """Cancel the steps under way; they stay recorded."""
        # first the engine: the thread may be waiting for its tokens
        self.generator.engine.close()
        self._thread.shutdown(cancel_futures=True)


def on_every_rank(step: Step | None) -> Step:
    """Return rank 0's step on every rank, elsewhere with skeletons. Collective; other ranks pass None."""
    mine = step.rollouts if step is not None else ()
    prompts = agree(lambda: list({rollout.prompt_id: rollout.prompt for rollout in mine}.values()))
    known = agree(lambda: step and dataclasses.replace(step, rollouts=()))
    assert known is not None, "rank 0 has it"
    return dataclasses.replace(known, rollouts=tuple(rollouts_of_all_ranks(mine, prompts)))

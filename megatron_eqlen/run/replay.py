"""Rollouts from a run's record in place of an engine (``--replay``)."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from megatron_eqlen.files import step_name
from megatron_eqlen.processes.distributed import agree
from megatron_eqlen.record.reader import read_prompts, read_skeletons, read_step, step_files
from megatron_eqlen.record.replayed import check_step, check_steps
from megatron_eqlen.run.rollouts import InTurn
from megatron_eqlen.run.session import Session
from megatron_eqlen.run.step import Batch, Step
from megatron_eqlen.tokens import ALWAYS, COLUMNS, TEACHER
from megatron_eqlen.types import Prompt


class Replay(InTurn):
    """Rollouts that a run recorded, instead of an engine; each rank reads a share of them."""

    def __init__(self, session: Session, streams: Path) -> None:
        self.session, self.recipe, self.streams = session, session.recipe, streams

    def prompts(self, step: Step) -> list[Prompt]:
        """Return all prompts of the recorded step. Raises ReplayError if it does not fit the recipe."""
        if step.batch_metrics:
            return []
        self._check_step(step.number)
        return agree(lambda: read_prompts(step_files(self.streams / step.name)))

    def harvest(self, step: Step, prompts: list[Prompt]) -> Batch:
        with self.session.stage("harvest") as seconds:
            mine = prompts[dist.get_rank() :: dist.get_world_size()]
            asked = {prompt.prompt_id for prompt in mine}
            used = {*self.recipe.rollout.columns, *([TEACHER.name] if self.recipe.teacher.url else [])}
            unused = COLUMNS.keys() - {*ALWAYS, *used}
            rollouts = read_step(self.streams / step.name, asked, unused)
        return Batch(rollouts, seconds, None, prompts)

    def check(self, first: int, steps: int | None) -> None:
        """Raise ReplayError unless these steps are recorded and the first fits the recipe."""
        check_steps(self.streams, first, steps)
        self._check_step(first)

    def _check_step(self, number: int) -> None:
        folder = self.streams / step_name(number)
        redraws = self.session.objective.dynamic_sampling
        check_step(folder, read_skeletons(step_files(folder)), self.recipe, redraws)

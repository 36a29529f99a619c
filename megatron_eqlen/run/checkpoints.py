"""Checkpoints of a run: the one that it starts from, and the one that is being written."""

from __future__ import annotations

from typing import Any

from megatron_eqlen.models.checkpoint_folder import CheckpointError
from megatron_eqlen.processes import distributed
from megatron_eqlen.processes.distributed import agree
from megatron_eqlen.recipe.budget import COSTS, Spent
from megatron_eqlen.report.page import PageWriter
from megatron_eqlen.run.run_folder import RunFolder
from megatron_eqlen.run.session import Session
from megatron_eqlen.training import saved_state
from megatron_eqlen.training.policy import Policy
from megatron_eqlen.types import Metrics


class Checkpoints:
    """Loads the newest checkpoint and writes new ones, in the background if the recipe says so."""

    def __init__(self, session: Session, folder: RunFolder, page: PageWriter) -> None:
        self._session, self._folder, self._page = session, folder, page
        self._saving: saved_state.Saving | None = None
        self._seconds = 0.0  # taken to begin the checkpoint that is being written
        self.saved = 0
        """Steps taken when the newest checkpoint was begun."""

    def load(self, policy: Policy) -> dict[str, Any] | None:
        """Load the newest checkpoint into the policy and return its other contents, None if there is none.

        Raises CheckpointError if one was saved and none is there, NonFiniteError if a weight is not finite.
        """
        position = saved_state.load(self._folder.checkpoints, policy)
        policy.check_weights()
        if position is None:
            if fault := agree(self._folder.lost_checkpoints):
                raise CheckpointError(fault)
        else:
            self.saved = position["step"]
        return position

    def save(self, spent: Spent, data: Any, policy: Policy, last: bool) -> None:
        """Begin a checkpoint after ``spent.steps`` steps. ``data``: position of the data source, on rank 0;
        ``last``: no step follows, so wait until it is written."""
        position = {"data": agree(lambda: data), **{key: getattr(spent, key) for key in COSTS}}
        with self._session.stage("checkpoint") as seconds:
            self._saving = saved_state.begin(
                self._folder.checkpoints, spent.steps, policy, position, self._session.recipe.checkpoint.keep
            )
        self.saved, self._seconds = spent.steps, seconds["time/checkpoint"]
        if last:
            self.finish()

    def finish(self) -> Metrics:
        """Wait for the checkpoint, and put it in force. Call before an update changes its tensors."""
        if self._saving is None:
            return {}
        check_held(self._folder)
        with self._session.stage("checkpoint") as seconds:
            metrics = self._saving.finish()
        self._saving = None
        if distributed.is_rank0():
            self._session.events.note("saved", step=self.saved)
            self._folder.remove_old_streams(self._session.recipe, self.saved)
            self._page.update()
        return metrics | {"time/checkpoint": seconds["time/checkpoint"] + self._seconds}


def check_held(folder: RunFolder) -> None:
    """Raise HeldError on every rank if a later try of this job has taken the run over."""
    agree(lambda: folder.hold and folder.hold.check())

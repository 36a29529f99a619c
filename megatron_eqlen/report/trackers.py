"""TensorBoard, and on request wandb. A tracker that fails is left out with a warning; it never ends a run."""

from __future__ import annotations

import importlib
import logging
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_eqlen.files import read_text, write_text
from megatron_eqlen.job import Job
from megatron_eqlen.objectives.registry import with_defaults
from megatron_eqlen.recipe import Recipe, leaves, shown
from megatron_eqlen.types import Metrics

PATIENCE = 20.0
"""Seconds that wandb may take to start, and to send the rest at a run's end."""

logger = logging.getLogger(__name__)


class Trackers:
    """The trackers of a run; after its first failure one is no longer called."""

    def __init__(self, folder: Path, steps: int, job: Job) -> None:
        """Start them after ``steps`` steps: later points go. Raises ValueError without their packages."""
        self._running: dict[str, TensorBoard | Wandb] = {}
        self._try("TensorBoard", lambda: self._running.update(TensorBoard=TensorBoard(folder, steps, job)))
        if project := job.recipe.report.wandb_project:
            try:
                importlib.import_module("wandb")
            except ImportError:
                needs = f"report.wandb_project: {project!r} needs wandb, which is not installed"
                raise ValueError(f"{needs} (pip install '.[wandb]')") from None
            self._try("wandb", lambda: self._running.update(wandb=Wandb(folder, job.recipe)))

    def log(self, step: int, metrics: Metrics) -> None:
        """Show the metrics of ``step``, counted from 1. Steps come in order, each once."""
        # a copy: a tracker that fails leaves the dictionary
        for name, tracker in [*self._running.items()]:
            self._try(name, tracker.log, step, metrics)

    def finish(self, failed: bool) -> None:
        """End the record; ``failed``: an error ended the run."""
        for name, tracker in [*self._running.items()]:
            self._try(name, tracker.finish, failed)

    def _try(self, name: str, call: Callable[..., None], *arguments: Any) -> None:
        try:
            call(*arguments)
        except Exception as error:  # noqa: BLE001 (whatever a service raises is no reason to end a run)
            self._running.pop(name, None)
            logger.warning("%s failed and is left out: %s: %s", name, type(error).__name__, error)


class TensorBoard:
    def __init__(self, folder: Path, steps: int, job: Job) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import
        from torch.utils.tensorboard.summary import hparams

        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=steps + 1)
        # the recipe for the tab HParams: a column for each key in which runs differ
        keys = leaves(with_defaults(job).model_dump(mode="json"))
        plain = {key: of if isinstance(of, int | float) else shown(of) for key, of in keys.items()}
        _, session, _ = hparams(plain, {})  # the first would fix the columns to this run's
        self.writer._get_file_writer().add_summary(session)

    def log(self, step: int, metrics: Metrics) -> None:
        now = time.time()
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step, walltime=now)
        self.writer.flush()

    def finish(self, failed: bool) -> None:
        self.writer.close()


class Wandb:
    """The wandb run of this folder. It sends from its own process, so that a slow network delays no step.
    wandb cannot remove steps: those that it already has keep their first values."""

    def __init__(self, folder: Path, recipe: Recipe) -> None:
        import wandb  # pyright: ignore[reportMissingImports] (optional)

        if not (file := folder / "wandb_id").exists():
            write_text(file, uuid.uuid4().hex)
        self.run: Any = wandb.init(
            project=recipe.report.wandb_project,
            name=f"{recipe.name}-{recipe.run_name}",
            dir=str(folder),
            id=read_text(file).strip(),  # the same for every start in this folder
            resume="allow",
            config=recipe.model_dump(mode="json"),
            allow_val_change=True,  # a resumed run may have other steps, for example
            settings=wandb.Settings(finish_timeout=PATIENCE, init_timeout=PATIENCE),
        )

    def log(self, step: int, metrics: Metrics) -> None:
        if step >= self.run.starting_step:
            self.run.log(metrics, step=step, commit=True)

    def finish(self, failed: bool) -> None:
        self.run.finish(exit_code=int(failed))

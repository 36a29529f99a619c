"""Places that show a run's curves besides its own record: TensorBoard, and wandb where asked.

A tracker is optional: one that fails or hangs is left out, with one warning; it never ends a run.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from megatron_eqlen.recipe import Recipe
from megatron_eqlen.types import Metrics

LAST_WORDS = 20.0
"""Seconds that a tracker has at a run's end to send what it still has."""

logger = logging.getLogger(__name__)


class Tracker(Protocol):
    def log(self, step: int, metrics: Metrics) -> None:
        """Show the metrics of ``step``, counted from 1. Steps come in order, each once."""
        ...

    def finish(self) -> None: ...


def start_trackers(folder: Path, steps: int, recipe: Recipe) -> list[Tracker]:
    """The trackers of a run that has ``steps`` steps behind it: later points are removed.

    Raises ValueError if ``report.wandb_project`` is given and wandb is not installed.
    """
    trackers: list[Tracker] = [Guarded("TensorBoard", lambda: TensorBoard(folder, steps))]
    if recipe.report.wandb_project:
        _check_wandb(recipe.report.wandb_project)
        trackers.append(Background("wandb", lambda: Wandb(folder, recipe)))
    return trackers


class TensorBoard:
    def __init__(self, folder: Path, steps: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=steps + 1)

    def log(self, step: int, metrics: Metrics) -> None:
        now = time.time()
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step, walltime=now)
        self.writer.flush()

    def finish(self) -> None:
        self.writer.close()


class Wandb:
    """The wandb run of this folder: a new one, or the one that an earlier start made, which goes on.

    wandb cannot remove steps: those that it already has keep their first values.
    """

    def __init__(self, folder: Path, recipe: Recipe) -> None:
        import wandb  # pyright: ignore[reportMissingImports] (optional)

        self.run: Any = wandb.init(
            project=recipe.report.wandb_project,
            name=f"{recipe.name}-{recipe.run_name}",
            dir=str(folder),
            id=_run_id(folder / "wandb_id"),
            resume="allow",
            config=recipe.model_dump(mode="json"),
            allow_val_change=True,  # a resumed run may have other steps, for example
        )

    def log(self, step: int, metrics: Metrics) -> None:
        if step >= self.run.starting_step:
            self.run.log(metrics, step=step)

    def finish(self) -> None:
        self.run.finish()


class Guarded:
    """The tracker that ``start`` returns; after its first failure it is no longer called."""

    def __init__(self, name: str, start: Callable[[], Tracker]) -> None:
        self.name = name
        self.tracker: Tracker | None = None
        self._try(lambda: setattr(self, "tracker", start()))

    def log(self, step: int, metrics: Metrics) -> None:
        if (tracker := self.tracker) is not None:
            self._try(lambda: tracker.log(step, metrics))

    def finish(self) -> None:
        if (tracker := self.tracker) is not None:
            self._try(tracker.finish)

    def _try(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 (whatever a service raises is no reason to end a run)
            self.tracker = None
            logger.warning("%s failed and is left out: %s: %s", self.name, type(error).__name__, error)


class Background:
    """A guarded tracker in a thread of its own, so that a hanging network does not delay the run."""

    def __init__(self, name: str, start: Callable[[], Tracker]) -> None:
        self.name = name
        self.records: queue.SimpleQueue[tuple[int, Metrics] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._work, args=(start,), daemon=True, name=name)
        self.thread.start()

    def log(self, step: int, metrics: Metrics) -> None:
        self.records.put((step, metrics))

    def finish(self) -> None:
        self.records.put(None)
        self.thread.join(LAST_WORDS)
        if self.thread.is_alive():
            logger.warning("%s does not answer and is left behind after %g s", self.name, LAST_WORDS)

    def _work(self, start: Callable[[], Tracker]) -> None:
        tracker = Guarded(self.name, start)
        while (record := self.records.get()) is not None:
            tracker.log(*record)
        tracker.finish()


def _check_wandb(project: str) -> None:
    try:
        import wandb  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ValueError(
            f"report.wandb_project: {project!r} needs wandb, which is not installed (pip install wandb)"
        ) from None


def _run_id(file: Path) -> str:
    """The id that this folder's run has at every start."""
    if not file.exists():
        file.write_text(uuid.uuid4().hex, encoding="utf-8")
    return file.read_text(encoding="utf-8").strip()

"""Places that show a run besides its own record: TensorBoard, and on request wandb and MLflow.

    MetricsWriter ─► Guarded ─► TensorBoard
                └──► Background ─► Guarded ─► Wandb, MLflow     a thread each

A tracker is optional: one that fails or hangs is left out, with one warning; it never ends a run.
"""

from __future__ import annotations

import importlib
import logging
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from megatron_eqlen.recipe import Recipe
from megatron_eqlen.types import Metrics

if TYPE_CHECKING:
    from megatron_eqlen.report.samples import Samples  # with all that reads rollouts

LAST_WORDS = 20.0
"""Seconds at a run's end in which a tracker may send the rest."""

logger = logging.getLogger(__name__)


class Tracker(Protocol):
    def log(self, step: int, metrics: Metrics, samples: Samples | None) -> None:
        """Show the metrics of ``step``, counted from 1, and some of its rollouts. Steps come in order, each
        once."""
        ...

    def finish(self, failed: bool) -> None:
        """End the record; ``failed``: an error ended the run."""
        ...


def start_trackers(folder: Path, steps: int, recipe: Recipe) -> list[Tracker]:
    """Start the trackers of a run that has ``steps`` steps behind it: later points are removed.

    Raises ValueError if the recipe wants one whose package is not installed.
    """
    from megatron_eqlen.report import tracker_kinds as kinds  # slow to import

    report = recipe.report
    trackers: list[Tracker] = [Guarded("TensorBoard", lambda: kinds.TensorBoard(folder, steps))]
    if report.wandb_project:
        _check_installed("report.wandb_project", report.wandb_project, "wandb", "wandb")
        trackers.append(Background("wandb", lambda: kinds.Wandb(folder, recipe, LAST_WORDS)))
    if report.mlflow_experiment:
        for module in ("mlflow", "pandas"):
            _check_installed("report.mlflow_experiment", report.mlflow_experiment, module, "mlflow")
        trackers.append(Background("MLflow", lambda: kinds.MLflow(folder, recipe)))
    return trackers


class Guarded:
    """The tracker that ``start`` returns; after its first failure it is no longer called."""

    def __init__(self, name: str, start: Callable[[], Tracker]) -> None:
        self.name = name
        self.tracker: Tracker | None = None
        self._try(lambda: setattr(self, "tracker", start()))

    def log(self, step: int, metrics: Metrics, samples: Samples | None) -> None:
        if (tracker := self.tracker) is not None:
            self._try(lambda: tracker.log(step, metrics, samples))

    def finish(self, failed: bool) -> None:
        if (tracker := self.tracker) is not None:
            self._try(lambda: tracker.finish(failed))

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
        self.calls: queue.SimpleQueue[Callable[[Tracker], None] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._work, args=(start,), daemon=True, name=name)
        self.thread.start()

    def log(self, step: int, metrics: Metrics, samples: Samples | None) -> None:
        self.calls.put(lambda tracker: tracker.log(step, metrics, samples))

    def finish(self, failed: bool) -> None:
        self.calls.put(lambda tracker: tracker.finish(failed))
        self.calls.put(None)
        self.thread.join(LAST_WORDS)
        if self.thread.is_alive():
            logger.warning("%s does not answer and is left behind after %g s", self.name, LAST_WORDS)

    def _work(self, start: Callable[[], Tracker]) -> None:
        tracker = Guarded(self.name, start)
        while (call := self.calls.get()) is not None:
            call(tracker)


def _check_installed(key: str, value: str, module: str, extra: str) -> None:
    try:
        importlib.import_module(module)
    except ImportError:
        raise ValueError(
            f"{key}: {value!r} needs {module}, which is not installed (pip install '.[{extra}]')"
        ) from None

"""Metrics of a run's steps as they are written and shown."""

from __future__ import annotations

from megatron_eqlen.processes import distributed
from megatron_eqlen.report.metrics import FILE as METRICS
from megatron_eqlen.report.metrics import Columns, MetricsWriter
from megatron_eqlen.report.trackers import Trackers
from megatron_eqlen.run.run_folder import RunFolder
from megatron_eqlen.run.session import Session
from megatron_eqlen.types import Metrics


class StepRecords:
    """Writes each step's metrics to ``metrics.jsonl``, trackers and screen. On rank 0; nothing elsewhere."""

    def __init__(self, session: Session, folder: RunFolder) -> None:
        self._session, self._folder = session, folder
        self._writer: MetricsWriter | None = None

    def report_gaps(self, steps: int, resumed: bool) -> None:
        """Report steps that are trained again, and those of the ``steps`` steps so far without a record."""
        if not distributed.is_rank0():
            return
        recorded = {*Columns(self._folder.path, ["train/updates"]).steps.astype(int).tolist()}
        if not resumed and recorded:
            self._session.progress.say(f"no checkpoint was saved: {len(recorded)} steps are trained again")
        if missing := [step for step in range(1, steps + 1) if step not in recorded]:
            lost = f"no record of {len(missing)} of {steps} steps (the first: step {missing[0]})"
            so = "the run continues, and reports and comparisons lack them"
            self._session.progress.warn(f"{self._folder.path / METRICS} has {lost}: {so}")

    def open(self, steps: int) -> None:
        """Continue the records after ``steps`` steps."""
        if distributed.is_rank0():
            trackers = Trackers(self._folder.path, steps, self._session.job)
            self._writer = MetricsWriter(self._folder.path, steps, trackers)
            self._session.enter(self._writer)

    def write(self, steps: int, metrics: Metrics) -> None:
        """Record step number ``steps``, counted from 1."""
        if self._writer is not None:
            self._writer.write(steps, metrics)
        self._session.events.note("step", step=steps)
        self._session.progress.step(steps, metrics)

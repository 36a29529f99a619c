"""The trackers: one class for each service, by its own client. ``trackers.py`` keeps their faults from the
run."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from megatron_eqlen.files import step_name, write_text
from megatron_eqlen.recipe import Recipe, leaves
from megatron_eqlen.report.samples import COLUMNS, Samples
from megatron_eqlen.types import Metrics

TABLE = "rollouts"
"""Name of the samples' table."""
STEP = "step"
"""MLflow metric that holds the newest step."""
MOST_PARAMS, LONGEST_PARAM = 100, 500
"""Most parameters per call to MLflow; most characters of a parameter."""


class TensorBoard:
    def __init__(self, folder: Path, steps: int) -> None:
        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=steps + 1)

    def log(self, step: int, metrics: Metrics, samples: Samples | None) -> None:
        now = time.time()
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step, walltime=now)
        if samples is not None:
            self.writer.add_text(TABLE, samples.markdown(), step, walltime=now)
        self.writer.flush()

    def finish(self, failed: bool) -> None:
        self.writer.close()


class Wandb:
    """The wandb run of this folder: a new one, or the one that an earlier start made.

    wandb cannot remove steps: steps that it already has keep their first values. ``last_words``: seconds at
    the end of the process for sending the rest.
    """

    def __init__(self, folder: Path, recipe: Recipe, last_words: float) -> None:
        import wandb  # pyright: ignore[reportMissingImports] (optional)

        self.table: Any = wandb.Table
        self.run: Any = wandb.init(
            project=recipe.report.wandb_project,
            name=_name(recipe),
            dir=str(folder),
            id=_kept(folder / "wandb_id", lambda: uuid.uuid4().hex),
            resume="allow",
            config=recipe.model_dump(mode="json"),
            allow_val_change=True,  # a resumed run may have other steps, for example
            # also where the process ends without finish, or while a server that never answers is asked
            settings=wandb.Settings(finish_timeout=last_words, init_timeout=last_words),
        )

    def log(self, step: int, metrics: Metrics, samples: Samples | None) -> None:
        if step < self.run.starting_step:
            return
        shown = {} if samples is None else {TABLE: self.table(columns=[*COLUMNS], data=samples.rows())}
        self.run.log(metrics | shown, step=step, commit=True)

    def finish(self, failed: bool) -> None:
        self.run.finish(exit_code=int(failed))


class MLflow:
    """The MLflow run of this folder, on the server that ``MLFLOW_TRACKING_URI`` names.

    As with wandb, steps that it already has keep their first values. Its parameters cannot change: they
    describe the first start, and a later start's other values become tags ``recipe.KEY``.
    """

    def __init__(self, folder: Path, recipe: Recipe) -> None:
        from mlflow import MlflowClient  # pyright: ignore[reportMissingImports] (optional)
        from mlflow.entities import Metric, Param, RunTag  # pyright: ignore[reportMissingImports]

        self.client, self.metric = MlflowClient(), Metric
        config = {
            key: str(value)[:LONGEST_PARAM] for key, value in leaves(recipe.model_dump(mode="json")).items()
        }
        self.id = _kept(folder / "mlflow_run_id", lambda: self._created(recipe))
        began = self.client.get_run(self.id).data
        new = [Param(key, value) for key, value in config.items() if key not in began.params]
        for start in range(0, len(new), MOST_PARAMS):
            self.client.log_batch(self.id, params=new[start : start + MOST_PARAMS])
        changed = {key: value for key, value in config.items() if began.params.get(key, value) != value}
        self.client.log_batch(
            self.id, tags=[RunTag(f"recipe.{key}", value) for key, value in changed.items()]
        )
        self.client.update_run(self.id, status="RUNNING")
        self.steps = began.metrics.get(STEP, 0)
        """Number of steps that the server has."""

    def log(self, step: int, metrics: Metrics, samples: Samples | None) -> None:
        if step <= self.steps:
            return
        now = time.time_ns() // 1_000_000
        every = {_mlflow_name(name): value for name, value in metrics.items()} | {STEP: step}
        self.client.log_batch(self.id, [self.metric(name, value, now, step) for name, value in every.items()])
        if samples is not None:
            table = dict(zip(COLUMNS, zip(*samples.rows(), strict=True), strict=True))
            self.client.log_table(self.id, table, f"{TABLE}/{step_name(step)}.json")

    def finish(self, failed: bool) -> None:
        self.client.set_terminated(self.id, "FAILED" if failed else "FINISHED")

    def _created(self, recipe: Recipe) -> str:
        name = recipe.report.mlflow_experiment
        found = self.client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self.client.create_experiment(name)
        return self.client.create_run(experiment, run_name=_name(recipe)).info.run_id


def _name(recipe: Recipe) -> str:
    return f"{recipe.name}-{recipe.run_name}"


def _kept(file: Path, make: Callable[[], str]) -> str:
    """Return the run's id, the same for every start in this folder."""
    if not file.exists():
        write_text(file, make())
    return file.read_text(encoding="utf-8").strip()


def _mlflow_name(metric: str) -> str:
    """Return the metric's name without ``@``, which MLflow refuses."""
    return metric.replace("@", "_at_")

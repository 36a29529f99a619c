"""Trackers: a run goes on whatever they do, and one that is resumed goes on with its curve."""

from __future__ import annotations

import logging
import sys
import threading
import time
import types

import pytest

from megatron_eqlen.report import trackers
from megatron_eqlen.report.metrics import MetricsWriter, read_metrics
from megatron_eqlen.report.trackers import start_trackers
from tests.kit.report_runs import recipe


class FakeWandb(types.ModuleType):
    """wandb's service: runs by id, with the steps that each has."""

    def __init__(self, fails: str = "", waits: threading.Event | None = None) -> None:
        super().__init__("wandb")
        self.fails, self.waits = fails, waits
        self.started: list[dict] = []
        self.runs: dict[str, dict[int, dict]] = {}

    def init(self, **settings):
        self.meet("init")
        self.started.append(settings)
        return FakeRun(self, self.runs.setdefault(settings["id"], {}))

    def meet(self, call: str) -> None:
        if self.waits is not None:
            self.waits.wait()
        if call == self.fails:
            raise ConnectionResetError("no route to host")


class FakeRun:
    def __init__(self, service: FakeWandb, steps: dict[int, dict]) -> None:
        self.service, self.steps = service, steps
        self.starting_step = max(steps, default=-1) + 1

    def log(self, metrics, step):
        self.service.meet("log")
        assert step not in self.steps
        self.steps[step] = metrics

    def finish(self):
        self.service.meet("finish")


def train(folder, steps, behind=0, **changes):
    """What a run does with its writer."""
    report = {"wandb_project": "eqlen"}
    asked = recipe(folder, **{"report": report} | changes)
    writer = MetricsWriter(folder, behind, start_trackers(folder, behind, asked))
    for step in steps:
        writer.write(step, {"reward/mean": float(step)})
    writer.close()
    return asked


@pytest.fixture
def wandb(monkeypatch):
    def install(**behaviour) -> FakeWandb:
        fake = FakeWandb(**behaviour)
        monkeypatch.setitem(sys.modules, "wandb", fake)
        return fake

    return install


def test_the_recipe_is_the_config_of_the_wandb_run(tmp_path, wandb):
    fake = wandb()
    asked = train(tmp_path, [1, 2])
    (started,) = fake.started
    assert started["config"] == asked.model_dump(mode="json")
    assert (started["project"], started["name"]) == ("eqlen", f"tiny-{asked.run_name}")
    assert list(fake.runs.values()) == [{1: {"reward/mean": 1.0}, 2: {"reward/mean": 2.0}}]


def test_a_resumed_run_goes_on_with_its_curve_and_shows_no_step_twice(tmp_path, wandb):
    fake = wandb()
    train(tmp_path, [1, 2, 3])
    train(tmp_path, [3, 4], behind=2, gpu_hours=1.0)  # step 3 was lost with its checkpoint
    (shown,) = fake.runs.values()
    assert list(shown) == [1, 2, 3, 4]
    assert [(one["id"], one["resume"]) for one in fake.started] == [(*fake.runs, "allow")] * 2
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2, 3, 4]


@pytest.mark.parametrize("call", ["init", "log", "finish"])
def test_a_tracker_that_fails_is_left_out_aloud_and_once(tmp_path, wandb, caplog, call):
    wandb(fails=call)
    with caplog.at_level(logging.WARNING):
        train(tmp_path, [1, 2, 3])
    assert [record.message for record in caplog.records] == [
        "wandb failed and is left out: ConnectionResetError: no route to host"
    ]
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2, 3]


def test_tensorboard_that_cannot_write_ends_no_run(tmp_path, caplog):
    (tmp_path / "tensorboard").touch()
    train(tmp_path, [1, 2], report={})
    assert "TensorBoard failed and is left out" in caplog.text
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2]


def test_a_tracker_that_hangs_holds_no_step_up_and_the_end_for_a_while_only(
    tmp_path, wandb, caplog, monkeypatch
):
    monkeypatch.setattr(trackers, "LAST_WORDS", 0.2)
    back = threading.Event()
    wandb(waits=back)
    started = time.monotonic()
    train(tmp_path, [1, 2, 3])
    assert time.monotonic() - started < 5
    assert "wandb does not answer and is left behind" in caplog.text
    back.set()


def test_wandb_that_is_not_installed_is_a_clear_error(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=r"report\.wandb_project: 'eqlen' needs wandb"):
        train(tmp_path, [1])

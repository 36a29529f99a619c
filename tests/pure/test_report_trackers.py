"""Trackers: no tracker stops a run, and a resumed run continues its curve."""

from __future__ import annotations

import logging
import sys
import types
from contextlib import suppress

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.metadata import SESSION_START_INFO_TAG
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from megatron_eqlen.job import Job
from megatron_eqlen.report.metrics import Columns, MetricsWriter
from megatron_eqlen.report.trackers import PATIENCE, Trackers
from tests.kit.report_runs import recipe


class FakeWandb(types.ModuleType):
    """wandb's service: runs by id, with the steps that each has."""

    def __init__(self, fails: str = "") -> None:
        super().__init__("wandb")
        self.fails = fails
        self.started: list[dict] = []
        self.runs: dict[str, dict[int, dict]] = {}
        self.exit_codes: list[int] = []
        self.Table = self.Settings = dict

    def init(self, **settings):
        self.meet("init")
        self.started.append(settings)
        return FakeRun(self, self.runs.setdefault(settings["id"], {}))

    def meet(self, call: str) -> None:
        if call == self.fails:
            raise ConnectionResetError("no route to host")


class FakeRun:
    def __init__(self, service: FakeWandb, steps: dict[int, dict]) -> None:
        self.service, self.steps = service, steps
        self.starting_step = max(steps, default=-1) + 1

    def log(self, shown, step, commit):
        self.service.meet("log")
        assert step not in self.steps
        assert commit, "else wandb keeps it until the next step"
        self.steps[step] = shown

    def finish(self, exit_code):
        self.service.meet("finish")
        self.service.exit_codes.append(exit_code)


def train(folder, steps, /, behind=0, error=False, **changes):
    """Do what a run does with its writer."""
    report = {"wandb_project": "eqlen"}
    job = Job(recipe(folder, **{"report": report} | changes))
    with suppress(InterruptedError), MetricsWriter(folder, behind, Trackers(folder, behind, job)) as writer:
        for step in steps:
            writer.write(step, {"reward/mean": float(step), "evaluation/sums/avg@8": 0.5})
        if error:
            raise InterruptedError
    return job.recipe


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
    (shown,) = fake.runs.values()
    assert {step: values["reward/mean"] for step, values in shown.items()} == {1: 1.0, 2: 2.0}


def test_a_resumed_run_continues_its_curve_and_shows_no_step_twice(tmp_path, wandb):
    fake = wandb()
    train(tmp_path, [1, 2, 3])
    train(tmp_path, [3, 4], behind=2, gpu_hours=1.0)  # step 3 was lost with its checkpoint
    (shown,) = fake.runs.values()
    assert list(shown) == [1, 2, 3, 4]
    assert [(run["id"], run["resume"]) for run in fake.started] == [(*fake.runs, "allow")] * 2
    assert [*Columns(tmp_path, []).steps] == [1, 2, 3, 4]


def test_a_server_that_does_not_answer_delays_a_run_by_a_bounded_time(tmp_path, wandb):
    fake = wandb()
    train(tmp_path, [1])
    assert fake.started[0]["settings"] == dict.fromkeys(("finish_timeout", "init_timeout"), PATIENCE)


def test_a_run_that_an_error_ends_is_shown_as_failed(tmp_path, wandb):
    fake = wandb()
    for error in (True, False):
        train(tmp_path, [1], error=error)
    assert fake.exit_codes == [1, 0]


# ---- what trackers do to a run --------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["init", "log", "finish"])
def test_a_tracker_that_fails_is_left_out_aloud_and_once(tmp_path, wandb, caplog, call):
    wandb(fails=call)
    with caplog.at_level(logging.WARNING):
        train(tmp_path, [1, 2, 3])
    assert [record.message for record in caplog.records] == [
        "wandb failed and is left out: ConnectionResetError: no route to host"
    ]
    assert [*Columns(tmp_path, []).steps] == [1, 2, 3]


def test_tensorboard_that_cannot_write_ends_no_run(tmp_path, caplog):
    (tmp_path / "tensorboard").touch()
    train(tmp_path, [1, 2], report={})
    assert "TensorBoard failed and is left out" in caplog.text
    assert [*Columns(tmp_path, []).steps] == [1, 2]


def test_tensorboard_has_the_recipe_with_its_defaults_by_key(tmp_path):
    train(tmp_path, [1], report={}, optimizer={"lr": 1e-5})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    written = events.PluginTagToContent("hparams")
    assert {*written} == {SESSION_START_INFO_TAG}, "columns are the keys in which runs differ"
    keys = HParamsPluginData.FromString(written[SESSION_START_INFO_TAG]).session_start_info.hparams
    assert keys["optimizer.lr"].number_value == 1e-5
    assert keys["objective"].string_value == "grpo"
    assert keys["loss.clip_ratio_low"].number_value == 0.2


def test_a_tracker_that_is_not_installed_is_a_clear_error(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=r"report\.wandb_project: 'eqlen' needs wandb, which is not"):
        train(tmp_path, [1])

"""Trackers: no tracker stops a run, and a resumed run continues its curve."""

from __future__ import annotations

import dataclasses
import logging
import sys
import types
from contextlib import ExitStack, suppress

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.metadata import SESSION_START_INFO_TAG
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from megatron_eqlen.report.metrics import Columns, MetricsWriter
from megatron_eqlen.report.progress import Progress
from megatron_eqlen.report.trackers import PATIENCE, Trackers
from megatron_eqlen.run.records import StepRecords
from megatron_eqlen.sampling.equal_length.dual_track import pairs_of
from tests.kit.report_runs import example_stream, prompt, recipe


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
    asked = recipe(folder, **{"report": report} | changes)
    with (
        suppress(InterruptedError),
        MetricsWriter(folder, behind, Trackers(folder, behind, asked)) as writer,
    ):
        for step in steps:
            writer.write(step, {"reward/mean": float(step), "evaluation/sums/avg@8": 0.5})
        if error:
            raise InterruptedError
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


# ---- samples of rollouts --------------------------------------------------------------------------------


def test_wandb_has_a_few_rollouts_of_the_steps_that_the_recipe_names(tmp_path, wandb):
    """A row says what a side of a pair got, and who sampled it: types.py's example, a group's question."""
    fake, asked = wandb(), recipe(tmp_path, report={"wandb_project": "eqlen", "samples_every": 2})
    other = dataclasses.replace(example_stream(), prompt=prompt(2))
    pairs_of(other)[1].a.grade = pairs_of(other)[0].a.grade
    elsewhere = dataclasses.replace(example_stream(), prompt=prompt(3)).skeleton()  # of another rank
    tokenizer = types.SimpleNamespace(decode=lambda token_ids: "".join(f"{token} " for token in token_ids))
    with ExitStack() as stack:
        events = types.SimpleNamespace(note=lambda kind, **fields: None)
        progress = Progress(asked.budget, "", show=False)
        session = types.SimpleNamespace(
            recipe=asked, tokenizer=tokenizer, events=events, progress=progress, enter=stack.enter_context
        )
        records = StepRecords(session, types.SimpleNamespace(path=tmp_path))
        records.open(0)
        for step in (1, 2, 3):
            records.write(step, {"reward/mean": 0.0}, [other, elsewhere, example_stream()])
    (steps,) = fake.runs.values()
    assert [step for step, shown in steps.items() if "rollouts" in shown] == [2]
    table = steps[2]["rollouts"]
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    assert [(row["prompt"], row["part"]) for row in rows[:5]] == [
        ("sums/a.parquet#1", name) for name in ("A1", "B1", "A2", "B2", "tail")
    ], "the stream that teaches comes first, with its pairs' sides side by side"
    first, second = rows[:2]
    assert (first["text"], first["reward"], first["verdict"]) == ("5 9 ", 0.0, "wrong: <b>8</b> (gold: 7)")
    assert (second["text"], second["reward"], second["verdict"]) == ("6 7 ", 1.0, "")
    assert first["advantage"] == -second["advantage"] < 0
    assert (rows[4]["advantage"], rows[4]["use"], rows[2]["inherited_tokens"]) == (None, "not trained", 2)


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

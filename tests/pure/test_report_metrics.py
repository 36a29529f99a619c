"""Metrics on disk: every step once, whatever was interrupted; strict JSON."""

from __future__ import annotations

import json
import logging

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from megatron_eqlen.job import Job
from megatron_eqlen.report.metrics import Columns, MetricsWriter, read_newest
from megatron_eqlen.report.trackers import Trackers
from tests.kit.report_runs import recipe


@pytest.fixture(autouse=True)
def files_are_counted_as_in_a_process_of_its_own(monkeypatch):
    """Reset TensorBoard's count of files, by which it sorts those of one second, as text: 10 before 9."""
    counter = type(event_file_writer._global_uid)(0)
    monkeypatch.setattr(event_file_writer, "_global_uid", counter)


def write(folder, steps, value, behind=0, close=True):
    folder.mkdir(exist_ok=True)
    writer = MetricsWriter(folder, behind, Trackers(folder, behind, Job(recipe(folder))))
    for step in steps:
        writer.write(step, {"reward/mean": value + step, "loss/total": -1 / 3})
    if close:
        writer.close()


def recorded(folder):
    columns = Columns(folder, ["reward/mean"])
    return [*zip(columns.steps.tolist(), columns["reward/mean"].tolist(), strict=True)]


def curve(folder):
    """Return (step, value) of the reward as TensorBoard shows it."""
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars("reward/mean")]


def test_a_step_can_be_read_as_soon_as_it_is_written(tmp_path):
    write(tmp_path, [1, 2], 0.0, close=False)
    assert recorded(tmp_path) == curve(tmp_path) == [(1, 1.0), (2, 2.0)]


def test_steps_taken_again_after_a_resume_appear_once(tmp_path):
    write(tmp_path, range(1, 6), 0.0)
    write(tmp_path, range(4, 8), 100.0, behind=3)
    expected = [(1, 1.0), (2, 2.0), (3, 3.0), (4, 104.0), (5, 105.0), (6, 106.0), (7, 107.0)]
    assert recorded(tmp_path) == curve(tmp_path) == expected
    assert not list(tmp_path.glob("*.partial"))


def test_a_torn_last_line_is_dropped_aloud_and_the_file_continues(tmp_path, caplog):
    write(tmp_path, [1, 2, 3], 0.0)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    with caplog.at_level(logging.WARNING):
        write(tmp_path, [3], 50.0, behind=2)
    assert "dropped a torn last line" in caplog.text
    assert recorded(tmp_path) == [(1, 1.0), (2, 2.0), (3, 53.0)]


def test_what_is_no_number_is_null_and_the_line_strict_json(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.write(1, {"loss/total": float("nan"), "loss/ratio_max": float("inf"), "ok": 2.0})
    writer.close()

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    record = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert (record["loss/total"], record["loss/ratio_max"], record["ok"]) == (None, None, 2.0)


@pytest.mark.parametrize("line", ["not json", "[1, 2]", '{"reward/mean": 1.0}'])
def test_a_line_that_is_no_record_is_named(tmp_path, line):
    write(tmp_path, [1], 0.0)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2: expected a JSON object with a step"):
        recorded(tmp_path)


def test_a_folder_without_metrics_has_none(tmp_path):
    assert recorded(tmp_path) == []


@pytest.mark.parametrize("tail", [1, 50, 137, 1 << 18])
def test_the_newest_records_are_whole_wherever_the_end_that_is_read_begins(tmp_path, monkeypatch, tail):
    monkeypatch.setattr("megatron_eqlen.report.metrics.TAIL", tail)
    with MetricsWriter(tmp_path) as writer:
        for step in range(1, 41):
            writer.write(step, {"reward/mean": 0.5 * step})
    for count in (1, 2, 5, 40, 41):
        found = [(record["step"], record["reward/mean"]) for record in read_newest(tmp_path, count)]
        assert found == [(step, 0.5 * step) for step in range(1, 41)][-count:]

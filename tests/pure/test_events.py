"""The record of what happened to a run: lines of several writers, torn lines, and the state that it amounts
to."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import time
from pathlib import Path

import pytest

from megatron_eqlen.processes import events
from megatron_eqlen.processes.events import EventWriter
from megatron_eqlen.processes.run_state import RunState, read_state
from tests.kit.processes import within


def kinds(run: Path) -> list[str]:
    return [event["kind"] for event in events.read(run)]


def state(*happened: tuple[str, dict]) -> RunState:
    found = RunState()
    for time_, (kind, fields) in enumerate(happened):
        found.take({"time": float(time_), "kind": kind} | fields)
    return found


@pytest.mark.parametrize("torn", [b'{"time": 1.0, "kind": "st', b"\0\0\0", b'{"time": 1.0, "text": "\xc3'])
def test_a_torn_line_is_skipped_and_the_next_event_stands_in_its_own_line(tmp_path, torn):
    events.append(tmp_path, "started")
    with open(tmp_path / events.FILE, "ab") as file:
        file.write(torn)
    assert kinds(tmp_path) == ["started"]
    events.append(tmp_path, "step", step=1)
    assert kinds(tmp_path) == ["started", "step"]


def _append(run: Path, writer: int) -> None:
    for number in range(50):
        events.append(run, "warning", writer=writer, number=number, text="x" * 5000 * (number % 3))


def test_events_of_several_processes_do_not_mix(tmp_path):
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_append, args=(tmp_path, writer)) for writer in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    found = events.read(tmp_path)
    assert len(found) == 200
    for writer in range(4):
        assert [event["number"] for event in found if event["writer"] == writer] == list(range(50))


def test_a_writer_that_is_stopped_with_the_lock_holds_up_others_only_for_a_while(tmp_path, monkeypatch):
    monkeypatch.setattr(events, "LOCK_PATIENCE", 0.1)
    events.append(tmp_path, "started")
    with open(tmp_path / events.FILE, "ab") as stopped:
        fcntl.flock(stopped, fcntl.LOCK_EX)
        events.append(tmp_path, "step", step=1)
    assert kinds(tmp_path) == ["started", "step"]


def test_a_writer_gives_a_sign_of_life_without_an_event(tmp_path, monkeypatch):
    monkeypatch.setattr(events, "BEAT", 0.01)
    events.append(tmp_path, "started")
    file = tmp_path / events.FILE
    os.utime(file, (1.0, 1.0))
    with EventWriter().writing(tmp_path, lambda: None):
        assert within(60, lambda: file.stat().st_mtime > time.time() - 60)
        assert kinds(tmp_path) == ["started"]
    assert kinds(tmp_path) == ["started", "ended"]


def test_events_noted_before_the_folder_is_known_are_written_then(tmp_path):
    writer = EventWriter()
    writer.note("warning", text="early")
    with pytest.raises(KeyError), writer.writing(tmp_path, lambda: None):
        raise KeyError("x")
    early, ended = events.read(tmp_path)
    assert early["text"] == "early"
    assert ended["error"] == "KeyError: 'x'"


def test_a_lock_that_cannot_be_read_for_a_while_ends_no_record(tmp_path):
    """As where all file descriptors are in use for a moment, or a file server is away."""
    checks = iter([ValueError(".lock: cannot be read: Too many open files")])

    def check() -> None:
        for error in checks:
            raise error

    writer = EventWriter()
    with writer.writing(tmp_path, check):
        writer.note("warning", text="unseen")
        assert within(60, lambda: not writer._waiting)
        writer.note("warning", text="seen")
        assert within(60, lambda: kinds(tmp_path) == ["warning"])
    assert kinds(tmp_path) == ["warning", "ended"]


def test_the_last_event_is_written_at_once_also_where_the_thread_takes_it_before_all_is_over(tmp_path):
    class Slow(EventWriter):
        def note(self, kind, **fields):
            super().note(kind, **fields)
            assert within(60, lambda: not self._waiting)  # the thread has it, and waits for the next
            time.sleep(0.1)

    begun = time.monotonic()
    with Slow().writing(tmp_path, lambda: None):
        pass
    assert kinds(tmp_path) == ["ended"]
    assert time.monotonic() - begun < events.BEAT / 2


def test_of_a_long_run_only_old_steps_and_stages_are_not_read(tmp_path):
    events.append(tmp_path, "submitted", job="12")
    events.append(tmp_path, "started")
    for step in range(1, 8):
        events.append(tmp_path, "stage", stage="train", began=float(step))
        events.append(tmp_path, "step", step=step)
    lines = (tmp_path / events.FILE).read_bytes().splitlines(keepends=True)
    found = events.read(tmp_path, len(b"".join(lines[-4:])))
    assert [event["kind"] for event in found] == ["submitted", "started", *["stage", "step"] * 2]
    assert [event["step"] for event in found if event["kind"] == "step"] == [6, 7]


def test_a_killed_run_was_in_the_stages_that_have_no_end():
    found = state(
        ("started", {}),
        ("stage", {"stage": "harvest"}),
        ("stage", {"stage": "train"}),
        ("stage", {"stage": "harvest", "began": 1.0}),
    )
    assert (found.started, found.ended, found.stages) == (True, False, [(2.0, "train")])
    found.take({"time": 4.0, "kind": "started"})
    assert found.stages == []


def test_an_event_of_a_later_version_changes_nothing():
    assert state(("a kind to come", {"text": "x"})) == RunState()


def test_an_event_without_its_fields_is_named_with_its_file(tmp_path):
    events.append(tmp_path, "saved")
    with pytest.raises(ValueError, match=f"^{tmp_path / events.FILE}: expected an event, found"):
        read_state(tmp_path)

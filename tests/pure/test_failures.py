"""The error that ended a rank is recorded once, in torch's form; the cause comes before its consequences."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from megatron_eqlen.cli import commands
from megatron_eqlen.cli.__main__ import main
from megatron_eqlen.engines.protocol import EngineError
from megatron_eqlen.processes import events, failures
from megatron_eqlen.processes.failures import ERROR_FILE, Failure
from megatron_eqlen.processes.hold import HeldError
from megatron_eqlen.report.metrics import MetricsWriter
from tests.kit import ROOT

BROKEN = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.3]:31"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return a run's folder, of which this process is rank 3."""
    (tmp_path / "attempt_0/3").mkdir(parents=True)
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "attempt_0/3/error.json"))
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr(failures, "_run", None)
    monkeypatch.setattr(failures, "_told", None)
    failures.keep_in(tmp_path)
    return tmp_path


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except type(error) as caught:
        return caught


def test_the_cause_comes_first_though_its_consequences_were_seen_before():
    lost = Failure(0, "n1", f"RuntimeError: {BROKEN}", 10.0)
    cause = Failure(3, "n2", "ValueError: wrong", 12.0)
    later = Failure(4, "n2", "ValueError: wrong too", 13.0)
    assert failures.first([lost, later, cause]) is cause
    assert failures.first([lost]) is lost
    assert str(cause) == "rank 3 on n2 failed first: ValueError: wrong"
    assert str(lost) == f"rank 0 on n1 failed first: another rank was lost: RuntimeError: {BROKEN}"


def test_torch_reads_what_is_recorded_and_so_do_we(run):
    assert failures.record(raised(RuntimeError("no more"))), "a launcher tells it"
    (ours,) = failures.read(run)
    assert (ours.rank, ours.message) == (3, "RuntimeError: no more")
    assert "raise error\nRuntimeError: no more" in ours.traceback
    file = run / "attempt_0/3/error.json"
    theirs = ProcessFailure(local_rank=3, pid=1, exitcode=1, error_file=str(file))
    assert theirs.message["message"] == "RuntimeError: no more"
    assert theirs.message["extraInfo"]["py_callstack"] == ours.traceback
    assert theirs.timestamp == int(ours.time)
    (error,) = events.read(run)
    assert error["rank"] == 3
    assert error["text"].splitlines()[0].endswith("failed first: RuntimeError: no more")
    assert error["text"].endswith("raise error\nRuntimeError: no more")


@pytest.mark.parametrize("error", [ValueError("wrong"), FileNotFoundError("wrong"), EngineError("wrong")])
def test_a_users_mistake_has_no_traceback_unless_asked_for(run, error, monkeypatch):
    error.add_note("prompt 7")
    failures.record(raised(error))
    (ours,) = failures.read(run)
    assert (ours.message, ours.traceback) == ("wrong (prompt 7)", "")
    monkeypatch.setenv(failures.TRACEBACK, "1")
    assert not failures.is_expected(error)


@pytest.mark.parametrize(("error", "words"), [
    (NotADirectoryError(errno.ENOTDIR, "Not a directory", "runs/a"), "runs/a: Not a directory"),
    (OSError(errno.EROFS, "Read-only file system", "a", None, "b"), "a -> b: Read-only file system"),
    (OSError(errno.ENAMETOOLONG, "File name too long", "aaa"), "aaa: File name too long"),
    (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
])  # fmt: skip
def test_an_error_of_files_and_disks_is_one_line_that_begins_with_the_path(error, words):
    assert failures.is_expected(error)
    assert failures.words(error) == words
    assert not failures.is_expected(OSError(errno.ECONNRESET, "Connection reset by peer"))


def test_a_write_to_a_full_disk_is_an_error_that_names_the_file(tmp_path):
    writer = MetricsWriter(tmp_path / "new")
    writer.file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115 (closed below)
    with pytest.raises(OSError, match="No space left") as error:
        writer.write(1, {})
    words = failures.words(error.value)
    assert words.startswith(f"{tmp_path}/new/metrics.jsonl: No space left on device (")
    assert words.endswith(" GB are free there)")
    writer.close()


@pytest.mark.parametrize(("left", "of", "says"), [(0, 9, ", for 0 files"), (11, 99, ""), (0, 0, "")])
def test_a_disk_that_has_bytes_but_no_room_for_files_says_so(tmp_path, monkeypatch, left, of, says):
    disk = SimpleNamespace(f_bavail=100_000, f_frsize=4096, f_favail=left, f_files=of)
    monkeypatch.setattr(os, "statvfs", lambda path: disk)
    assert failures.free_space(tmp_path / "new/file") == f"0.41 GB are free there{says}"


def test_only_the_first_error_of_a_process_is_kept(run):
    failures.record(raised(RuntimeError("first")))
    failures.record(raised(RuntimeError("second")))
    assert [failure.message for failure in failures.read(run)] == ["RuntimeError: first"]
    assert len(events.read(run)) == 1


@pytest.mark.parametrize("error", [RuntimeError(BROKEN), HeldError("taken over")])
def test_a_lost_connection_and_a_run_that_was_taken_over_say_nothing_in_the_runs_folder(run, error):
    failures.record(raised(error))
    assert not (run / events.FILE).exists()


def test_without_a_launcher_or_where_nothing_can_be_written_nobody_else_tells_it(run, monkeypatch):
    monkeypatch.delenv(ERROR_FILE)
    assert not failures.record(raised(ValueError("wrong")))
    assert events.read(run)[0]["kind"] == "error"
    assert failures.read(run) == []
    monkeypatch.setattr(failures, "_told", None)
    monkeypatch.setenv(ERROR_FILE, str(run / "gone/error.json"))
    failures.keep_in(run / "gone")
    error = raised(OSError("no space left on device"))
    assert [failures.record(error), failures.record(error)] == [False, False]


def test_a_broken_pipe_to_another_process_is_recorded(run, monkeypatch):
    def broken(arguments):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(commands, "status", broken)
    assert main(["status", str(run)]) == 1
    assert [failure.message for failure in failures.read(run)] == ["BrokenPipeError: Broken pipe"]


def test_a_script_whose_output_is_a_file_says_so_in_one_line(tmp_path):
    script = "make_search.py"
    (tmp_path / "file").touch()
    command = [sys.executable, str(ROOT / "tools" / script), "--out", str(tmp_path / "file")]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    assert said.returncode == 2
    assert said.stderr.startswith(f"{script}: {tmp_path}/file")
    assert said.stderr.count("\n") == 1


def test_the_fault_of_a_users_call_of_a_library_is_where_it_was_called():
    try:
        json.loads("{")
    except ValueError as error:
        found = failures.fault_of(error)
    assert re.match(r"JSONDecodeError at test_failures\.py:\d+: Expecting property name", found)

"""One run writes to a folder at a time, on one machine and over several."""

import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_eqlen.processes.hold import HeldError, Hold
from megatron_eqlen.processes.timeline import Timeline
from megatron_eqlen.report.page import PageWriter
from megatron_eqlen.run.checkpoints import Checkpoints
from megatron_eqlen.run.run import Run
from megatron_eqlen.run.run_folder import RunFolder
from megatron_eqlen.run.step import Step
from tests.kit.report_runs import recipe


@pytest.fixture(autouse=True)
def no_patience(monkeypatch):
    monkeypatch.setattr("megatron_eqlen.processes.hold.PATIENCE", 0.0)


def try_of(monkeypatch, job: str | None, restart: int) -> None:
    for name, value in {"SLURM_JOB_ID": job, "SLURM_RESTART_COUNT": restart or None}.items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, str(value))


def test_a_second_holder_is_told_who_the_first_is(tmp_path):
    first = Hold(tmp_path)
    holder = f"process {os.getpid()} on {socket.gethostname()}"
    with pytest.raises(HeldError, match=f"another run is writing here, {holder}"):
        Hold(tmp_path)
    first.check()


def test_the_folder_is_free_when_its_holder_has_gone(tmp_path):
    Hold(tmp_path)  # collected at once, and with it the lock
    Hold(tmp_path).check()


def test_a_later_try_of_a_job_takes_over_from_a_node_that_was_given_up(tmp_path, monkeypatch):
    try_of(monkeypatch, "7", 0)
    ghost = Hold(tmp_path)
    try_of(monkeypatch, "7", 1)
    ours = Hold(tmp_path)
    ours.check()
    with pytest.raises(HeldError, match=r"restart 1\) since .* has taken this run over; .* restart 0"):
        ghost.check()
    try_of(monkeypatch, "7", 2)
    last = Hold(tmp_path)
    for earlier in (ghost, ours):
        with pytest.raises(HeldError, match="restart 2"):
            earlier.check()
    last.check()


@pytest.mark.parametrize(("job", "restart"), [("8", 1), ("7", 0), (None, 0)])
def test_another_job_or_a_shell_does_not_take_over(tmp_path, monkeypatch, job, restart):
    """Cases: another job, the same try once more, a shell."""
    try_of(monkeypatch, "7", 0)
    ours = Hold(tmp_path)
    try_of(monkeypatch, job, restart)
    with pytest.raises(HeldError, match="another run is writing"):
        Hold(tmp_path)
    ours.check()


def test_a_lock_that_the_file_system_has_dropped_is_noticed(tmp_path):
    """A file server forgets the locks of a node that it has not heard of for long."""
    ghost = Hold(tmp_path)
    ghost._file.close()
    ours = Hold(tmp_path)
    ours.check()
    with pytest.raises(HeldError, match="has taken this run over"):
        ghost.check()


@pytest.mark.parametrize("lose", [Path.unlink, lambda lock: lock.write_text("")])
def test_a_holder_whose_lock_is_gone_says_so_and_names_no_other(tmp_path, lose):
    """Somebody takes the file for a leftover."""
    ours = Hold(tmp_path)
    lose(tmp_path / ".lock")
    with pytest.raises(HeldError, match=rf"lock was removed or emptied; process {os.getpid()} on .* writes"):
        ours.check()


def test_a_run_that_was_taken_over_puts_nothing_in_force(tmp_path, monkeypatch):
    """Metrics, checkpoint and export are not written: the functions that would are not there to be called."""
    for module in ("run", "checkpoints"):
        monkeypatch.setattr(f"megatron_eqlen.run.{module}.agree", lambda ask: ask())
    run: Any = object.__new__(Run)
    run.recipe = recipe(tmp_path, run_dir=str(tmp_path / "run"))
    run.folder, run.session = RunFolder(run.recipe), SimpleNamespace(timeline=Timeline())
    run.checkpoints = Checkpoints(run.session, run.folder, PageWriter(tmp_path))
    run.checkpoints._saving, run.profiler = object(), SimpleNamespace(end=lambda step: None)
    try_of(monkeypatch, "7", 0)
    run.folder.open(run.recipe)
    try_of(monkeypatch, "7", 1)
    RunFolder(run.recipe).open(run.recipe)
    for last_word in (lambda: run.end(Step(0, 0)), run.checkpoints.finish, lambda: run.export(None)):
        with pytest.raises(HeldError, match="has taken this run over"):
            last_word()

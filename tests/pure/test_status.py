"""`eqlen status`: the state of a run in every condition, and the files that the run writes for it."""

from __future__ import annotations

import errno
import io
import logging
import os
import re
import resource
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path

import pytest
from rich.console import Console

from megatron_eqlen.cli.__main__ import main
from megatron_eqlen.processes import events, failures
from megatron_eqlen.processes.events import EventWriter
from megatron_eqlen.processes.hold import FILE, Hold
from megatron_eqlen.processes.timeline import Timeline
from megatron_eqlen.recipe.budget import Budget
from megatron_eqlen.report.metrics import MetricsWriter
from megatron_eqlen.report.progress import Progress
from megatron_eqlen.report.run_folder import RunFolder
from megatron_eqlen.report.run_state import RunState, read_state
from megatron_eqlen.report.status import SILENCE, condition, page_rows, print_status, rows
from tests.kit import ROOT
from tests.kit.processes import within
from tests.kit.report_runs import recipe, write_run


class Life:
    """A run's process as far as its folder shows it."""

    def __init__(self, folder: Path) -> None:
        self.folder, writer = folder, EventWriter()
        self.timeline = Timeline(writer.note)
        self.progress = Progress(Budget(20), "tiny", show=False, note=writer.note)
        self.hold = Hold(folder)
        events.append(folder, "started")
        self.ends = ExitStack()
        self.ends.enter_context(writer.writing(folder, self.hold.check))

    def wait_until(self, true: Callable[[RunState], object]) -> dict[str, str]:
        """Return the lines of the screen as soon as the events say so."""
        assert within(60, lambda: true(read_state(self.folder)))
        return lines(self.folder)

    def steps(self, count: int) -> None:
        writer = MetricsWriter(self.folder)
        for step in range(1, count + 1):
            writer.write(step, {"reward/mean": step / 10, "time/step": 3.0})
        writer.close()

    def end(self, error: Exception | None = None) -> None:
        self.ends.__exit__(type(error) if error else None, error, None)
        self.hold._file.close()

    def cut_off(self) -> None:
        """Leave the state of kill -9: the record as it is, and no lock."""
        self.hold._file.close()
        written = (self.folder / events.FILE).read_bytes()
        self.end()
        (self.folder / events.FILE).write_bytes(written)


@pytest.fixture
def run(tmp_path) -> Path:
    return write_run(tmp_path / "run", recipe(tmp_path))


def lines(folder: Path) -> dict[str, str]:
    return {name: str(text) for name, text in rows(folder)}


def screen(folder: Path) -> str:
    out = io.StringIO()
    print_status(folder, console=Console(file=out, width=500, highlight=False))
    return out.getvalue()


def test_a_folder_with_a_recipe_alone_has_not_started(run):
    assert lines(run) == {"state": "not started", "progress": "0 of 20 steps"}
    assert screen(run).splitlines()[0].startswith("tiny eqlen-grpo seed 0")


def test_a_job_that_was_submitted_is_told_of_until_it_has_the_folder(run):
    """The job may also be one that resumes a stopped run."""
    life = Life(run)
    life.end()
    made = recipe(run.parent, run_dir=str(run))
    RunFolder(made).submitted("12", made)
    assert condition(run) == "stopped"
    assert "SLURM job 12 has not started: squeue --job 12 says why" in screen(run)
    events.append(run, "try", job="12", restart=0)  # as slurm/train.sbatch begins
    assert "a SLURM job gets ready: the newest slurm-*.out in the folder" in screen(run)
    life = Life(run)
    assert "job" not in lines(run)
    life.end(ValueError("a node is gone"))
    assert "job" not in lines(run)
    events.append(run, "try", job="12", restart=1)
    assert "a SLURM job gets ready" in screen(run)


def test_a_run_in_progress_says_who_does_what_since_when(run):
    life = Life(run)
    assert condition(run) == "running"
    life.steps(4)
    with life.timeline.span("train"), life.timeline.span("harvest"):
        found = life.wait_until(lambda state: len(state.stages) == 2)
        assert re.fullmatch(r"train for \d s, harvest for \d s", found["now"])
        assert found["state"].startswith(f"running, process {os.getpid()} on ")
        assert found["progress"] == "4 of 20 steps, 3 s a step, 48 s left"
        assert "reward 0.400  ▁▃▆█" in found["last step"]
    life.wait_until(lambda state: not state.stages)
    life.end()


def test_a_run_that_was_cut_off_says_in_which_stage(run):
    """An earlier try hung."""
    events.append(run, "hang", file=f"{run}/hang/1/index.txt", text="rank 0 is in stage score")
    life = Life(run)
    with life.timeline.span("train"):
        life.wait_until(lambda state: state.stages)
        life.cut_off()
    assert condition(run) == "killed"
    assert lines(run)["now"] == "cut off in train"


@pytest.mark.parametrize(
    ("error", "expected"), [(None, "stopped"), (ValueError("no KV cache: 3 < 4"), "failed")]
)
def test_a_run_that_ended_before_its_limit_says_whether_an_error_ended_it(run, error, expected):
    life = Life(run)
    life.end(error)
    assert condition(run) == expected
    assert lines(run).get("error") == (error and "ValueError: no KV cache: 3 < 4")


def test_a_first_error_of_any_rank_is_what_ended_it(run):
    """The launcher killed rank 0, which says nothing of how it ended."""
    life = Life(run)
    life.cut_off()
    events.append(run, "error", text="rank 3 on n2 failed first: OSError: no room\nTraceback ...")
    events.append(run, "error", text="rank 4 on n2 failed first: OSError: no room")
    assert condition(run) == "failed"
    assert "rank 3 on n2 failed first: OSError: no room\n  traceback   Traceback ...\n" in screen(run)
    life = Life(run)  # the next try
    assert condition(run) == "running"
    assert "error" not in lines(run)
    life.end()


def test_an_error_for_which_the_disk_had_no_room_is_told(run, monkeypatch):
    life = Life(run)
    life.cut_off()
    monkeypatch.setattr(failures, "_run", run)
    monkeypatch.setattr(failures, "_told", None)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # files can be made, and nothing written
    try:
        failures.record(OSError(errno.ENOSPC, "No space left on device", str(run / "metrics.jsonl")))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert condition(run) == "failed"
    assert "an error that could not be written down, as on a full disk (" in screen(run)


@pytest.mark.parametrize("damage", ["{", '"text"', "[3]", '{"step": "x"}', "\0"])
@pytest.mark.parametrize("name", ["events.jsonl", "metrics.jsonl", "evaluation/before.json", ".lock"])
def test_a_damaged_file_is_named(run, name, damage):
    life = Life(run)
    life.cut_off()
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).write_text(damage + "\n")
    if name == events.FILE and damage in ("{", "\0"):
        assert condition(run) == "stopped", "a torn line is skipped"
        return
    with pytest.raises(ValueError, match=f"^{run / name}:"):
        screen(run)


def hang(run: Path, name: str, cause: str) -> None:
    events.append(run, "hang", file=f"{run}/hang/{name}/index.txt", text=cause)


def test_hangs_are_told_by_their_cause_the_newest_first(run):
    hang(run, "1", "rank 0 is in stage score")
    hang(run, "2", "no thread of rank 1 could run Python")
    life = Life(run)
    assert condition(run) == "running"
    assert "an earlier try: no thread of rank 1" in screen(run)
    assert "2/index.txt (2 tries hung)" in screen(run)
    hang(run, "3", "rank 0 is in stage checkpoint")
    assert condition(run) == "hung", "though a disk that blocks keeps its process"
    life.cut_off()
    assert condition(run) == "hung"
    assert screen(run).count("rank 0 is in stage checkpoint; see") == 1


def test_a_run_that_slurm_starts_no_more_says_so(run):
    Life(run).cut_off()
    events.append(run, "requeued", stalled=2, text="not finished (status 75): requeue 2 of 20")
    assert "2 in a row have taken no new step" in screen(run)
    text = "not finished (status 75), and 3 tries took no new step: given up"
    events.append(run, "given_up", stalled=0, text=text)
    assert condition(run) == "given up"
    assert "3 tries took no new step: given up" in screen(run)
    made = recipe(run.parent, run_dir=str(run))
    write_run(run, made)
    RunFolder(made).open(made)
    assert "tries" not in lines(run), "who starts it by hand has not"


def test_a_run_that_holds_its_folder_without_a_sign_of_life_is_silent(run, monkeypatch):
    """Causes: stopped by a signal, or blocked by a disk."""
    life = Life(run)
    assert condition(run) == "running"
    monkeypatch.setattr("megatron_eqlen.report.status.SILENCE", -1.0)
    assert condition(run) == "silent"
    assert "it is stopped, or the disk of its folder blocks" in screen(run)
    life.end()


def test_a_run_says_with_what_it_was_started(run, monkeypatch):
    monkeypatch.setattr("sys.argv", ["/venv/bin/eqlen", "train", "a b.yaml", "steps=3"])
    made = recipe(run.parent, run_dir=str(run))
    write_run(run, made)
    RunFolder(made).open(made).check()
    shown = dict(page_rows(run, read_state(run)))
    assert shown["command"] == "eqlen train 'a b.yaml' steps=3"
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert head.stdout.startswith(shown["commit"].split()[0])
    assert f"process {os.getpid()} on {socket.gethostname()}" in shown["trained by"]
    assert f"torch {metadata.version('torch')}" in shown["versions"]


def test_a_page_has_times_in_place_of_ages(run):
    """The page is read long after the run wrote it at its end."""
    life = Life(run)
    life.steps(4)
    with life.timeline.span("evaluate"):
        life.wait_until(lambda state: state.stages)
        written = dict(page_rows(run, read_state(run)))
    assert not {"state", "now"} & {*written}
    assert written["last step"].startswith(time.strftime("%Y-%m-%d %H:"))
    assert " ago" not in " ".join(written.values())
    life.end()


def test_the_data_position_is_that_of_the_newest_step(run):
    writer = MetricsWriter(run)
    writer.write(1, {"data/prompts_drawn": 480.0, "data/source/sums/epochs": 0.24})
    writer.close()
    assert "480 prompts drawn; epochs: sums 0.240" in screen(run)


def test_a_run_whose_work_is_all_done_is_complete(run):
    life = Life(run)
    life.steps(20)
    (run / "export").mkdir()
    (run / "report.html").touch()
    life.end()
    assert condition(run) == "complete"
    assert "left" not in screen(run)


def test_a_run_on_another_machine_is_believed_while_it_gives_signs_of_life(run, monkeypatch):
    """The lock may not be seen there: some file systems keep locks to one machine."""
    life = Life(run)
    with life.timeline.span("train"):
        life.wait_until(lambda state: state.stages)
        life.cut_off()
    monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
    assert condition(run) == "running"
    now = time.time()
    monkeypatch.setattr("time.time", lambda: now + SILENCE + 1)
    assert condition(run) == "killed"


def test_warnings_are_kept_and_still_printed(run, capsys):
    life = Life(run)
    life.progress.warn("step 3 trained nothing")
    logging.getLogger("megatron_eqlen.training.policy").warning("update %d is skipped", 7)
    life.wait_until(lambda state: len(state.warnings) == 2)
    assert re.findall(r"warning     \S+ (.*)", screen(run)) == [
        "step 3 trained nothing",
        "update 7 is skipped",
    ]
    life.end()
    logging.getLogger("megatron_eqlen.training.policy").warning("after the end")
    assert screen(run).count("warning  ") == 2


def test_a_run_that_was_taken_over_says_nothing_more(run, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    ghost = Life(run)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    ours = Hold(run)
    before = (run / events.FILE).read_bytes()
    ghost.end(ValueError("a ghost's"))
    assert (run / events.FILE).read_bytes() == before
    ours.check()


def test_a_folder_that_is_no_run_is_named(run, capsys):
    assert main(["status", str(run.parent)]) == 2
    assert f"eqlen status: {run.parent}: expected a run folder" in capsys.readouterr().err
    assert not (run.parent / FILE).exists()


def slurm(folder: Path, monkeypatch, squeue: str, sacct: str = "exit 1") -> None:
    """Put stand-ins for SLURM's commands first on the PATH."""
    (folder / "bin").mkdir(exist_ok=True)
    for name, text in {"squeue": squeue, "sacct": sacct}.items():
        (folder / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}/bin:/usr/bin:/bin")


UNKNOWN = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"


@pytest.mark.parametrize(("squeue", "sacct", "expected", "said"), [
    ("echo PENDING", "", "not started", "SLURM job 12 has not started: squeue --job 12 says why"),
    ("echo RUNNING", "", "not started", "a SLURM job gets ready"),
    ("echo CANCELLED", "", "cancelled", "SLURM job 12 has ended: CANCELLED; see "),
    ("echo FAILED", "", "failed", "SLURM job 12 has ended: FAILED; see "),
    (UNKNOWN, "echo 'CANCELLED by 1000'", "cancelled", "SLURM job 12 has ended: CANCELLED"),
    (UNKNOWN, "exit 1", "not started", "SLURM job 12 has ended: SLURM no longer knows it"),
    ("echo 'Unable to contact' >&2; exit 1", "", "not started", "SLURM job 12 has not started"),
])  # fmt: skip
def test_a_job_that_never_trained_is_what_slurm_says_of_it(run, monkeypatch, squeue, sacct, expected, said):
    made = recipe(run.parent, run_dir=str(run))
    RunFolder(made).submitted("12", made)
    slurm(run.parent, monkeypatch, squeue, sacct)
    assert condition(run) == expected
    assert said in screen(run)


def test_a_job_that_slurm_told_to_end_is_cancelled_unless_it_waits_to_start_again(run, monkeypatch):
    """The condition is also found without any command of SLURM."""
    made = recipe(run.parent, run_dir=str(run))
    RunFolder(made).submitted("12", made)
    events.append(run, "try", job="12", restart=0)
    Life(run).cut_off()
    events.append(run, "cancelled", text="SLURM told job 12 to end")  # as slurm/train.sbatch does
    monkeypatch.setenv("PATH", "/nowhere")
    assert condition(run) == "cancelled"
    assert "SLURM told job 12 to end" in screen(run)
    slurm(run.parent, monkeypatch, "echo PENDING")
    assert condition(run) == "killed"
    assert "SLURM job 12 has not started" in screen(run)
    slurm(run.parent, monkeypatch, UNKNOWN)
    assert condition(run) == "cancelled"
    RunFolder(made).submitted("13", made)
    assert read_state(run).cancelled is None, "it is of the job before"

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
from typing import Any

import pytest
from rich.console import Console

from megatron_eqlen.cli.__main__ import main
from megatron_eqlen.processes import events, failures
from megatron_eqlen.processes.events import EventWriter
from megatron_eqlen.processes.hold import FILE, Hold
from megatron_eqlen.processes.run_state import read_state
from megatron_eqlen.processes.timeline import Timeline
from megatron_eqlen.recipe.budget import Budget
from megatron_eqlen.record.reader import read_step
from megatron_eqlen.report.metrics import MetricsWriter
from megatron_eqlen.report.page import write_page
from megatron_eqlen.report.progress import Progress
from megatron_eqlen.report.status import SILENCE, Condition, RunStatus, print_status
from megatron_eqlen.run.run_folder import RunFolder
from tests.kit import ROOT
from tests.kit.processes import within
from tests.kit.report_runs import example_stream, recipe, write_run


@pytest.fixture
def run(tmp_path) -> Path:
    return write_run(tmp_path / "run", recipe(tmp_path))


def condition(run: Path) -> Condition:
    return RunStatus(run).condition


def screen(folder: Path) -> str:
    out = io.StringIO()
    print_status(folder, console=Console(file=out, width=500, highlight=False))
    return out.getvalue()


def let_go(hold: Hold) -> None:
    """Leave a lock as a process leaves it that ends, in whatever way."""
    hold._file.close()


Happened = tuple[str, dict[str, Any]]


def of(kind: str, **fields: Any) -> Happened:
    return kind, fields


STARTED, ENDED = of("started"), of("ended", error=None)
SUBMITTED, TRY = of("submitted", job="12", recipe={}), of("try", job="12", restart=1)
FIRST = "rank 3 on n2 failed first: OSError: no room"
ERRORS = [of("error", text=f"{FIRST}\nTraceback ..."), of("error", text="rank 4 on n2 failed first: OSError")]
HUNG = [
    of("hang", file="hang/1/index.txt", text="rank 0 is in stage score"),
    of("hang", file="hang/2/index.txt", text="no thread of rank 1 could run Python"),
]
STALLED = of("requeued", stalled=2, text="not finished (status 75): requeue 2 of 20")
GIVEN_UP = of("given_up", stalled=0, text="3 tries took no new step: given up")
CANCELLED = of("cancelled", text="SLURM told job 12 to end")


@pytest.mark.parametrize(("held", "happened", "expected", "said", "unsaid"), [
    (False, [], "not started", "progress    0 of 20 steps", "last step"),
    (False, [STARTED, ENDED], "stopped", "", "error"),
    (False, [STARTED, of("ended", error="ValueError: 3 < 4")], "failed", "error       ValueError: 3 < 4", ""),
    (False, [HUNG[0], STARTED, of("stage", stage="train")], "killed", "cut off in train", ""),
    (False, [STARTED, *ERRORS], "failed", f"error       {FIRST}\n  traceback   Traceback ...\n", "rank 4"),
    (True, [STARTED, *ERRORS, STARTED], "running", "starting, or between two stages", "error  "),
    (True, [*HUNG, STARTED], "running", "an earlier try: no thread of rank 1", "rank 0"),
    (True, [*HUNG, STARTED], "running", "2/index.txt (2 tries hung)", "rank 0"),
    (True, [STARTED, *HUNG], "hung", "hang        no thread of rank 1 could run Python; see ", "earlier"),
    (False, [STARTED, *HUNG], "hung", "hang        no thread of rank 1 could run Python; see ", "earlier"),
    (False, [STARTED, STALLED], "killed", "2 in a row have taken no new step", ""),
    (False, [STARTED, STALLED, GIVEN_UP], "given up", "3 tries took no new step: given up", "in a row"),
    (True, [STARTED, STALLED, GIVEN_UP, STARTED], "running", "", "tries"),
    (True, [STARTED, STALLED, STARTED, of("step", step=3)], "running", "", "in a row"),
    (False, [SUBMITTED, TRY, STARTED, *ERRORS, CANCELLED, TRY], "killed", "a SLURM job", "failed first"),
    (False, [STARTED, ENDED, SUBMITTED], "stopped", "SLURM job 12 has not started: squeue --job 12, ", ""),
    (False, [SUBMITTED, TRY], "not started", "a SLURM job gets ready: the newest slurm-*.out in the fol", ""),
    (True, [SUBMITTED, TRY, STARTED], "running", "", "SLURM"),
    (False, [SUBMITTED, TRY, STARTED, of("ended", error="a node is gone")], "failed", "", "SLURM"),
    (False, [SUBMITTED, TRY, STARTED, CANCELLED], "cancelled", "SLURM told job 12 to end", ""),
    (False, [SUBMITTED, TRY, CANCELLED], "cancelled", "SLURM told job 12 to end", "gets ready"),
    (False, [SUBMITTED, TRY, STARTED, CANCELLED, SUBMITTED], "killed", "has not started", "told"),
])  # fmt: skip
def test_the_condition_follows_from_the_events_and_the_lock(run, held, happened, expected, said, unsaid):
    hold = Hold(run) if held or STARTED in happened else None
    for kind, fields in happened:
        events.append(run, kind, **fields)
    if hold and not held:
        let_go(hold)
    assert condition(run) == expected
    shown = screen(run)
    assert said in shown
    assert not unsaid or unsaid not in shown
    if hold:
        let_go(hold)


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

    def end(self, error: Exception | None = None) -> None:
        self.ends.__exit__(type(error) if error else None, error, None)
        let_go(self.hold)


def take_steps(run: Path, count: int) -> None:
    with MetricsWriter(run) as writer:
        for step in range(1, count + 1):
            more = {"data/prompts_drawn": 480.0, "data/source/sums/epochs": 0.24}
            seconds = 3.0 if step > count - 10 else 9.0  # the newest ten tell how long one takes
            writer.write(step, {"reward/mean": step / 10, "time/step": seconds, **more})


def test_a_run_in_progress_says_who_does_what_since_when_and_its_page_says_what_will_hold(run):
    life = Life(run)
    take_steps(run, 12)
    with life.timeline.span("train"), life.timeline.span("harvest"):
        assert within(60, lambda: len(read_state(run).stages) == 2)
        status = RunStatus(run)
    found = {name: str(text) for name, text in status.screen()}
    assert re.fullmatch(r"train for \d s, harvest for \d s", found["now"])
    assert found["state"].startswith(f"running, process {os.getpid()} on ")
    assert found["progress"] == "12 of 20 steps, 3 s a step, 24 s left"
    assert "reward 1.20" in found["last step"]
    assert found["data"] == "480 prompts drawn; epochs: sums 0.240"
    page = dict(status.page())
    assert not {"state", "now"} & {*page}
    assert page["last step"].startswith(time.strftime("%Y-%m-%d %H:"))
    assert " ago" not in " ".join(map(str, page.values()))
    life.end()


def test_the_newest_warnings_are_shown(run):
    life = Life(run)
    for number in range(7):
        life.progress.warn(f"fault {number}")
    assert within(60, lambda: len(read_state(run).warnings) == 7)
    shown = [str(text)[-7:] for name, text in RunStatus(run).screen() if name == "warning"]
    assert shown == [f"fault {number}" for number in range(2, 7)]
    life.end()


def test_a_run_whose_work_is_all_done_is_complete(run):
    take_steps(run, 20)
    (run / "export").mkdir()
    (run / "report.html").touch()
    let_go(Hold(run))
    assert condition(run) == "complete"
    assert "left" not in screen(run)


def test_an_error_for_which_the_disk_had_no_room_is_told(run, monkeypatch):
    let_go(Hold(run))
    events.append(run, "started")
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
    let_go(Hold(run))
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).write_text(damage + "\n")
    if name == events.FILE and damage in ("{", "\0"):
        assert condition(run) == "stopped", "a torn line is skipped"
        return
    with pytest.raises(ValueError, match=f"^{run / name}:"):
        screen(run)


def test_a_run_whose_checkpoints_were_removed_keeps_its_status_and_page(run):
    latest = run / "checkpoints/latest"
    latest.parent.mkdir()
    latest.write_text("step-00000030")
    assert "checkpoint  step-00000030, which is not there" in screen(run)
    assert "step-00000030, which is not there" in write_page(run).read_text()
    latest.write_text("step")
    with pytest.raises(ValueError, match=f"^{latest}: expected the name of a checkpoint, found 'step'"):
        screen(run)


def test_a_run_is_read_without_its_own_code_which_may_have_stayed_on_another_machine(run, capsys):
    written = (run / "recipe.yaml").read_text()
    (run / "recipe.yaml").write_text(written.replace("grader: null", "grader: gone:exact"))
    (run / "metrics.jsonl").write_text('{"step": 20, "time": 0.0, "policy/reward": 0.5}\n')
    assert "20 of 20 steps" in screen(run)
    assert "20 of 20 steps" in write_page(run).read_text()
    assert main(["compare", str(run)]) == 0
    assert main(["train", str(run / "recipe.yaml"), "--dry-run"]) == 2
    assert "data.sources.0.grader: 'gone:exact' cannot be imported" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["rank-0.arrow", "grades-rank-0.arrow"])
def test_status_and_report_refuse_the_record_that_training_refuses(tmp_path, name):
    """A bit is flipped. The page does not show rollouts of that step."""
    run = write_run(tmp_path, recipe(tmp_path), {f"step-0000000{n}": [example_stream()] for n in range(4)})
    damaged = run / "streams/step-00000001" / name
    written = damaged.read_bytes()

    def refused(read: Callable[[Path], object], at: Path) -> bool:
        try:
            read(at)
        except ValueError as error:
            return str(error).startswith(f"{damaged}: ")
        return False

    assert not refused(write_page, run)
    found = []
    for at in range(4, len(written) - 8, len(written) // 8):
        damaged.write_bytes(written[:at] + bytes([written[at] ^ 4]) + written[at + 1 :])
        found.append(refused(read_step, damaged.parent))
        assert [refused(shown, run) for shown in (screen, write_page)] == found[-1:] * 2
    assert sum(found) > 2


def test_a_run_that_holds_its_folder_without_a_sign_of_life_is_silent(run, monkeypatch):
    """Causes: stopped by a signal, or blocked by a disk."""
    hold = Hold(run)
    events.append(run, "started")
    assert condition(run) == "running"
    monkeypatch.setattr("megatron_eqlen.report.status.SILENCE", -1.0)
    assert condition(run) == "silent"
    assert "it is stopped, or the disk of its folder blocks" in screen(run)
    let_go(hold)


def test_a_run_on_another_machine_is_believed_while_it_gives_signs_of_life(run, monkeypatch):
    """The lock may not be seen there: some file systems keep locks to one machine."""
    let_go(Hold(run))
    events.append(run, "started")
    monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
    assert condition(run) == "running"
    now = time.time()
    monkeypatch.setattr("time.time", lambda: now + SILENCE + 1)
    assert condition(run) == "killed"


def test_a_run_says_with_what_it_was_started(run, monkeypatch):
    monkeypatch.setattr("sys.argv", ["/venv/bin/eqlen", "train", "a b.yaml", "steps=3"])
    made = recipe(run.parent, run_dir=str(run))
    write_run(run, made)
    RunFolder(made).open(made).check()
    shown = {name: str(text) for name, text in RunStatus(run).page()}
    assert shown["command"] == "eqlen train 'a b.yaml' steps=3"
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert head.stdout.startswith(shown["commit"].split()[0])
    assert f"process {os.getpid()} on {socket.gethostname()}" in shown["trained by"]
    assert f"torch {metadata.version('torch')}" in shown["versions"]


def test_warnings_are_kept_and_still_printed(run):
    life = Life(run)
    life.progress.warn("step 3 trained nothing")
    logging.getLogger("megatron_eqlen.training.policy").warning("update %d is skipped", 7)
    assert within(60, lambda: len(read_state(run).warnings) == 2)
    warnings = re.findall(r"warning     \S+ (.*)", screen(run))
    assert warnings == ["step 3 trained nothing", "update 7 is skipped"]
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

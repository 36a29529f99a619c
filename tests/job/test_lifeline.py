"""Processes end with their launcher, however it ends, and not before."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from megatron_eqlen.processes.lifeline import LAUNCHER, TORCHRUN
from tests.kit import ROOT
from tests.kit.processes import are_gone, running, within

CHILD = """
import os, subprocess, sys, time
from megatron_eqlen.processes.lifeline import die_with_launcher
die_with_launcher()
if len(sys.argv) > 1:
    subprocess.Popen([sys.executable, "-c", sys.argv[1]])  # inherits the environment
print(os.getpid(), flush=True)
time.sleep(600)
"""
LAUNCH = f"""
import os, subprocess, sys, threading, time
from megatron_eqlen.processes.lifeline import named
CHILD = {CHILD!r}
def launch(environ=named()):
    command = [sys.executable, "-c", CHILD, CHILD]
    child = subprocess.Popen(command, env=os.environ | environ, stdout=subprocess.PIPE, text=True)
    print(child.stdout.readline().strip(), child.stdout.readline().strip(), flush=True)
"""
ENDINGS = {
    "returned": "launch()",
    "raised": "launch()\nraise ValueError",
    "left without cleaning up": "launch()\nos._exit(1)",
    "was killed": "launch()\ntime.sleep(600)",
    "was torchrun, and was killed": f"launch({{{TORCHRUN!r}: 'id'}})\ntime.sleep(600)",
}


def start(script: str) -> tuple[subprocess.Popen, list[int]]:
    """Start a launcher; return it and the process ids of its child and grandchild."""
    launcher = subprocess.Popen(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    return launcher, [int(pid) for pid in launcher.stdout.readline().split()]


@pytest.mark.parametrize("ending", ENDINGS)
def test_children_and_their_children_end_when_the_launcher(ending):
    launcher, pids = start(LAUNCH + ENDINGS[ending])
    if "killed" in ending:
        launcher.send_signal(signal.SIGKILL)
    launcher.wait(timeout=60)
    assert len(pids) == 2
    assert within(30, are_gone(pids))


def test_children_outlive_the_thread_that_launched_them():
    launcher, pids = start(
        LAUNCH + "thread = threading.Thread(target=launch)\nthread.start()\ntime.sleep(600)"
    )
    assert not within(1, are_gone(pids))
    assert running().keys() >= set(pids)
    launcher.kill()
    launcher.wait()
    assert within(30, are_gone(pids))


HOARD = """
import os, sys, tempfile, time
from multiprocessing import resource_tracker, shared_memory
from megatron_eqlen.processes.lifeline import die_with_launcher
from megatron_eqlen.processes.scratch import use_scratch
use_scratch()
os.environ["EQLEN_LAUNCHED"] = str(os.getppid())
resource_tracker.register = lambda *_: None  # it is killed as well
segment = shared_memory.SharedMemory(create=True, size=1 << 16)
tempfile.mkstemp()
die_with_launcher()
print(tempfile.gettempdir(), segment._name, flush=True)
sys.stdin.read()
segment.unlink()
"""


def hoard(temporary: Path) -> tuple[subprocess.Popen, Path, Path]:
    """Start a process with a temporary file and shared memory; return it, its folder and its segment."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOARD],
        env=os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    folder, segment = process.stdout.readline().split()
    return process, Path(folder), Path("/dev/shm" + segment)


def test_what_a_killed_process_leaves_goes_with_the_next_start_and_what_others_use_stays():
    with tempfile.TemporaryDirectory(dir="/tmp") as temporary:
        killed, old, segment = hoard(Path(temporary))
        assert old.parent == Path(temporary)
        assert within(30, lambda: any(note.read_text() for note in old.glob("shared-memory-*")))
        assert len(list(old.iterdir())) == 2
        others, theirs, in_use = hoard(Path(temporary))
        killed.kill()
        killed.wait()
        assert old.exists()
        assert segment.exists()
        last, mine, _ = hoard(Path(temporary))
        assert not old.exists()
        assert not segment.exists()
        assert theirs.exists()
        assert in_use.exists()
        for process in (others, last):
            process.communicate()
        assert not theirs.exists(), "one that ends in order removes its own"
        assert not mine.exists()


def test_a_long_tmpdir_leaves_room_for_the_paths_of_sockets(tmp_path):
    long = tmp_path / ("x" * 60)
    long.mkdir()
    process, folder, _ = hoard(long)
    process.communicate()
    assert folder.parent == Path("/tmp")


def test_a_child_that_starts_after_its_launcher_is_gone_ends_at_once():
    environ = os.environ | {"PYTHONPATH": str(ROOT), LAUNCHER: "1"}
    ended = subprocess.run([sys.executable, "-c", CHILD], env=environ, capture_output=True, timeout=10)
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, b"", b"the launcher is gone\n")

"""Processes end with their launcher, however it ends, and not before."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

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


def test_a_child_that_starts_after_its_launcher_is_gone_ends_at_once():
    environ = os.environ | {"PYTHONPATH": str(ROOT), LAUNCHER: "1"}
    ended = subprocess.run([sys.executable, "-c", CHILD], env=environ, capture_output=True, timeout=10)
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, b"", b"the launcher is gone\n")

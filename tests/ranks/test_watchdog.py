"""Ranks that hang end by themselves and report where they stood; ranks that are only slow continue."""

from __future__ import annotations

import itertools
import os
import re
import signal
import time
from pathlib import Path

import pytest

from megatron_eqlen.processes.run_state import read_state
from megatron_eqlen.processes.watchdog import HUNG
from tests.kit.jobs import start, start_ranks
from tests.kit.processes import within

BEGIN = """
import atexit, ctypes, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from megatron_eqlen.processes import watchdog
rank, world = 0, 1
if len(sys.argv) > 2:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.all_reduce(torch.ones(1))
dog = watchdog.Watchdog(rank, world, 3.0)
dog.start(Path(sys.argv[1]))
atexit.register(dog.stop)
"""
SLOW = """
with dog.stage("train"):
    for _ in range(7 * rank):  # longer than a rank may be silent
        time.sleep(0.5)
        watchdog.beat()
    dist.all_reduce(torch.ones(1))
"""
MISSES = """
with dog.stage("sync"):
    time.sleep(600) if rank else dist.all_reduce(torch.ones(1))
"""
GOES_ON = """
home = Path(sys.argv[1]).parent
with dog.stage("train"):
    while not (home / "go").exists():
        time.sleep(0.05)
        watchdog.beat()
    dist.all_reduce(torch.ones(1)) if world > 1 else None
"""
IS_BUSY = """
def deep(calls):  # frames come and go: a process that reads them meanwhile crashes
    return calls and deep(calls - 1)
with dog.stage("train"):
    while True:
        deep(900)
        watchdog.beat()
"""
WAITS = """
home = Path(sys.argv[1]).parent
with dog.stage("train"):
    while rank and not (home / "come").exists():
        time.sleep(0.05)
        watchdog.beat()
    dist.all_reduce(torch.ones(1))
"""
STOPS_ITSELF = """
import os, signal
declare = dog._declare
def stop_once():
    dog._declare = declare
    os.kill(os.getpid(), signal.SIGSTOP)
    return declare()
dog._declare = stop_once  # after a look, before anything is asked
"""
KEEPS_THE_LOCK = """
mutex = ctypes.create_string_buffer(64)
for _ in range(2 if rank else 0):  # the second call keeps Python's lock for ever
    ctypes.PyDLL(None).pthread_mutex_lock(mutex)
dist.all_reduce(torch.ones(1))
"""


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """Start all jobs at once: they sleep most of the time. Each has its own folder, below that of one run."""
    home = tmp_path_factory.mktemp("run") / "hang"
    home.mkdir()
    begun = {
        "misses": start_ranks(2, "-c", BEGIN + SLOW + MISSES, home / "misses", "ranks"),
        "one_keeps": start_ranks(2, "-c", BEGIN + KEEPS_THE_LOCK, home / "one_keeps", "ranks"),
        "alone": [start("-c", BEGIN + GOES_ON, home / "alone")],
        "waits": start_ranks(2, "-c", BEGIN + WAITS, home / "waits", "ranks"),
        "stopped": start_ranks(2, "-c", BEGIN + GOES_ON, home / "stopped", "ranks"),
    }
    yield home, begun
    for job in itertools.chain(*begun.values()):
        job.kill()


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def recorded(file: Path) -> list[str]:
    """Return the causes of the hangs that the run's record names ``file`` for."""
    hangs = (hang.rpartition("; see ") for hang in read_state(file.parents[2]).hangs)
    return [cause for cause, _, read_first in hangs if read_first == str(file)]


def test_ranks_that_are_all_stopped_continue_and_one_that_is_stopped_alone_is_named(jobs):
    home, begun = jobs
    (alone,), ranks = begun["alone"], begun["stopped"]
    all_of_them = [alone, *ranks]
    files = [home / "alone/rank-0.txt", home / "stopped/rank-0.txt", home / "stopped/rank-1.txt"]

    def seconds_left() -> list[float]:
        """Return for each rank the seconds for which it has reported that it is fine."""
        return [file.stat().st_mtime - time.time() if file.exists() else 0.0 for file in files]

    def send(number: signal.Signals) -> None:
        for job in all_of_them:
            os.kill(job.pid, number)

    assert within(60, lambda: min(seconds_left()) > 0.0)
    send(signal.SIGSTOP)
    # a rank that ran would have its stacks written after 1 s
    assert within(60, lambda: max(seconds_left()) < -1.5)
    send(signal.SIGCONT)
    assert within(60, lambda: min(seconds_left()) > 0.0), (alone.stderr, ranks[0].stderr)
    os.kill(ranks[1].pid, signal.SIGSTOP)
    (home / "go").touch()
    assert alone.wait() == 0, alone.stderr
    assert not (home / "alone").exists()
    assert within(60, lambda: ranks[0].poll() == HUNG)
    assert "rank 0 has made no progress for" in (home / "stopped/index.txt").read_text()
    assert (home / "stopped/rank-1.txt").stat().st_size == 0


def test_a_busy_rank_that_is_stopped_again_and_again_continues(tmp_path):
    job = start("-c", BEGIN.replace("3.0", "0.75") + IS_BUSY, tmp_path / "hang/busy")
    stacks = tmp_path / "hang/busy/rank-0.txt"
    try:
        assert within(60, stacks.exists)
        for _ in range(4):
            os.kill(job.pid, signal.SIGSTOP)
            time.sleep(1.0)  # a rank may be silent for 0.75 s
            os.kill(job.pid, signal.SIGCONT)
            assert not within(0.3, lambda: job.poll() is not None), job.stderr
            assert stacks.stat().st_size == 0
    finally:
        job.kill()


def test_after_a_stop_a_rank_that_waits_gives_the_others_time_to_come_back(jobs):
    """The rank waits for a slow one, longer than it may alone, when both are stopped; it is continued
    first."""
    home, begun = jobs
    waiting, slow = (home / f"waits/rank-{rank}.txt" for rank in (0, 1))

    def until(file: Path) -> float:
        return file.stat().st_mtime - time.time() if file.exists() else 0.0

    assert within(60, lambda: until(waiting) < -0.5 and until(slow) > 0.0)
    for job in begun["waits"]:
        os.kill(job.pid, signal.SIGSTOP)
    assert within(60, lambda: until(slow) < -1.5)
    os.kill(begun["waits"][0].pid, signal.SIGCONT)
    assert not within(1.0, lambda: begun["waits"][0].poll() is not None), begun["waits"][0].stderr
    os.kill(begun["waits"][1].pid, signal.SIGCONT)
    (home / "come").touch()
    assert begun["waits"].wait() == [0, 0]


def test_a_rank_that_is_stopped_between_two_looks_continues(tmp_path):
    job = start("-c", BEGIN + STOPS_ITSELF + GOES_ON, tmp_path / "hang/asking")
    try:
        assert within(60, lambda: is_stopped(job.pid))
        time.sleep(3.5)  # a rank may be silent for 3 s
        os.kill(job.pid, signal.SIGCONT)
        (tmp_path / "hang/go").touch()
        assert job.wait() == 0, job.stderr
        assert not (tmp_path / "hang").joinpath("asking").exists()
    finally:
        job.kill()


def test_a_rank_that_misses_a_collective_is_recorded_and_one_that_was_slow_is_not_ended(jobs):
    folder, ranks = jobs[0] / "misses", jobs[1]["misses"]
    assert ranks.wait() == [HUNG, HUNG]
    said = (folder / "index.txt").read_text().rstrip()
    assert re.search(r"the run hangs: rank . has made no progress for \d+ s in stage sync", said)
    assert f"eqlen: {said}" in ranks[0].stderr + ranks[1].stderr
    assert recorded(folder / "index.txt") == [said]
    for rank, place in enumerate(("in all_reduce", "in <module>")):
        text = (folder / f"rank-{rank}.txt").read_text()
        assert text.startswith(f"rank {rank} has made no progress for")
        assert place in text


def test_the_stacks_of_a_rank_that_cannot_run_python_are_printed_beside_the_others(jobs):
    folder, ranks = jobs[0] / "one_keeps", jobs[1]["one_keeps"]
    assert within(60, lambda: ranks[0].poll() == HUNG)
    assert "rank 0 has made no progress for" in (folder / "rank-0.txt").read_text()
    assert within(60, lambda: ranks[1].poll() == 1)
    assert "Timeout (" in ranks[1].stderr
    assert "most recent call first" in ranks[1].stderr

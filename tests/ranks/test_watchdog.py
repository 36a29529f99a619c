"""A rank that hangs ends by itself, and says where it stood; one that is only slow goes on."""

from __future__ import annotations

import itertools

import pytest

from tests.kit.jobs import start

BEGIN = """
import atexit, ctypes, sys, time
from pathlib import Path
from megatron_eqlen.training import flight_recorder
from megatron_eqlen import watchdog
flight_recorder.enable()
rank, world = 0, 1
watchdog.FIRST = 1.5
dog = watchdog.Watchdog(rank, world, 2.0, flight_recorder.status)
dog.tells(lambda: {"collectives": flight_recorder.collectives(), "step": 7})
dog.start(Path(sys.argv[1]))
atexit.register(dog.stop)
"""
LEARNS = """
for silence in (0.5, 2.4):  # the second time more than 2 s are too long, were it not for the first
    with dog.stage("checkpoint"):
        time.sleep(silence)
"""
KEEPS_THE_LOCK = """
ctypes.PyDLL(None).sleep(600)
"""


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """All at once: they sleep most of the time. Each has its own folder."""
    home = tmp_path_factory.mktemp("hang")
    begun = {
        "learns": [start("-c", BEGIN + LEARNS, home / "learns")],
        "keeps": [start("-c", BEGIN + KEEPS_THE_LOCK, home / "keeps")],
    }
    yield home, begun
    for job in itertools.chain(*begun.values()):
        job.kill()


def test_what_a_stage_took_before_it_may_take_again(jobs):
    (job,) = jobs[1]["learns"]
    assert job.wait() == 0, job.stderr
    assert not (jobs[0] / "learns").exists(), "nothing is left of ranks that ended well"


def test_where_no_thread_can_run_python_the_stacks_are_written_all_the_same(jobs):
    (job,) = jobs[1]["keeps"]
    assert job.wait() == 1
    text = (jobs[0] / "keeps/rank-0.txt").read_text()
    assert text.startswith("Timeout (")
    assert "most recent call first" in text

"""What holds for the whole suite: which tests share a worker, and that no process that a test started is left
when it ends."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.kit import jobs
from tests.kit.processes import adopt_orphans, command_line, descendants, within

HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "torch/_inductor/compile_worker")
"""Libraries' own processes, which serve this one to its end and go with it."""


LONGEST = "tests/job/test_train.py"


class ByFolderOrFile(LoadScopeScheduling):
    """A worker gets whole files, for the sake of their fixtures. Of the tests that fork from a warm process
    (``tests.kit.jobs``), which takes 15 CPU-seconds to start, it gets the whole folder, but for the longest
    file; likewise of those that share a SLURM."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::")[0]
        folder = file.split("/")[1]
        return folder if folder in ("engine", "job", "slurm") and file != LONGEST else file


@pytest.hookimpl(optionalhook=True)  # without xdist, or with -p no:xdist, nobody asks
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFolderOrFile:
    return ByFolderOrFile(config, log)


@pytest.fixture(scope="session", autouse=True)
def no_process_is_left_over() -> Iterator[None]:
    """Set up before and torn down after every other fixture."""
    adopt_orphans()
    yield
    jobs.stop_server()
    within(10, lambda: not leftovers())
    assert leftovers() == []


def leftovers() -> list[str]:
    lines = map(command_line, sorted(descendants(os.getpid())))
    return [line for line in lines if line and not any(helper in line for helper in HELPERS)]

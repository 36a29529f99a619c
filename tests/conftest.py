"""What holds for the whole suite: no process that a test started is left when it ends."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.kit import jobs
from tests.kit.processes import adopt_orphans, command_line, descendants, within

HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "torch/_inductor/compile_worker")
"""Libraries' own processes, which serve this one to its end and go with it."""


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

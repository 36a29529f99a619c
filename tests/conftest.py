"""Hooks and fixtures for the whole suite: the distribution of test files over workers, and a check that tests
leave no process behind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from execnet import XSpec
from xdist.scheduler import LoadScopeScheduling

from megatron_eqlen.engines.server.gate import KEY
from tests.kit import ROOT, jobs, servers
from tests.kit.marks import examples
from tests.kit.processes import adopt_orphans, descendants, described, within
from tests.kit.zygote import JOBS, RANKS, Zygote

hypothesis.settings.register_profile("tests", examples(100))
hypothesis.settings.load_profile("tests")

os.environ.setdefault(KEY, "the-secret-of-the-tests")

HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "torch/_inductor/compile_worker")
"""Libraries' own processes, which live as long as this one."""


TOGETHER = {
    "servers": ("engine/test_ahead_servers", "engine/test_rollout_held_up", "engine/test_rollout_server"),
    "a run": (
        "job/test_ahead",
        "job/test_check",
        "job/test_killed_in_a_sync",
        "job/test_listeners",
        "job/test_random_recipes",
        "job/test_resume",
        "job/test_sweep",
        "job/test_train",
        "job/test_wrong_server",
    ),
}
"""Groups of files that share fixtures: two vLLM servers, or a run that has ended."""


def group_of(nodeid: str) -> str:
    file = nodeid.split("::")[0].removeprefix("tests/").removesuffix(".py")
    if file.startswith("slurm/"):
        return "slurm"
    return next((group for group, files in TOGETHER.items() if file in files), file)


class ByFile(LoadScopeScheduling):
    """Gives each worker whole files, because of their fixtures, and files with shared fixtures to one
    worker."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


@pytest.hookimpl(optionalhook=True)  # without xdist, or with -p no:xdist, nobody asks
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    return ByFile(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put tests that mostly wait first: at the end they would have nothing beside them. Groups follow."""
    order = ["slurm", *TOGETHER]
    items.sort(key=lambda item: [group_of(item.nodeid) != group for group in order])


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Stop the servers of a group of files after its last test: they poll while they wait."""
    if nextitem is None or group_of(nextitem.nodeid) != group_of(item.nodeid):
        servers.stop_all()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[XSpec]) -> None:
    """Fork workers from one process that has imported the tests' libraries: otherwise each worker would
    import them."""
    python = Zygote.spawn(RANKS if folders(config) <= {"pure", "ranks"} else RANKS + JOBS).python
    specs[:] = [XSpec(f"{spec}//id={spec.id}//python={python}") for spec in specs]


def folders(config: pytest.Config) -> set[str]:
    """Return the folders of ``tests/`` that are named in the arguments; "" for all."""
    paths = [Path(argument.split("::")[0]).resolve().relative_to(ROOT) for argument in config.args]
    return {path.parts[1] if len(path.parts) > 1 else "" for path in paths}


@pytest.fixture(scope="session", autouse=True)
def no_process_is_left_over() -> Iterator[None]:
    """Fail if a test leaves a process behind. Set up before and torn down after every other fixture."""
    adopt_orphans()
    yield
    servers.stop_all()  # pytest has torn the session down when the hook above follows the last test
    jobs.stop_zygote()
    within(60, lambda: not leftovers())
    assert leftovers() == []


def leftovers() -> list[str]:
    """Return what is left over; what a zygote has forked bears the name of its test's file."""
    lines = map(described, sorted(descendants(os.getpid())))
    return [line for line in lines if line and not any(helper in line for helper in HELPERS)]

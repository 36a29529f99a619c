"""What holds for the whole suite: which tests share a worker, and that no process that a test started is left
when it ends."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from execnet import XSpec
from xdist.scheduler import LoadScopeScheduling

from tests.kit import ROOT, jobs
from tests.kit.marks import examples
from tests.kit.processes import adopt_orphans, command_line, descendants, within
from tests.kit.zygote import JOBS, RANKS, Zygote

hypothesis.settings.register_profile("tests", examples(100))
hypothesis.settings.load_profile("tests")

HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "torch/_inductor/compile_worker")
"""Libraries' own processes, which serve this one to its end and go with it."""


TOGETHER = {
    "servers": ("engine/test_ahead_servers", "engine/test_rollout_held_up", "engine/test_rollout_server"),
    "a run": ("job/test_ahead", "job/test_resume", "job/test_sweep", "job/test_train"),
}
"""Files that share two vLLM servers, or a run that has ended."""


class ByFile(LoadScopeScheduling):
    """A worker gets whole files, for the sake of their fixtures, and of files that share theirs all."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::")[0].removeprefix("tests/").removesuffix(".py")
        if file.startswith("slurm/"):
            return "slurm"
        return next((what for what, files in TOGETHER.items() if file in files), file)


@pytest.hookimpl(optionalhook=True)  # without xdist, or with -p no:xdist, nobody asks
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    return ByFile(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that mostly wait come first: at the end they would have nothing beside them."""
    items.sort(key=lambda item: not item.nodeid.startswith("tests/slurm/"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[XSpec]) -> None:
    """Workers are forked from one process that has imported what tests import: else each would import it."""
    python = Zygote.spawn(RANKS if folders(config) <= {"pure", "ranks"} else RANKS + JOBS).python
    specs[:] = [XSpec(f"{spec}//id={spec.id}//python={python}") for spec in specs]


def folders(config: pytest.Config) -> set[str]:
    """Of ``tests/``, that are named in the arguments; "" for all."""
    paths = [Path(argument.split("::")[0]).resolve().relative_to(ROOT) for argument in config.args]
    return {path.parts[1] if len(path.parts) > 1 else "" for path in paths}


@pytest.fixture(scope="session", autouse=True)
def no_process_is_left_over() -> Iterator[None]:
    """Set up before and torn down after every other fixture."""
    adopt_orphans()
    yield
    jobs.stop_zygote()
    within(10, lambda: not leftovers())
    assert leftovers() == []


def leftovers() -> list[str]:
    lines = map(command_line, sorted(descendants(os.getpid())))
    return [line for line in lines if line and not any(helper in line for helper in HELPERS)]

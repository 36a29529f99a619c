"""A tiny model with its data and a recipe, and a finished run of it: made once for all jobs of a worker."""

from pathlib import Path

import pytest

from megatron_eqlen.engines.server.__main__ import server_command
from megatron_eqlen.job import load
from megatron_eqlen.processes.lifeline import named
from tests.kit import jobs
from tests.kit.servers import ENVIRON, STARTED, free_ports, wait_until_up
from tests.kit.train_runs import make_home, train
from tests.kit.zygote import FREES


@pytest.fixture(scope="session")
def home(tmp_path_factory) -> Path:
    """Return a folder with a random tiny model, its data and a recipe."""
    return make_home(tmp_path_factory.mktemp("train"))


@pytest.fixture
def served(home) -> list[str]:
    """Return the overrides with which a recipe uses the running server of the group of files."""
    if not STARTED:
        (port,) = free_ports(1)
        longest = load(home / "recipe.yaml", ["rollout.max_response_length=80"])  # of all that are asked for
        (_, _, _, *flags), environ = server_command(longest, port, "127.0.0.1")
        process = jobs.start("-m", "tests.kit.forked_server", *flags, **named(), **ENVIRON, **environ)
        STARTED[f"http://127.0.0.1:{port}"] = process
        wait_until_up(f"http://127.0.0.1:{port}", process)
    (url,) = STARTED
    return ["rollout.engine=server", f"rollout.servers=[{url}]"]


@pytest.fixture(scope="session")
def trained(home) -> Path:
    """Return a finished run on one rank, which frees its memory at the end as a user's does."""
    return train(home, "one", **{FREES: "1"})

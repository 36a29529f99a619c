"""A tiny model with its data and a recipe, and a finished run of it: made once for all jobs of a worker."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit import ROOT
from tests.kit.train_runs import make_home, train
from tools.benchmarks import servers


@pytest.fixture(scope="session")
def home(tmp_path_factory) -> Path:
    """Return a folder with a random tiny model, its data and a recipe."""
    return make_home(tmp_path_factory.mktemp("train"))


@pytest.fixture(scope="session")
def server(home) -> Iterator[tuple[str, subprocess.Popen]]:
    """Yield the URL of a running server, started as a user starts it, and its process."""
    port = str(*servers.free_ports(1))
    module = ["-m", "megatron_eqlen.rollout.vllm.server", home / "recipe.yaml", "--port", port]
    url = f"http://127.0.0.1:{port}"
    process = servers.start([sys.executable, *module], {"OMP_NUM_THREADS": "1"}, cwd=ROOT)
    try:
        servers.wait_until_up(url, process)
        yield url, process
    finally:
        servers.stop(process)


@pytest.fixture(scope="session")
def served(server) -> list[str]:
    """Return the overrides with which a recipe uses the server."""
    return ["rollout.engine=server", f"rollout.servers=[{server[0]}]"]


@pytest.fixture(scope="session")
def trained(home) -> Path:
    """Return a finished run on one rank."""
    return train(home, "one")

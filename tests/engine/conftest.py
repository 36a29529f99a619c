"""Two real vLLM servers, started once for all tests of engines; the second has two tensor-parallel workers.
(``tests/job`` has one started as a user starts it.)"""

from types import SimpleNamespace

import pytest

from megatron_eqlen.engines import readers
from megatron_eqlen.engines.server.__main__ import server_command
from megatron_eqlen.processes.lifeline import named
from tests.kit import jobs
from tests.kit.rollout_kit import server_recipe
from tests.kit.servers import ENVIRON, STARTED, free_ports, wait_until_up
from tests.kit.zygote import JOBS


@pytest.fixture(scope="session")
def servers():
    """Return {url: process}; some tests kill one."""
    started = {}
    for workers, port in enumerate(free_ports(2), 1):
        kept = {"keep_routes": True, "keep_sampling_mask": True, "top_k": 20, "max_response_length": 150}
        recipe = server_recipe(["http://unknown"], tensor_parallel=workers, **kept)
        (_, _, _, *flags), environ = server_command(recipe, port, "127.0.0.1")
        command = ("-m", "tests.kit.forked_server", *flags)
        started[f"http://127.0.0.1:{port}"] = jobs.start(*command, **named(), **ENVIRON, **environ)
    STARTED.update(started)
    for url, process in started.items():
        wait_until_up(url, process)
    return started


class Reader(jobs.Child):
    """A process that reads streams, as ``Popen`` gives it."""

    def __init__(self, command: list[str], stdin: int) -> None:
        code = f"from {command[-1]} import main; main()"
        super().__init__(["-c", code], {}, [stdin, 1, 2], JOBS)

    def wait(self) -> None:
        assert self.poll() is not None, "it is killed before"


@pytest.fixture(autouse=True)
def forked_readers(monkeypatch):
    """Fork readers of streams from the zygote, as they import for longer than most tests take. Those of jobs
    start as a user's do."""
    monkeypatch.setattr(readers, "subprocess", SimpleNamespace(Popen=Reader))

"""Two real vLLM servers, started once for all tests of engines; the second has two tensor-parallel workers
and asynchronous scheduling. (``tests/job`` has one started as a user starts it.)"""

from contextlib import nullcontext

import pytest

from megatron_eqlen.processes.lifeline import named
from megatron_eqlen.rollout.vllm.server.__main__ import server_command
from tests.kit import jobs
from tests.kit.asynchronous import asynchronous
from tests.kit.rollout_kit import open_engine, server_recipe
from tests.kit.servers import ENVIRON, STARTED, free_ports, wait_until_up


@pytest.fixture(scope="module", params=["in turns", "asynchronous"])
def opened(request):
    """Return ``open_engine`` for engines that schedule as on CPUs, or as on GPUs."""
    with nullcontext(open_engine) if request.param == "in turns" else asynchronous() as opened:
        yield opened


@pytest.fixture(scope="session")
def servers():
    """Return {url: process}; some tests kill one."""
    started = {}
    for workers, port in enumerate(free_ports(2), 1):
        recipe = server_recipe(["http://unknown"], keep_routes=True, tensor_parallel=workers)
        (_, _, _, *flags), environ = server_command(recipe, port, "127.0.0.1")
        command = ("-m", "tests.kit.forked_server", *flags)
        if workers == 2:
            environ["ASYNCHRONOUS"] = "1"
        started[f"http://127.0.0.1:{port}"] = jobs.start(*command, **named(), **ENVIRON, **environ)
    STARTED.extend(started.values())
    for url, process in started.items():
        wait_until_up(url, process)
    return started

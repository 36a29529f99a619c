"""A server that computes another function than the trainer, though it says that it computes the same."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator

import pytest

from megatron_eqlen.engines.server.__main__ import server_command
from megatron_eqlen.job import load
from megatron_eqlen.processes.lifeline import named
from tests.kit import jobs
from tests.kit.processes import descendants
from tests.kit.servers import ENVIRON, free_ports, wait_until_up
from tests.kit.train_runs import NO_EVALUATION, command

OTHER = {"rms_norm_eps": 0.05}


@pytest.fixture
def wrong(home) -> Iterator[str]:
    """Yield the URL of a server whose vLLM was told another constant than its config.json has."""
    (port,) = free_ports(1)
    (_, _, _, *flags), environ = server_command(load(home / "recipe.yaml", []), port, "127.0.0.1")
    flags += ["--hf-overrides", json.dumps(OTHER)]
    process = jobs.start("-m", "tests.kit.forked_server", *flags, **named(), **ENVIRON, **environ)
    wait_until_up(url := f"http://127.0.0.1:{port}", process)
    yield url
    for pid in (*descendants(process.pid), process.pid):
        os.kill(pid, signal.SIGKILL)
    process.wait()


def test_training_refuses_it_after_the_first_sync_with_both_values(home, served, wrong):
    servers = f"rollout.servers=[{served[1].partition('[')[2][:-1]},{wrong}]"
    job = jobs.start(*command(home, "wrong", "rollout.engine=server", servers, NO_EVALUATION))
    assert job.wait() == 2, job.stderr
    assert f"rollout.servers: {wrong}: expected log-probs of the trainer's model, -" in job.stderr
    assert "of 32 tokens, found -" in job.stderr
    assert not (home / "wrong/weights").exists()
    assert not (home / "wrong/streams").exists(), "nothing was harvested"

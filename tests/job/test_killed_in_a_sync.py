"""A trainer that is killed while its server replaces the weights."""

from __future__ import annotations

import json
import os
import signal
import urllib.error
import urllib.request

import pytest

from megatron_eqlen.engines.server.gate import authorization
from tests.kit.jobs import start
from tests.kit.processes import within
from tests.kit.servers import STARTED
from tests.kit.train_runs import NO_EVALUATION, column, command


def test_the_next_run_trains_on_its_server(home, served):
    """The trainer is stopped when its sync has begun and not ended, as its folder of weights says, and
    another run has asked for the server before it is killed. A request of that moment is refused."""
    url = served[1].partition("[")[2][:-1]
    killed = start(*command(home, "killed", *served, NO_EVALUATION, "steps=1000"))

    def is_in_a_sync() -> bool:
        assert killed.poll() is None, killed.stderr
        if not (home / "killed/weights").exists():
            return False
        os.kill(killed.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, killed.pid, os.WSTOPPED)
        if (home / "killed/weights").exists():
            return True
        os.kill(killed.pid, signal.SIGCONT)
        return False

    try:
        assert within(300, is_in_a_sync, every=0.002)
        body = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 3, "detokenize": False}}
        headers = {"Content-Type": "application/json", **authorization()}
        request = urllib.request.Request(f"{url}/inference/v1/generate", json.dumps(body).encode(), headers)
        with pytest.raises(urllib.error.HTTPError, match="409"):
            urllib.request.urlopen(request, timeout=60)
        other = start(*command(home, "next", *served, NO_EVALUATION, "steps=2"))
    finally:
        killed.kill()
    assert other.wait() == 0, other.stderr
    assert column(home / "next", "step") == [1, 2]
    assert max(column(home / "next", "mismatch/logprob_abs_diff_max")) < 1e-4
    assert STARTED[url].poll() is None, "the server outlives its trainer"
    assert not (home / "next/weights").exists()

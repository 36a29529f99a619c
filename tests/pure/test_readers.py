"""Processes that read servers' streams: what they hand over, and their ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count

import pytest
from aiohttp import web

from megatron_eqlen.engines.readers import ENDED, Readers, Settings
from megatron_eqlen.engines.replica import HttpLoop, OpenRequest, Replica
from megatron_eqlen.engines.server.gate import REPLACING
from megatron_eqlen.recipe import RolloutRecipe
from megatron_eqlen.tokens import GrowingTokens
from megatron_eqlen.types import Delta
from tests.kit import ROOT

PROMPT = [1, 2, 3]


class Server:
    """Sends events of two tokens with masks, sampled by ``weights``, until the client goes."""

    def __init__(self) -> None:
        self.weights, self.left, self.early = "default", 0, 0
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.url = asyncio.run_coroutine_threadsafe(self._listen(), self.loop).result()

    async def _listen(self) -> str:
        app = web.Application()
        app.router.add_post("/inference/v1/generate", self._generate)
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return "http://{}:{}".format(*runner.addresses[0])

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        limit = (await request.json())["limit"]
        if self.early:
            self.early -= 1
            return web.Response(status=409, text=json.dumps({"error": REPLACING}))
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            for end in count(2, 2):
                choice = {
                    "finish_reason": "length" if end == limit else None,
                    "logprobs": {"content": [{"logprob": -float(t), "rank": 1} for t in (end - 2, end - 1)]},
                    "token_ids": [end - 2, end - 1],
                    "sampling_mask": [[end - 2], [7, end - 1]],
                    "weight_versions": [{"version": self.weights, "start": 0, "end": end}],
                }
                await response.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
                if end == limit:
                    usage = {"prompt_tokens_details": {"cached_tokens": 2}}
                    await response.write(b"data: " + json.dumps({"usage": usage}).encode() + b"\n\n")
                    return response
                await asyncio.sleep(0.01)
        finally:
            self.left += 1
        raise AssertionError


@pytest.fixture(scope="module")
def server() -> Server:
    return Server()


@pytest.fixture
def replica(server: Server) -> Iterator[Replica]:
    io = HttpLoop({})
    yield Replica(server.url, io, stock="vLLM V2")
    io.close()


@pytest.fixture
def readers(server: Server) -> Iterator[Readers]:
    given = {"engine": "server", "servers": [server.url], "keep_sampling_mask": True}
    rollout = RolloutRecipe.model_validate(given)
    readers = Readers(Settings({}, 60.0, rollout, ()), 1)
    readers.know({"default": 0})
    yield readers
    readers.close()
    assert all(process.poll() is not None for process in readers.processes)


def start(readers: Readers, replica: Replica, limit: int | None = None) -> OpenRequest:
    request = OpenRequest("a/0", replica, readers.forget)
    readers.start(request, 0, {"limit": limit})
    return request


def until(readers: Readers, done: Callable[[list[Delta | str]], bool]) -> list[Delta | str]:
    """Return what arrives until it is ``done``."""
    arrived: list[Delta | str] = []
    ends = time.monotonic() + 120
    while not done(arrived):
        assert time.monotonic() < ends, arrived[-1:]
        arrived += [found for _, found in readers.arrived()]
    return arrived


def test_tokens_arrive_with_their_columns_in_order(readers, replica):
    start(readers, replica, limit=40)
    grown, cached = GrowingTokens(), None
    for delta in until(readers, lambda all: any(isinstance(d, Delta) and d.finish_reason for d in all)):
        assert isinstance(delta, Delta)
        grown.append(delta.token_ids, delta.columns, delta.policy_version)
        cached = delta.num_cached_tokens
    tokens = grown[:]
    assert tokens.token_ids.tolist() == [*range(40)]
    assert tokens["logprobs"].tolist() == [-float(token) for token in range(40)]
    assert [ids.tolist() for ids in tokens["kept"]] == [[t] if t % 2 == 0 else [7, t] for t in range(40)]
    assert cached == 2


def test_a_request_that_meets_a_weight_update_is_sent_again(readers, replica, server):
    server.early = 2
    start(readers, replica, limit=4)
    arrived = until(readers, lambda all: any(isinstance(d, Delta) and d.finish_reason for d in all))
    assert [delta.token_ids for delta in arrived if isinstance(delta, Delta)] == [[0, 1], [2, 3]]
    assert server.early == 0


def test_a_request_that_is_forgotten_closes_its_connection_and_brings_no_more(readers, replica, server):
    before, request = server.left, start(readers, replica)
    until(readers, bool)
    readers.forget(request)
    while server.left == before:
        assert readers.arrived() == []


def test_tokens_of_weights_that_are_known_since_arrive_and_of_others_fail(readers, replica, server):
    start(readers, replica)
    until(readers, bool)
    readers.know({"default": 0, "new": 1})
    server.weights = "new"
    until(readers, lambda all: any(isinstance(d, Delta) and d.policy_version == [1, 1] for d in all))
    server.weights = "default"
    until(readers, lambda all: bool(all) and isinstance(all[-1], Delta) and all[-1].policy_version == [0, 0])
    server.weights = "foreign"
    try:
        last = until(readers, lambda all: bool(all) and isinstance(all[-1], str))[-1]
    finally:
        server.weights = "default"
    assert "found 'foreign'" in str(last)


def test_requests_of_a_reader_that_is_killed_fail_and_the_next_one_gets_another(readers, replica):
    start(readers, replica)
    until(readers, bool)
    readers.processes[0].send_signal(signal.SIGKILL)
    assert until(readers, lambda all: bool(all) and isinstance(all[-1], str))[-1] == ENDED
    start(readers, replica)
    assert isinstance(until(readers, bool)[0], Delta)
    assert len(readers.processes) == 2


def test_a_server_that_does_not_even_begin_to_answer_is_silent():
    listening, io = socket.create_server(("127.0.0.1", 0)), HttpLoop({})
    rollout = RolloutRecipe.model_validate({"engine": "server", "servers": ["http://127.0.0.1:1"]})
    readers = Readers(Settings({}, 0.5, rollout, ()), 1)
    try:
        start(readers, Replica(f"http://127.0.0.1:{listening.getsockname()[1]}", io, stock="vLLM V2"))
        assert until(readers, bool) == ["silent for 0.5 s"]
    finally:
        readers.close()
        io.close()
        listening.close()


TRAINER = """
import sys, time
from tests.pure.test_readers import *
rollout = RolloutRecipe.model_validate({"engine": "server", "servers": [sys.argv[1]]})
readers = Readers(Settings({}, 60.0, rollout, ()), 1)
readers.know({"default": 0})
start(readers, Replica(sys.argv[1], HttpLoop({}), stock="vLLM V2"))
until(readers, bool)
print(readers.processes[0].pid, flush=True)
time.sleep(600)
"""


def test_a_reader_ends_with_a_trainer_that_is_killed(server):
    command = [sys.executable, "-c", TRAINER, server.url]
    trainer = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    reader = int(trainer.stdout.readline())
    before = server.left
    trainer.kill()
    trainer.wait()
    while server.left == before or is_running(reader):
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] != "Z"

"""vLLM servers: two real ones against the in-process engine, and a scripted one for what goes wrong."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request

import numpy as np
import pytest
from aiohttp import web
from safetensors.torch import load_file

from megatron_eqlen.recipe import Recipe, parse
from megatron_eqlen.rollout import vllm_server
from megatron_eqlen.rollout.engine import EngineError
from megatron_eqlen.rollout.harvest import harvest
from megatron_eqlen.rollout.vllm_colocated import ColocatedEngine
from megatron_eqlen.rollout.vllm_server import ServerEngine, server_command
from megatron_eqlen.types import Prompt, Rollout
from tests.rollout_kit import folder

EOS = range(1, 7)
PROMPTS = [Prompt(f"p{i}", [5 + i, 6, 7] * 14, "", "math", "") for i in range(6)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def make_recipe(urls: list[str], **over) -> Recipe:
    rollout = {"max_response_length": 150, "temperature": 1.0, "max_num_seqs": 16, "kv_cache_gib": 0.1}
    return parse(
        {
            "name": "t", "steps": 1, "group_size": 4,
            "model": {"path": str(folder("qwen3")), "dtype": "float32"},
            "data": {"sources": [{"name": "s", "path": "none"}], "max_prompt_length": 50},
            "rollout": rollout | {"engine": "server", "servers": urls} | over,
        },
        "test",
    )  # fmt: skip


def connect(recipe: Recipe) -> ServerEngine:
    return ServerEngine(recipe.model.path, recipe.rollout, EOS, 200)


@pytest.fixture(scope="module")
def servers():
    """Two real servers: {url: process}."""
    environ = os.environ | {
        "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCH_COMPILE_DISABLE": "1",
    }  # fmt: skip
    started = {}
    for port in (free_port(), free_port()):
        url = f"http://127.0.0.1:{port}"
        command, extra = server_command(make_recipe([url]), port, "127.0.0.1")
        started[url] = subprocess.Popen(
            command, env=environ | extra, start_new_session=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
    for url, process in started.items():
        wait_until_up(url, process)
    yield started
    for process in started.values():
        stop(process)


def wait_until_up(url: str, process: subprocess.Popen) -> None:
    while True:
        assert process.poll() is None, f"the server of {url} stopped"
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5)
            return
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            time.sleep(0.5)


def stop(process: subprocess.Popen) -> None:
    """Kill a server with the processes it started (they are a session of their own)."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def assert_same(found: list[Rollout], expected: list[Rollout]) -> None:
    """Same tokens and outcomes; log-probs up to what batches of other sizes round differently."""
    assert [(r.prompt_id, r.index, r.outcome, len(r.pairs)) for r in found] == [
        (r.prompt_id, r.index, r.outcome, len(r.pairs)) for r in expected
    ]
    for one, other in zip(found, expected, strict=True):
        for a, b in zip(one.segments(), other.segments(), strict=True):
            assert (a.token_ids, a.finish_reason) == (b.token_ids, b.finish_reason)
            assert np.abs(np.array(a.logprobs) - np.array(b.logprobs)).max() < 2e-5


def test_two_servers_harvest_what_one_process_does_through_a_sync_and_a_death(servers):
    recipe = make_recipe(list(servers))
    weights = load_file(folder("qwen3", 1) / "model.safetensors")
    local = ColocatedEngine(recipe.model.path, recipe.rollout, "float32", EOS, 200)
    remote = connect(recipe)

    expected, _ = harvest(local, PROMPTS, recipe, EOS, seed=1)
    found, metrics = harvest(remote, PROMPTS, recipe, EOS, seed=1)
    assert_same(found, expected)
    assert metrics["engine/live_replicas"] == 2
    assert 0 <= metrics["harvest/recomputed_tokens_per_fork"] <= recipe.rollout.block_size
    assert metrics["engine/removed_probability"] > 0

    for engine in (local, remote):
        engine.update_weights(iter(weights.items()), 1)
    expected, _ = harvest(local, PROMPTS, recipe, EOS, seed=2)
    completed = []

    def kill_one(rollout: Rollout) -> None:
        if not completed:
            stop(next(iter(servers.values())))
        completed.append(rollout)

    found, metrics = harvest(remote, PROMPTS, recipe, EOS, seed=2, on_complete=kill_one)
    assert_same(found, expected)
    assert len(completed) == len(expected)
    assert {stream.policy_version for stream in found} == {1}
    assert metrics["engine/live_replicas"] == 1
    assert metrics["engine/sync_bytes"] == sum(w.numel() * w.element_size() for w in weights.values())
    assert metrics["harvest/retries"] > 0

    with pytest.raises(ValueError, match="missing"):
        remote.update_weights(iter(list(weights.items())[:3]), 2)
    with pytest.raises(EngineError, match="failed half way"):
        remote.submit("x", [5], 1, 0)
    remote.update_weights(iter(weights.items()), 1)
    assert_same(harvest(remote, PROMPTS[:1], recipe, EOS, seed=2)[0], expected[:2])
    remote.close()
    local.close()


class Fake:
    """An HTTP server that answers like vLLM, then misbehaves as ``behaviour`` says."""

    def __init__(self, behaviour: str = "good") -> None:
        self.behaviour = behaviour
        self.version = "default"
        self.max_model_len = 256
        self.asked = 0
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.port = free_port()
        self.up = threading.Event()
        self.thread.start()
        self.up.wait()
        self.url = f"http://127.0.0.1:{self.port}"

    def _serve(self) -> None:
        app = web.Application(client_max_size=2**30)
        app.router.add_get("/weight_info", self.weight_info)
        app.router.add_post("/inference/v1/generate", self.generate)
        app.router.add_post("/{name}", self.control)
        runner = web.AppRunner(app)
        self.loop.run_until_complete(runner.setup())
        self.loop.run_until_complete(web.TCPSite(runner, "127.0.0.1", self.port).start())
        self.up.set()
        self.loop.run_forever()

    async def weight_info(self, request):
        return web.json_response({"weight_version": self.version})

    async def control(self, request):
        body = await request.json() if request.can_read_body else {}
        if body and body.get("method") == "eqlen_setup":
            return web.json_response({"results": [{"vocab_size": 96, "max_model_len": self.max_model_len}]})
        if body and body.get("method") == "eqlen_removed_mass":
            return web.json_response({"results": [[0.0, 0]]})
        if request.match_info["name"] == "finish_weight_update":
            self.version = body["weight_version"]
        return web.json_response({})

    async def generate(self, request):
        """Counts up from the last token, two tokens an event, to the limit or to 90, the end."""
        body = await request.json()
        self.asked += 1
        if self.behaviour == "refuse":
            return web.Response(status=500, text="out of memory")
        response = web.StreamResponse()
        await response.prepare(request)
        start = body["token_ids"][-1] + 1
        tokens = list(range(start, min(91, start + body["sampling_params"]["max_tokens"])))
        if self.behaviour == "short":
            tokens = tokens[:3]
        if self.behaviour == "hang":
            await asyncio.sleep(60)
        for i in range(0, len(tokens), 2):
            part = tokens[i : i + 2]
            if self.behaviour == "break" and i >= 4:
                request.transport.abort()
                return response
            if self.behaviour == "slow":
                await asyncio.sleep(0.2)
            reason = "length" if i + 2 >= len(tokens) else None
            content = [{"logprob": -0.5} for _ in part]
            await self.send(
                response, [{"token_ids": part, "finish_reason": reason, "logprobs": {"content": content}}]
            )
        await self.send(response, [])
        return response

    @staticmethod
    async def send(response, choices) -> None:
        await response.write(f"data: {json.dumps({'choices': choices, 'usage': {}})}\n\n".encode())

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)


@pytest.fixture
def fake():
    made = []

    def make(behaviour: str = "good") -> Fake:
        made.append(Fake(behaviour))
        return made[-1]

    yield make
    for one in made:
        one.close()


PROMPT = [Prompt("p", [60], "", "math", "")]


def harvest_independent(fakes: list[Fake], during=None, **over):
    recipe = make_recipe([fake.url for fake in fakes], **over).model_copy(update={"sampling": "independent"})
    engine = connect(recipe)
    try:
        if during is not None:
            during(engine)
        rollouts, metrics = harvest(engine, PROMPT, recipe, {90}, seed=0)
        return [completion.token_ids for completion in rollouts[0].completions], metrics
    finally:
        engine.close()


COUNTED = [list(range(61, 91))] * 4


@pytest.mark.parametrize("behaviour", ["refuse", "break", "hang"])
def test_a_replica_that_fails_is_left_and_nothing_is_lost(fake, behaviour, caplog):
    bad, good = fake(behaviour), fake()
    found, metrics = harvest_independent([bad, good], request_timeout=2 if behaviour == "hang" else 600)
    assert found == COUNTED
    assert metrics["engine/live_replicas"] == 1
    assert metrics["harvest/retries"] == 4
    assert "dead until the next weight sync" in caplog.text


def test_an_answer_with_fewer_tokens_is_continued(fake):
    found, metrics = harvest_independent([fake("short")], max_response_length=6)
    assert found == [list(range(61, 67))] * 4
    assert metrics["harvest/retries"] == 4


def test_a_replica_that_restarted_with_old_weights_is_noticed(fake, monkeypatch, caplog):
    monkeypatch.setattr(vllm_server, "HEARTBEAT", 0.05)
    slow, good = fake("slow"), fake()

    def restart(engine):
        engine.update_weights(iter(load_file(folder("qwen3", 1) / "model.safetensors").items()), 7)
        slow.version = "default"

    found, metrics = harvest_independent([slow, good], restart)
    assert found == COUNTED
    assert metrics["harvest/retries"] == 4
    assert "expected weights '7', found 'default'" in caplog.text


def test_servers_that_do_not_fit_are_refused(fake):
    with pytest.raises(EngineError, match=r"none is alive of http://127\.0\.0\.1:1, "):
        connect(make_recipe(["http://127.0.0.1:1", "http://127.0.0.1:2"]))
    old = fake()
    old.version = "12"
    with pytest.raises(EngineError, match="none is alive"):
        connect(make_recipe([old.url]))
    short = fake()
    short.max_model_len = 100
    with pytest.raises(EngineError, match="--max-model-len of at least 200, found 100"):
        connect(make_recipe([short.url]))
    both = [fake("refuse"), fake("refuse")]
    with pytest.raises(EngineError, match="none is alive"):
        harvest_independent(both)

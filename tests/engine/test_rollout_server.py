"""vLLM servers: two real ones against the in-process engine, and a scripted one for faults."""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import json
import os
import re
import signal
import socket
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp import web
from safetensors.torch import load_file, save_file

from megatron_eqlen.engines import replica as replica_module
from megatron_eqlen.engines.protocol import Engine, EngineError, Request
from megatron_eqlen.engines.server.gate import CALLS, HEALTH, KEY, RPC, SERVED, TRAINER, authorization
from megatron_eqlen.engines.servers import ServerEngine
from megatron_eqlen.engines.weight_table import WeightTable
from megatron_eqlen.engines.weights import folder as folder_transport
from megatron_eqlen.harvest.harvest import harvest, harvest_seed
from megatron_eqlen.harvest.harvest_plan import HarvestPlan
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.recipe.contents import function, weights
from megatron_eqlen.record.partial import HarvestProgress, RolloutOrigin
from megatron_eqlen.record.reader import read_progress
from megatron_eqlen.record.recorder import Recorder
from megatron_eqlen.sampling.equal_length.dual_track import pairs_of
from megatron_eqlen.sampling.harvester import Harvester
from megatron_eqlen.types import Delta, Metrics, Part, Prompt, Rollout
from tests.kit.jobs import Job, start
from tests.kit.observers import OnPart
from tests.kit.processes import descendants, within
from tests.kit.rollout_kit import folder, server_recipe
from tests.kit.servers import free_ports
from tests.kit.tiny_models import SHORT, save_tiny

EOS = range(1, 7)
NORM = "model.norm.weight"
PROMPTS = [Prompt(f"p{i}", [5 + i, 6, 7] * 14, "", "math", "") for i in range(4)]


def open_local(recipe: Recipe) -> Engine:
    from megatron_eqlen.engines.colocated import ColocatedEngine

    return ColocatedEngine(recipe.model.path, recipe.rollout, "float32", EOS, 200)


def open_engine(recipe: Recipe) -> ServerEngine:
    return ServerEngine(recipe.model.path, recipe.rollout, EOS, 200)


def assert_same(found: list[Rollout], expected: list[Rollout]) -> None:
    """Assert equal tokens and outcomes, and log-probs equal up to the round-off of other batch sizes."""
    assert [(r.prompt_id, r.index, r.outcome, len(pairs_of(r))) for r in found] == [
        (r.prompt_id, r.index, r.outcome, len(pairs_of(r))) for r in expected
    ]
    for rollout, wanted in zip(found, expected, strict=True):
        assert rollout.prompt_columns == wanted.prompt_columns
        for a, b in zip(rollout.parts, wanted.parts, strict=True):
            rest = [replace(s, tokens=s.tokens.without(["logprobs", "kept_logprobs"])) for s in (a, b)]
            assert rest[0] == rest[1]
            assert np.abs(a.tokens["logprobs"] - b.tokens["logprobs"]).max() < 2e-5
            if "kept_logprobs" in a.tokens:
                of_kept = [part.tokens["kept_logprobs"].values for part in (a, b)]
                assert np.abs(of_kept[0] - of_kept[1]).max() < 2e-5


@contextmanager
def other_clients(servers: dict[str, Job]) -> Iterator[list[dict]]:
    """Keep other clients busy at both servers: greedy, with top-p, asking for log-probs, with vLLM's seed.
    Yield their answers."""
    kinds = {"temperature": 0.0}, {"temperature": 1.3, "top_p": 0.8}, {"logprobs": 5}, {"seed": 7}
    stop, answered = threading.Event(), []
    headers = {"Content-Type": "application/json", **authorization()}

    def ask(url: str, params: dict) -> None:
        sampling = {"max_tokens": 60, "detokenize": False, **params}
        body = json.dumps({"token_ids": [5, 6, 7], "sampling_params": sampling}).encode()
        request = urllib.request.Request(f"{url}/inference/v1/generate", body, headers)
        while not stop.is_set():
            answered.append(json.load(urllib.request.urlopen(request, timeout=60)))

    threads = [threading.Thread(target=ask, args=(url, kind)) for url in servers for kind in kinds]
    for thread in threads:
        thread.start()
    try:
        yield answered
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_other_clients_of_the_servers_change_no_token_and_no_mask(servers):
    recipe = server_recipe(list(servers), keep_sampling_mask=True, center_scores=True, top_k=12, top_p=0.8)
    local = open_local(recipe)
    expected, _ = harvest(local, HarvestPlan(PROMPTS[:2], recipe, EOS, seed=1))
    local.close()
    remote = open_engine(recipe)
    with other_clients(servers) as answered:
        found, metrics = harvest(remote, HarvestPlan(PROMPTS[:2], recipe, EOS, seed=1))
    assert_same(found, expected)
    assert 1 < metrics["harvest/kept_per_token"] <= 12
    for part in (part for rollout in found for part in rollout.parts):
        of_kept = zip(
            part.token_ids, part.tokens["logprobs"], part.tokens["kept"], part.tokens["kept_logprobs"],
            strict=True,
        )  # fmt: skip
        for token, logprob, ids, logprobs in of_kept:
            assert np.exp(logprobs).sum() == pytest.approx(1, abs=1e-5)
            assert logprobs[ids.tolist().index(token)] == pytest.approx(logprob, abs=1e-6)
    assert len(answered) > 8
    remote.close()


def status(url: str, path: str, key: str | None, body: object = None, **headers: str) -> int:
    """Return the status of a server's answer to a POST of ``body``, or to a GET."""
    headers |= {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    try:
        return urllib.request.urlopen(urllib.request.Request(url + path, data, headers)).status
    except urllib.error.HTTPError as error:
        return error.code


@contextmanager
def owned(url: str) -> Iterator[Callable[..., int]]:
    """Yield a function that posts to a server as its owner and returns the status."""

    def control(path: str, body: object = b"") -> int:
        return status(url, path, os.environ[KEY], body, **{TRAINER: "test"})

    yield control
    control("/disown")


def test_servers_answer_who_knows_the_secret_and_only_what_a_run_needs(servers):
    key = os.environ[KEY]
    for url in servers:
        assert status(url, HEALTH, None) == 200
        for path in SERVED - {HEALTH}:
            for wrong in (None, key[:-1], "Bearer"):
                assert status(url, path, wrong) == status(url, path, wrong, {}) == 401
        for path in ("/sleep", "/update_weight_version", "/docs", "/v1/chat/completions"):
            assert status(url, path, key, {}) == 404
        for body in ({"method": "reload_weights"}, {"method": ["eqlen_setup"]}, [], {}):
            assert status(url, RPC, key, body) == 400, "it is for a trainer, which says its name"
        with owned(url) as control:
            assert control("/update_weights", {"update_info": {"path": "a"}}) == 409, "nothing is paused"
            assert control("/pause?mode=sideways") == 400
            assert control("/pause?mode=keep") == control("/start_weight_update") == 200
            for info in (5, {}, {"path": 5}, {"path": "a", "other": 1}):
                assert control("/update_weights", {"update_info": info}) == 400
            assert control("/finish_weight_update", {"weight_version": 5}) == 400
            assert control("/init_weight_transfer_engine", {"init_info": {"other": 1}}) == 400
            assert control("/finish_weight_update", {"weight_version": "default"}) == 200
            assert control("/resume") == 200
        assert status(url, "/v1/models", key) == 200  # OpenAI's clients
        asked = {"model": str(folder("qwen3_moe")), "prompt": [5, 6, 7], "max_tokens": 2}
        assert status(url, "/v1/completions", key, asked | {"detokenize": False}) == 200
        assert status(url, "/v1/completions", key, asked | {"prompt": "no tokenizer"}) == 400
        place = urllib.parse.urlsplit(url)
        with socket.create_connection((place.hostname, place.port)) as link, pytest.raises(ConnectionError):
            link.sendall(b"a" * 2**26)  # the first line of who has no secret


def test_weights_of_no_model_and_files_of_no_weights_end_no_engine(servers, tmp_path):
    """Each is of one layer, which would wait for the rest; with two workers both refuse it."""
    stored = load_file(folder("qwen3_moe") / "model.safetensors")
    layer = {name: weight for name, weight in stored.items() if "layers.0.self_attn" in name}
    save_file({name: weight.flatten()[1:] for name, weight in layer.items()}, tmp_path / "shapes")
    save_file(layer | {"model.layers.0.self_attn.other": stored[NORM]}, tmp_path / "names")
    save_file(stored, tmp_path / "good")
    (tmp_path / "cut").write_bytes((tmp_path / "good").read_bytes()[:-1])
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "long").open("wb") as long:
        long.truncate(2**40)
    asked = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 3, "detokenize": False}}
    for url in servers:
        with owned(url) as control:
            for name in ("shapes", "names", "cut", "pipe", "long", "none", "\0", "." * 300, "good"):
                assert control("/pause?mode=keep") == control("/start_weight_update") == 200
                assert control("/update_weights", {"update_info": {"path": f"{tmp_path}/{name}"}}) == 200
                assert control(RPC, CALLS[0]) == control("/resume") == 200, name
                assert status(url, "/inference/v1/generate", os.environ[KEY], asked) == 200, name


def test_a_trainer_without_the_secret_says_how_to_give_it(fake, monkeypatch):
    monkeypatch.delenv(KEY)
    with pytest.raises(ValueError, match=rf"{KEY}: expected a secret in the environment of the trainer"):
        open_engine(server_recipe([fake().url]))


@contextmanager
def frozen(*processes: Job) -> Iterator[Callable[[list[int]], None]]:
    """Yield a function that freezes processes; at the end ``processes`` and their children continue."""
    all_of_them = [pid for process in processes for pid in (process.pid, *descendants(process.pid))]

    def signal_all(pids: list[int], number: int = signal.SIGSTOP) -> None:
        for pid in pids:
            os.kill(pid, number)

    try:
        yield signal_all
    finally:
        signal_all(all_of_them, signal.SIGCONT)


def test_a_server_that_falls_silent_in_a_harvest_is_left_and_nothing_is_lost(servers, caplog):
    """One server is frozen: its connections stay open and nothing arrives. Of the last one only the engine is
    frozen: its HTTP server still reports that it is healthy. The error names all of them."""
    recipe = server_recipe(list(servers), request_timeout=12)
    remote = open_engine(recipe)
    expected, _ = harvest(remote, HarvestPlan(PROMPTS[:3], recipe, EOS, seed=1))
    with frozen(*servers.values()) as freeze:
        silent: list[int] = []
        replicas = remote.pool.replicas

        def freeze_one(harvester: Harvester, part: Part) -> None:
            if not silent:
                silent.append(max(range(2), key=lambda which: len(replicas[which].requests)))
                process = list(servers.values())[silent[0]]
                freeze([process.pid, *descendants(process.pid)])

        found, metrics = harvest(remote, HarvestPlan(PROMPTS[:3], recipe, EOS, seed=1), [OnPart(freeze_one)])
        assert_same(found, expected)
        assert metrics["engine/live_replicas"] == 1
        gone = replicas[silent[0]]
        assert f"{gone.url}: left out until the next weight sync" in caplog.text
        assert gone.absence == "silent for 6 s"
        url, process = list(servers.items())[1 - silent[0]]
        freeze([*descendants(process.pid)])
        assert urllib.request.urlopen(f"{url}/health", timeout=60).status == 200
        clock = r"\(since \d\d:\d\d:\d\d\)"
        says = "none is alive of " + "; ".join(f"{url}: silent for 6 s {clock}" for url in servers)
        with pytest.raises(EngineError, match=says):
            harvest(remote, HarvestPlan(PROMPTS[:1], recipe, EOS, seed=2))
    remote.close()


def begin_a_sync_and_die(engine: ServerEngine, path: Path) -> None:
    """Leave the state of a trainer that is killed when a layer has some of its new weights."""
    name = "model.layers.0.self_attn.q_proj.weight"
    weight = load_file(folder("qwen3_moe", 2) / "model.safetensors")[name]
    engine._pause()
    engine.pool.post("start_weight_update")
    save_file({name: weight}, path)
    engine.pool.post("update_weights", {"update_info": {"path": str(path)}})


def suspended(
    engine: ServerEngine, recipe: Recipe, streams: Path
) -> tuple[list[Rollout], HarvestProgress, Metrics]:
    """Run a step that its budget ends early; return its complete rollouts, the partial rollouts that the next
    step resumes, and the metrics."""
    limits = {"carry_over": True, "tokens_per_step": 250}
    recipe = recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update=limits)})
    with Recorder(streams / "step-00000000/rank-0.arrow") as recorder:
        found, metrics = harvest(
            engine, HarvestPlan(PROMPTS, recipe, EOS, seed=harvest_seed(recipe.seed, 0)), [recorder]
        )
    origins = {rollout.key: RolloutOrigin(0, engine.policy_version) for rollout in found if rollout.suspended}
    progress = read_progress(streams / "step-00000001", PROMPTS, recipe, origins)
    return [rollout for rollout in found if not rollout.suspended], progress, metrics


def test_two_servers_harvest_what_one_process_does_through_a_sync_and_a_death(servers, monkeypatch, tmp_path):
    monkeypatch.setattr(folder_transport, "PART_BYTES", 20_000)  # layers are split between several
    recipe = server_recipe(list(servers), keep_routes=True)
    weights = load_file(folder("qwen3_moe", 1) / "model.safetensors")
    local = open_local(recipe)
    remote = open_engine(recipe)

    expected, alone = harvest(local, HarvestPlan(PROMPTS, recipe, EOS, seed=1))
    found, metrics = harvest(remote, HarvestPlan(PROMPTS, recipe, EOS, seed=1))
    assert_same(found, expected)
    assert metrics["engine/live_replicas"] == 2
    assert metrics["harvest/forks_prefilled"] == alone["harvest/forks_prefilled"] == metrics["harvest/forks"]
    assert 0 <= metrics["harvest/recomputed_tokens_per_fork"] <= recipe.rollout.block_size

    begin_a_sync_and_die(remote, tmp_path / "part")
    remote.update_weights(iter(weights.items()), 1)
    local.update_weights(iter(weights.items()), 1)
    expected, _ = harvest(local, HarvestPlan(PROMPTS, recipe, EOS, seed=harvest_seed(recipe.seed, 0)))
    complete, carried, metrics = suspended(remote, recipe, tmp_path)
    assert sum(rollout.earlier_tokens > 0 for rollout in carried.partial) > 1
    assert metrics["engine/sync_bytes"] == sum(w.numel() * w.element_size() for w in weights.values())
    announced = set()

    def kill_one(harvester: Harvester, part: Part) -> None:
        if not announced:
            next(iter(servers.values())).kill()
        announced.add((harvester.prompt.prompt_id, harvester.index))

    found, metrics = harvest(
        remote, HarvestPlan([], recipe, EOS, seed=0, progress=carried), [OnPart(kill_one)]
    )
    for segment in (segment for rollout in found for segment in rollout.parts):
        segment.carried = False
    assert_same(sorted([*complete, *found], key=lambda rollout: rollout.key), expected)
    assert announced == {rollout.key for rollout in found}
    assert len(found) == len(carried.partial)
    assert {stream.policy_version for stream in found} == {1}
    assert metrics["engine/live_replicas"] == 1
    assert metrics["harvest/retries"] > 0

    with pytest.raises(ValueError, match="missing"):
        remote.update_weights(iter(list(weights.items())[:3]), 2)
    with pytest.raises(EngineError, match="failed half way"):
        remote.submit(Request("x", [5], 1, 0))
    remote.update_weights(iter(weights.items()), 1)
    plan = HarvestPlan(PROMPTS[:1], recipe, EOS, seed=harvest_seed(recipe.seed, 0))
    assert_same(harvest(remote, plan)[0], expected[:2])
    remote.close()
    local.close()


class Fake:
    """An HTTP server that answers like vLLM, then misbehaves as ``behaviour`` says."""

    def __init__(self, behaviour: str = "good") -> None:
        self.behaviour = behaviour
        self.version = "default"
        self.model = folder("qwen3_moe")
        self.other: dict = {}
        """Fields of another model's configuration."""
        self.max_model_len = 256
        self.asked = 0
        self.posted: dict[str, dict] = {}
        """The last body of each control."""
        self.frames: list[dict[str, torch.Tensor]] = []
        self.closed = threading.Event()
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._serve, daemon=True)
        (self.port,) = free_ports(1)
        self.up = threading.Event()
        self.thread.start()
        self.up.wait()
        self.url = f"http://127.0.0.1:{self.port}"

    def _serve(self) -> None:
        app = web.Application(client_max_size=2**30, middlewares=[self.with_the_secret])
        app.router.add_get("/weight_info", self.weight_info)
        app.router.add_post("/inference/v1/generate", self.generate)
        app.router.add_post("/{name}", self.control)
        runner = web.AppRunner(app, shutdown_timeout=0)
        self.loop.run_until_complete(runner.setup())
        self.loop.run_until_complete(web.TCPSite(runner, "127.0.0.1", self.port).start())
        self.up.set()
        self.loop.run_forever()
        self.loop.run_until_complete(runner.cleanup())

    @web.middleware
    async def with_the_secret(self, request, handler):
        assert request.headers["Authorization"] == f"Bearer {os.environ[KEY]}"
        return await handler(request)

    async def weight_info(self, request):
        return web.json_response({"weight_version": self.version})

    async def control(self, request):
        body = await request.json() if request.can_read_body else {}
        self.posted[request.match_info["name"]] = body
        if request.match_info["name"] == "start_weight_update":
            self.frames = []
        if request.match_info["name"] == "update_weights" and "path" in body["update_info"]:
            return await self.update_weights(request, body["update_info"]["path"])
        if body and body.get("method") == "eqlen_setup":
            limits = {"vocab_size": 96, "max_model_len": self.max_model_len, "stock": "vLLM V1"}
            limits["received"] = sum(map(len, self.frames))
            limits["started_with"] = {"keep_sampling_mask": False}
            limits["function"] = function(self.model, "float32") | self.other
            return web.json_response({"results": [limits]})
        if body and body.get("method") == "eqlen_weights":
            return web.json_response({"results": [weights(self.model)]})
        if request.match_info["name"] == "finish_weight_update":
            self.version = body["weight_version"]
        return web.json_response({})

    async def update_weights(self, request, path):
        if self.behaviour == "deny":
            return web.Response(status=500, text="no such layer")
        await asyncio.to_thread(self.load, path)
        if self.behaviour == "die":
            request.transport.abort()
        return web.json_response({})

    def load(self, path):
        if self.behaviour == "stall":
            self.closed.wait()
        if self.behaviour not in ("die", "stall", "blind"):
            self.frames.append(load_file(path))

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor for frame in self.frames for name, tensor in frame.items()}

    async def generate(self, request):
        """Generate by counting up from the last token, two tokens an event, to the limit or to 90, the
        end."""
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
        while self.behaviour == "hang" and not self.closed.is_set():
            await asyncio.sleep(0.05)
        slow = self.behaviour == "slow"
        spans: dict[str, list[int]] = {}
        for i in range(0, len(tokens), 2):
            part = tokens[i : i + 2]
            if self.behaviour == "break" and i >= 4:
                request.transport.abort()
                return response
            if slow:
                await asyncio.sleep(0.2)
            reason = "length" if i + 2 >= len(tokens) else None
            content = [{"logprob": -0.5, "rank": None} for _ in part]
            choice = {"token_ids": part, "finish_reason": reason, "logprobs": {"content": content}}
            spans.setdefault(self.version, [i, 0])[1] = i + len(part)
            choice["weight_versions"] = [
                {"version": version, "start": start, "end": end} for version, (start, end) in spans.items()
            ]
            if self.behaviour == "strange":
                del choice["logprobs"]
            await self.send(response, [choice | {"routed_experts": None}])
        await self.send(response, [])
        return response

    @staticmethod
    async def send(response, choices) -> None:
        await response.write(f"data: {json.dumps({'choices': choices, 'usage': {}})}\n\n".encode())

    def close(self) -> None:
        self.closed.set()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()


@pytest.fixture
def fake():
    made = []

    def make(behaviour: str = "good") -> Fake:
        made.append(Fake(behaviour))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


PROMPT = [Prompt("p", [60], "", "math", "")]


def harvest_independent(fakes: list[Fake], during=None, **over):
    recipe = server_recipe([fake.url for fake in fakes], **over).model_copy(
        update={"sampling": "independent"}
    )
    engine = open_engine(recipe)
    try:
        if during is not None:
            during(engine)
        rollouts, metrics = harvest(engine, HarvestPlan(PROMPT, recipe, {90}, seed=0))
        return [completion.token_ids.tolist() for completion in rollouts[0].parts], metrics
    finally:
        engine.close()


COUNTED = [list(range(61, 91))] * 4


@pytest.mark.parametrize("behaviour", ["refuse", "break", "hang", "strange"])
def test_a_replica_that_fails_is_left_and_nothing_is_lost(fake, behaviour, caplog):
    bad, good = fake(behaviour), fake()
    found, metrics = harvest_independent([bad, good], request_timeout=4 if behaviour == "hang" else 600)
    assert found == COUNTED
    assert metrics["engine/live_replicas"] == 1
    assert metrics["harvest/retries"] == 4
    assert "left out until the next weight sync" in caplog.text


def test_an_answer_with_fewer_tokens_is_continued(fake):
    found, metrics = harvest_independent([fake("short")], max_response_length=6)
    assert found == [list(range(61, 67))] * 4
    assert metrics["harvest/retries"] == 4


def test_a_replica_that_restarted_with_old_weights_is_noticed(fake, caplog):
    slow, good = fake("slow"), fake()

    def restart(engine):
        engine.update_weights(iter(load_file(folder("qwen3_moe", 1) / "model.safetensors").items()), 7)
        slow.version = "default"

    found, metrics = harvest_independent([slow, good], restart)
    assert found == COUNTED
    assert metrics["harvest/retries"] == 4
    assert re.search("expected tokens of weights '7-[0-9a-f]{16}', found 'default'", caplog.text)


@pytest.mark.parametrize("status", [200, 404])
def test_the_answer_of_another_kind_of_server_is_shown_in_one_line(status):
    class Foreign(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status)
            self.end_headers()
            self.wfile.write(b"<!DOCTYPE html>\n<html><title>Not\n found</title><p>...")

        do_POST = do_GET

        def log_message(self, format, *args): ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Foreign) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(EngineError) as error:
            open_engine(server_recipe([f"http://127.0.0.1:{server.server_port}"]))
        server.shutdown()
    assert re.search(
        r"/own[:,].* <!DOCTYPE html> <html><title>Not found</title><p>\.\.\. \(since \S+\); "
        r"start them again, and the same command resumes$",
        str(error.value),
    )


def test_servers_that_do_not_fit_are_refused_with_what_was_found(fake):
    with pytest.raises(EngineError, match=r"none is alive of http://127.0.0.1:1: .*; http://127.0.0.1:2: "):
        open_engine(server_recipe(["http://127.0.0.1:1", "http://127.0.0.1:2"]))
    with pytest.raises(EngineError, match="none is alive"):
        harvest_independent([fake("refuse"), fake("refuse")])
    masks = {"keep_sampling_mask": True, "top_k": 12}
    for field, value, over, message in (
        ("version", "12", {}, "none is alive .* expected weights 'default', found '12'"),
        ("model", folder("qwen3_moe", 1), {}, r"a server of the same model\.path, found other weights"),
        ("max_model_len", 100, {}, "--max-model-len of at least 200, found 100"),
        ("other", {"rms_norm_eps": 0.25}, {}, r"rms_norm_eps 1e-06, found 0\.25: it computes another"),
        ("other", {}, masks, r"rollout\.keep_sampling_mask: true, found one without"),
    ):
        unfit = fake()
        setattr(unfit, field, value)
        with pytest.raises(EngineError, match=message):
            open_engine(server_recipe([unfit.url], **over))


def test_a_server_of_other_gpus_than_the_recipe_says_is_named_once(open_fakes, caplog):
    engine, (one, *_) = open_fakes("good", "good", tensor_parallel=2)
    engine.update_weights(new_weights().items(), 1)
    assert len(caplog.records) == 2, "once for each server"
    assert f"{one.url}: expected 2 GPUs (rollout.tensor_parallel), found 1: GPU hours" in caplog.text


def new_weights() -> dict[str, torch.Tensor]:
    return load_file(folder("qwen3_moe", 1) / "model.safetensors")


def assert_bits_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert (tensor.dtype, tensor.shape) == (expected[name].dtype, expected[name].shape)
        assert torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (tensor, expected[name])))


@pytest.fixture
def open_fakes(fake, monkeypatch):
    """Fakes that behave like this, and an engine over them whose syncs take many frames."""
    monkeypatch.setattr(folder_transport, "PART_BYTES", 20_000)
    engines = []

    def make(*behaviours: str, **over) -> tuple[ServerEngine, list[Fake]]:
        fakes = [fake(behaviour) for behaviour in behaviours]
        engines.append(open_engine(server_recipe([server.url for server in fakes], **over)))
        return engines[-1], fakes

    yield make
    for engine in engines:
        engine.close()


def test_a_sync_brings_every_replica_the_same_bits_in_many_frames(open_fakes):
    engine, fakes = open_fakes("good", "good")
    dtypes = (torch.bfloat16, torch.float32, torch.float16)
    weights = {name: w.to(dtypes[i % 3]) for i, (name, w) in enumerate(new_weights().items())}
    weights[NORM] = torch.arange(128, dtype=torch.bfloat16)[::2]  # not contiguous
    engine.update_weights(iter(weights.items()), 3)
    for server in fakes:
        assert_bits_equal(server.weights, weights)
        assert len(server.frames) > 5
        assert all(
            len(frame) == 1 or sum(w.nbytes for w in frame.values()) <= 20_000 for frame in server.frames
        )
        assert server.version == engine.weight_version
    assert re.fullmatch("3-[0-9a-f]{16}", engine.weight_version)
    metrics = engine.metrics()
    assert metrics["engine/sync_bytes"] == sum(w.nbytes for w in weights.values())


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ("die", "update_weights: .*(reset|disconnected)"),
        ("stall", "update_weights: silent for 2 s"),
        ("deny", "update_weights: HTTP 500 from /update_weights: no such layer"),
        (
            "blind",
            r"expected it to read \d+ weights through the run's folder, found 0: it must see that folder",
        ),
    ],
)
def test_a_replica_that_fails_in_a_sync_is_left_out_and_the_others_get_all(
    open_fakes, behaviour, reason, caplog
):
    engine, (bad, good) = open_fakes(behaviour, "good", request_timeout=4)
    weights = new_weights()
    engine.update_weights(iter(weights.items()), 1)
    assert_bits_equal(good.weights, weights)
    assert len(bad.weights) < len(weights)
    assert engine.metrics()["engine/live_replicas"] == 1
    assert re.search(f"{bad.url}: left out until the next weight sync.*{reason}", caplog.text, re.IGNORECASE)
    bad.behaviour = "good"
    engine.update_weights(iter(weights.items()), 2)
    assert_bits_equal(bad.weights, weights)
    assert engine.metrics()["engine/live_replicas"] == 2


def submit_slow(engine: ServerEngine, bad: Fake, good: Fake) -> None:
    """Submit two requests at each of two replicas, of which the bad one fails in the next sync."""
    for name in ("a/0", "b/0", "c/0", "d/0"):
        engine.submit(Request(name, [70], 20, 0))
    assert [len(replica.requests) for replica in engine.pool.replicas] == [2, 2]
    while not engine.step():
        pass
    bad.behaviour = "die"


def test_a_replica_that_dies_in_a_sync_loses_its_requests_and_those_of_others_continue(open_fakes):
    engine, (bad, good) = open_fakes("slow", "slow", staleness=1)
    submit_slow(engine, bad, good)
    engine.update_weights(iter(new_weights().items()), 1)
    deltas: list[Delta] = []
    while engine.has_unfinished or not deltas:
        deltas += engine.step()
    lost = {delta.request_id for delta in deltas if delta.finish_reason == "lost"}
    ended = [delta for delta in deltas if delta.finish_reason == "length"]
    assert len(lost) == 2
    assert lost | {delta.request_id for delta in ended} == {"a/0", "b/0", "c/0", "d/0"}
    assert [delta.policy_version[-1] for delta in ended] == [1, 1]
    assert "pause" in good.posted
    assert "resume" in good.posted


def test_a_sync_that_fails_everywhere_gives_all_requests_back_and_reads_the_stream_to_its_end(open_fakes):
    """Exporting weights is collective, so other ranks wait for a stream that is not read."""
    engine, fakes = open_fakes("slow", "slow", staleness=1)
    submit_slow(engine, *fakes)
    fakes[1].behaviour = "die"
    stream = iter(new_weights().items())
    with pytest.raises(EngineError, match="none is alive"):
        engine.update_weights(stream, 1)
    assert next(stream, None) is None
    assert sorted(delta.request_id for delta in engine.step()) == ["a/0", "b/0", "c/0", "d/0"]
    with pytest.raises(EngineError, match="failed half way"):
        engine.submit(Request("a/0~1", [70], 20, 0))


def test_a_closed_engine_ends_the_harvest_of_another_thread(open_fakes):
    engine, _ = open_fakes("slow")
    engine.submit(Request("a/0", [70], 20, 0))
    engine.close()
    with pytest.raises(EngineError, match="was closed"):
        engine.step()
    with pytest.raises(EngineError, match="was closed"):  # it would start a reader that nobody ends
        engine.submit(Request("b/0", [70], 20, 0))


STARTS = """
import contextlib, sys, time
from vllm.entrypoints.launchers.api_server import entry
from megatron_eqlen.engines.server.serve import main

@contextlib.asynccontextmanager
async def start(*arguments, **options):
    print("starting", flush=True)
    while True:
        with contextlib.suppress(KeyboardInterrupt):  # as where a finalizer runs
            time.sleep(60)
    yield

entry.build_async_engine_client = start
sys.argv[1:] = ["--port", "0"]
main()
"""


def test_a_server_that_starts_ends_at_sigterm_where_an_error_would_be_lost():
    server = start("-c", STARTS)
    assert within(60, lambda: "starting" in server.stdout), server.stderr
    os.kill(server.pid, signal.SIGTERM)
    assert server.wait() == -signal.SIGTERM


def test_nccl_without_a_gpu_is_refused(fake):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(EngineError, match=r"nccl sends from GPU to GPU.*use rollout\.sync: folder"):
        open_engine(server_recipe([fake().url], sync="nccl"))


@pytest.fixture
def without_nccl(monkeypatch) -> list[tuple]:
    """Run ``NcclSender`` up to NCCL itself and return the ids by which it would meet the workers, its ranks
    and the worlds' sizes, then what it does in each group; a broadcast reads the stream."""
    from megatron_eqlen.engines.weights import nccl

    places: list[tuple] = []
    numbers = itertools.count()

    def library() -> Any:
        unique = SimpleNamespace(internal=(ctypes.c_byte * 128)(*[next(numbers)] * 128))
        return SimpleNamespace(ncclGetUniqueId=lambda: unique)

    def join(*place: Any) -> Any:
        places.append(place[:3])
        return SimpleNamespace(unique_id=place[0], destroy=lambda: places.append((place[0], "destroyed")))

    def broadcast(named_tensors: Any, group: Any) -> None:
        places.append((group.unique_id, len(list(named_tensors))))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(nccl, "NCCLLibrary", library)
    monkeypatch.setattr(nccl, "uid_init_process_group", join)
    monkeypatch.setattr(nccl, "broadcast", broadcast)
    return places


def test_with_nccl_every_worker_has_a_rank_and_knows_what_comes(open_fakes, without_nccl):
    from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferUpdateInfo

    from megatron_eqlen.engines.server.requests import refuse_misshapen

    engine, fakes = open_fakes("good", "good", sync="nccl")
    for live, workers in zip(engine.pool.replicas, (2, 3), strict=True):
        live.workers = workers
    engine.sender._meet()
    for server in fakes:
        told = server.posted["init_weight_transfer_engine"]["init_info"]
        refuse_misshapen("init_info", told, NCCLWeightTransferInitInfo)
    infos = [
        NCCLWeightTransferInitInfo(**server.posted["init_weight_transfer_engine"]["init_info"])
        for server in fakes
    ]
    assert [(info.rank_offset, info.world_size) for info in infos] == [(1, 6), (3, 6)]
    assert {info.packed_num_buffers for info in infos} == {1}
    assert {(info.nccl_unique_id_bytes, 0, info.world_size) for info in infos} == {*without_nccl}
    stored = new_weights()
    weights = {name: stored[name] for name in engine.weights.shapes}
    engine.sender.send(iter(weights.items()))
    for server in fakes:
        told = server.posted["update_weights"]["update_info"]
        refuse_misshapen("update_info", told, NCCLWeightTransferUpdateInfo)
        announced = NCCLWeightTransferUpdateInfo(**told)
        assert announced.names == list(weights)
        assert announced.shapes == [list(w.shape) for w in weights.values()]
        assert set(announced.dtype_names) == {"float32"}
    with pytest.raises(EngineError, match=r"expected 'model\.embed_tokens\.weight'"):
        engine.sender.send(reversed(weights.items()))


def test_with_nccl_each_sync_has_a_group_of_its_own(open_fakes, without_nccl):
    """A server that was started again between two syncs, at the same URL, is in no group: a broadcast in the
    one before would wait for a process that is dead."""
    engine, fakes = open_fakes("good", "good", sync="nccl")
    stored = new_weights()
    weights = {name: stored[name] for name in engine.weights.shapes}
    for version in (1, 2):
        engine.update_weights(iter(weights.items()), version)
        for server in fakes:  # each was invited
            assert server.posted.pop("init_weight_transfer_engine")
    ids = [bytes([number] * 128) for number in range(2)]
    in_each = (0, 3), (len(weights),), ("destroyed",)
    assert without_nccl == [(unique, *event) for unique in ids for event in in_each]


def test_a_worker_leaves_the_nccl_group_of_an_update_when_it_ends(monkeypatch):
    from megatron_eqlen.engines.weights import worker as module

    monkeypatch.setattr(module, "finalize_layerwise_reload", lambda *_: None)
    monkeypatch.setattr(module, "repack", lambda _: None)
    left: list[str] = []
    engine = object.__new__(module.NcclWeightTransfer)
    engine.model = engine.model_config = None
    engine.model_update_group = SimpleNamespace(destroy=lambda: left.append("destroyed"))  # type: ignore
    engine.finish_weight_update()
    assert left == ["destroyed"]
    assert engine.model_update_group is None


def test_with_nccl_a_routers_bias_comes_in_float32_beside_trained_weights(open_fakes, without_nccl, tmp_path):
    save_tiny(tmp_path, "glm4_moe", **SHORT["glm4_moe"])
    engine, (server,) = open_fakes("good", sync="nccl")
    engine.sender.table = WeightTable.read(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    dtypes = {name: torch.float32 if "correction" in name else torch.bfloat16 for name in stored}
    engine.sender.send((name, stored[name].to(dtypes[name])) for name in engine.sender.table.shapes)
    told = server.posted["update_weights"]["update_info"]
    found = dict(zip(told["names"], told["dtype_names"], strict=True))
    assert found == {name: str(dtype).removeprefix("torch.") for name, dtype in dtypes.items()}
    assert sorted(set(found.values())) == ["bfloat16", "float32"]


def test_what_arrives_late_of_an_aborted_request_is_not_of_the_next_of_its_name(open_fakes):
    engine, _ = open_fakes("slow")
    engine.submit(Request("a/0", [70], 4, 0))
    (late,) = (request for replica in engine.pool.replicas for request in replica.requests.values())
    engine.abort(["a/0"])
    engine.submit(Request("a/0", [80], 4, 0))
    arrived = Delta("a/0", [71, 72], {"logprobs": [-0.5] * 2})
    engine.readers.batches.put([(late.number, arrived), (late.number, "the stream broke off")])
    tokens: list[int] = []
    while engine.has_unfinished:
        tokens += [token for delta in engine.step() for token in delta.token_ids]
    assert tokens == [81, 82, 83, 84]
    assert engine.metrics()["engine/live_replicas"] == 1


def test_a_replica_that_stays_away_is_named_once(open_fakes, caplog):
    engine, _ = open_fakes("good", "good")
    gone = engine.pool.replicas[1]
    gone.url = f"http://127.0.0.1:{free_ports(1)[0]}"
    for version in (1, 2, 3):
        engine.update_weights(iter(new_weights().items()), version)
    assert caplog.text.count(f"{gone.url}: left out") == 1


def test_a_server_that_accepts_and_never_answers_is_left_out_and_asked_less_patiently_then(
    open_fakes, monkeypatch, caplog
):
    monkeypatch.setattr(replica_module, "PATIENCE", 3.0)
    monkeypatch.setattr(replica_module, "PATIENCE_ABSENT", 0.25)
    engine, _ = open_fakes("good", "good")
    mute = engine.pool.replicas[1]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        mute.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        for version, seconds in ((1, "3"), (2, "0.25")):
            engine.update_weights(iter(new_weights().items()), version)
            assert mute.absence == f"connecting: silent for {seconds} s"
    assert re.search(f"{mute.url}: left out .*: connecting: silent for 3 s", caplog.text)
    assert engine.metrics()["engine/live_replicas"] == 1


@pytest.mark.parametrize(("token_ids", "params", "field"), [
    ([5, 96], {}, "token_ids"),
    ([-1], {}, "token_ids"),
    ([5], {"stop_token_ids": [96]}, "stop_token_ids"),
    ([5], {"top_k": 2**40}, "top_k"),
    ([5], {"n": 65}, "n"),
    ([5], {"logit_bias": {5: 1.0}}, "logit_bias"),
    ([5], {"extra_args": {"other": 1}}, r"extra_args\.other"),
    ([5], {"extra_args": {"eqlen_seed": "x"}}, r"extra_args\.eqlen_seed"),
    ([5], {"extra_args": {"eqlen_seed": True}}, r"extra_args\.eqlen_seed"),
    ([5], {"extra_args": {"eqlen_seed": -1}}, r"extra_args\.eqlen_seed"),
    ([5], {"extra_args": {"eqlen_seed": 1}, "temperature": 0.0}, "temperature"),
])  # fmt: skip
def test_what_would_end_the_engine_is_refused_with_its_field(token_ids, params, field):
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    from megatron_eqlen.engines.server.requests import refuse_unfit

    refuse_unfit([0, 95], SamplingParams(seed=7, extra_args={"eqlen_seed": 2**64 - 1}), 96)
    with pytest.raises(VLLMValidationError, match=f"^{field}: expected"):
        refuse_unfit(token_ids, SamplingParams(**params), 96)


def test_rows_that_nobody_has_fetched_are_joined_by_completion(monkeypatch):
    """A request for several completions (``n``) is another client's: a run never sends one."""
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.v1.engine.output_processor import RequestState

    from megatron_eqlen.engines.server import requests

    monkeypatch.setattr(RequestOutput, "add", RequestOutput.add)
    monkeypatch.setattr(RequestState, "_new_completion_output", RequestState._new_completion_output)
    requests.stream()
    waiting = None
    for number, (index, rows) in enumerate([(1, None), (0, [3]), (1, [4]), (0, [5, 6]), (1, [])]):
        routes = None if rows is None else np.array(rows)
        output = RequestOutput(
            "r", None, [5], None, [CompletionOutput(index, "", [number], None, None, routes)], finished=False
        )
        if waiting is None:
            waiting = output
        else:
            waiting.add(output, aggregate=True)
    found = {of.index: (of.token_ids, of.routed_experts.tolist()) for of in waiting.outputs}
    assert found == {1: ([0, 2, 4], [4]), 0: ([1, 3], [3, 5, 6])}

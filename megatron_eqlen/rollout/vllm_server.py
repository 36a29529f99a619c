"""vLLM servers on other nodes: token ids in, token ids out, over HTTP.

    step ◄── queue ◄── one stream of server-sent events per request ◄── replica 1, 2, ...
                 ◄── one heartbeat per replica: alive, and with the weights we sent?

A replica that refuses, breaks off, falls silent for half of ``rollout.request_timeout``, or answers a
heartbeat with another weight version is dead: its requests come back as ``lost`` with all their tokens
kept, and the harvester submits the rest to another replica. It is taken back at the next weight sync,
when it gets the same weights as all. A server takes far longer to start than ``HEARTBEAT``, so one that
was restarted with old weights cannot slip by.

Start servers with ``python -m megatron_eqlen.rollout.vllm_server RECIPE --port PORT``.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Collection, Coroutine, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from safetensors.torch import save
from torch import Tensor

from megatron_eqlen.recipe import Recipe, RolloutRecipe, load
from megatron_eqlen.rollout.engine import Delta, EngineError, check_request
from megatron_eqlen.rollout.weights import WeightTable
from megatron_eqlen.types import Metrics

logger = logging.getLogger(__name__)

HEARTBEAT = 1.0
"""Seconds between a replica's heartbeats."""
PATIENCE = 30.0
"""Seconds a replica may take to answer one: it may be in the middle of a long engine step."""
TOKENS_PER_EVENT = 8
"""Tokens a server collects before it sends them."""
CHUNK_BYTES = 64 * 2**20
"""Weights per request of a sync; a larger tensor goes alone."""
UNTOUCHED = "default"
"""vLLM's name for the version of weights that were loaded at start."""

ReplicaError = (aiohttp.ClientError, asyncio.TimeoutError, ConnectionError)
"""What a dead, dying or silent replica looks like from here."""


@dataclass(eq=False)
class Replica:
    url: str
    alive: bool = False
    requests: set[str] = field(default_factory=set)


@dataclass
class Failure:
    """Put in the queue in place of a delta."""

    replica: Replica
    reason: str


class ServerEngine:
    """An ``Engine`` (see there) over ``rollout.servers``.

    ``model_path`` is the model that the servers were started with; ``policy_version`` its version. With
    ``syncs_first`` servers may hold any weights (a trainer that was restarted finds those of its last
    sync), and requests are refused until ``update_weights``. Raises EngineError if no server answers.
    """

    def __init__(
        self,
        model_path: str | Path,
        rollout: RolloutRecipe,
        eos_token_ids: Collection[int],
        max_model_len: int,
        policy_version: int = 0,
        syncs_first: bool = False,
    ) -> None:
        self.weights = WeightTable.read(model_path)
        self.rollout = rollout
        self.sampling = sampling_params(rollout, eos_token_ids)
        self.max_model_len = max_model_len
        self.policy_version = policy_version
        self.weight_version = UNTOUCHED
        self.replicas = [Replica(url.rstrip("/")) for url in rollout.servers]
        self.requests: dict[str, tuple[Replica, Any]] = {}
        self.homes: dict[str, Replica] = {}
        self.arrivals: queue.SimpleQueue[Delta | Failure] = queue.SimpleQueue()
        self.heartbeats: list[Any] = []
        self.vocab_size = 0
        self.refusal = "update_weights must come first" if syncs_first else None
        self.sync: Metrics = {}
        self.io = Background()
        try:
            self._connect(any_weights=syncs_first)
        except EngineError:
            self.close()
            raise

    @property
    def max_num_seqs(self) -> int:
        return self.rollout.max_num_seqs * max(sum(replica.alive for replica in self.replicas), 1)

    def submit(self, request_id: str, token_ids: list[int], max_tokens: int, seed: int) -> None:
        if self.refusal is not None:
            raise EngineError(f"request {request_id}: {self.refusal}")
        if request_id in self.requests:
            raise ValueError(f"request {request_id}: expected an unused id, found it in flight")
        check_request(request_id, token_ids, max_tokens, self.max_model_len, self.vocab_size)
        body = {
            "request_id": request_id,
            "token_ids": token_ids,
            "sampling_params": self.sampling | {"max_tokens": max_tokens, "seed": seed},
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        replica = self._home(request_id)
        replica.requests.add(request_id)
        self.requests[request_id] = replica, self.io.start(self._stream(replica, request_id, body))

    def step(self) -> list[Delta]:
        """What has arrived; waits a moment if nothing has."""
        deltas: list[Delta] = []
        try:
            arrival = self.arrivals.get(timeout=0.05)
            while True:
                deltas += self._take(arrival)
                arrival = self.arrivals.get_nowait()
        except queue.Empty:
            return deltas

    def abort(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            if request_id in self.requests:
                self._forget(request_id).cancel()  # vLLM aborts a request whose client is gone

    @property
    def has_unfinished(self) -> bool:
        return bool(self.requests)

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], policy_version: int) -> None:
        if self.requests:
            raise EngineError(f"update_weights: {len(self.requests)} requests are unfinished")
        start = time.perf_counter()
        self._connect(any_weights=True)
        self.refusal = "the last weight update failed half way; update_weights must succeed first"
        self._stop_heartbeats()
        self._everywhere("start_weight_update")
        try:
            for chunk in chunks(self.weights.check(named_tensors)):
                tensors = base64.b64encode(save(chunk)).decode()
                self._everywhere("update_weights", {"update_info": {"tensors": tensors}})
        finally:
            self._everywhere("finish_weight_update", {"weight_version": str(policy_version)})
        self._everywhere("reset_prefix_cache")
        self.refusal = None
        self.policy_version, self.weight_version = policy_version, str(policy_version)
        self._start_heartbeats()
        self.sync = {
            "engine/sync_seconds": time.perf_counter() - start,
            "engine/sync_bytes": self.weights.bytes_seen,
        }

    def reset_cache(self) -> None:
        self._everywhere("reset_prefix_cache")

    def sleep(self) -> None:
        """Servers have their own GPUs."""

    def wake(self) -> None:
        """Nothing slept."""

    def close(self) -> None:
        self.abort(list(self.requests))
        self._stop_heartbeats()
        self.io.close()

    def metrics(self) -> Metrics:
        answers = self._everywhere("collective_rpc", {"method": "eqlen_removed_mass"})
        removed, sampled = (sum(answer["results"][0][i] for answer in answers) for i in (0, 1))
        metrics = {
            "engine/removed_probability": removed / max(sampled, 1),
            "engine/live_replicas": float(sum(replica.alive for replica in self.replicas)),
        }
        metrics |= self.sync
        self.sync = {}
        return metrics

    def _connect(self, any_weights: bool = False) -> None:
        """Set up every replica that answers and has the right weights, or will get them now."""
        for replica in self.replicas:
            try:
                version = self.io.run(self._get(replica, "weight_info"))["weight_version"]
                if not any_weights and version != self.weight_version:
                    raise ConnectionError(f"expected weights {self.weight_version!r}, found {version!r}")
                limits = self.io.run(
                    self._post(
                        replica,
                        "collective_rpc",
                        {"method": "eqlen_setup", "args": [self.rollout.logprobs_mode]},
                    )
                )["results"][0]
            except ReplicaError as error:
                replica.alive = False
                logger.warning("%s: left out: %s", replica.url, error or type(error).__name__)
                continue
            self._check_limits(replica, limits)
            replica.alive = True
        self._check_any_alive()
        if not any_weights:
            self._start_heartbeats()

    def _check_limits(self, replica: Replica, limits: dict[str, int]) -> None:
        self.vocab_size = limits["vocab_size"]
        if limits["max_model_len"] < self.max_model_len:
            raise EngineError(
                f"{replica.url}: expected a server with --max-model-len of at least {self.max_model_len}, "
                f"found {limits['max_model_len']}"
            )

    def _check_any_alive(self) -> None:
        if not any(replica.alive for replica in self.replicas):
            urls = ", ".join(replica.url for replica in self.replicas)
            raise EngineError(f"rollout.servers: none is alive of {urls}")

    def _home(self, request_id: str) -> Replica:
        """Requests whose ids agree up to the last ``/`` share a prefix, so they share a replica."""
        family = request_id.rpartition("/")[0]
        home = self.homes.get(family)
        if home is None or not home.alive:
            self._check_any_alive()
            alive = [replica for replica in self.replicas if replica.alive]
            home = self.homes[family] = min(alive, key=lambda replica: len(replica.requests))
        return home

    def _take(self, arrival: Delta | Failure) -> list[Delta]:
        if isinstance(arrival, Failure):
            return self._bury(arrival.replica, arrival.reason)
        if arrival.request_id not in self.requests:  # it crossed an abort
            return []
        if arrival.finish_reason is not None:
            self._forget(arrival.request_id)
        return [arrival]

    def _bury(self, replica: Replica, reason: str) -> list[Delta]:
        """A replica died: its requests are lost."""
        if replica.alive:
            logger.warning(
                "%s: dead until the next weight sync, %d requests go elsewhere: %s",
                replica.url,
                len(replica.requests),
                reason,
            )
        replica.alive = False
        lost = sorted(replica.requests)
        for request_id in lost:
            self._forget(request_id).cancel()
        return [Delta(request_id, [], [], "lost") for request_id in lost]

    def _forget(self, request_id: str) -> Any:
        replica, task = self.requests.pop(request_id)
        replica.requests.discard(request_id)
        return task

    def _everywhere(self, path: str, body: dict[str, Any] | None = None) -> list[Any]:
        """The same call to every live replica at once; one that fails is buried. Raises EngineError
        when none is left."""
        alive = [replica for replica in self.replicas if replica.alive]
        calls = [self.io.start(self._post(replica, path, body)) for replica in alive]
        answers = []
        for replica, call in zip(alive, calls, strict=True):
            try:
                answers.append(call.result())
            except ReplicaError as error:
                self._bury(replica, f"{path}: {error or type(error).__name__}")
        self._check_any_alive()
        return answers

    def _start_heartbeats(self) -> None:
        self._stop_heartbeats()
        self.heartbeats = [
            self.io.start(self._watch(replica, self.weight_version))
            for replica in self.replicas
            if replica.alive
        ]

    def _stop_heartbeats(self) -> None:
        for heartbeat in self.heartbeats:
            heartbeat.cancel()
        self.heartbeats = []

    async def _watch(self, replica: Replica, expected: str) -> None:
        try:
            while True:
                await asyncio.sleep(HEARTBEAT)
                answer = await asyncio.wait_for(self._get(replica, "weight_info"), PATIENCE)
                if answer["weight_version"] != expected:
                    raise ConnectionError(
                        f"expected weights {expected!r}, found {answer['weight_version']!r}"
                    )
        except ReplicaError as error:
            self.arrivals.put(Failure(replica, f"heartbeat: {error or type(error).__name__}"))

    async def _stream(self, replica: Replica, request_id: str, body: dict[str, Any]) -> None:
        """Put a request's deltas in the queue as they arrive, or a failure."""
        timeout = aiohttp.ClientTimeout(total=None, sock_read=self.rollout.request_timeout / 2)
        last: Delta | None = None
        try:
            async with self.io.session.post(
                f"{replica.url}/inference/v1/generate", json=body, timeout=timeout
            ) as response:
                await _check_status(response)
                async for line in response.content:
                    if not line.startswith(b"data: {"):
                        continue
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise ConnectionError(event["error"])
                    if last is not None:
                        last.num_cached_tokens = _cached_tokens(event)
                    elif event["choices"]:
                        delta = read_event(request_id, event)
                        if delta.finish_reason is None:
                            self.arrivals.put(delta)
                        else:  # the usage comes after the end
                            last = delta
            if last is None:
                raise ConnectionError(f"request {request_id}: the stream broke off")
            self.arrivals.put(last)
        except ReplicaError as error:
            self.arrivals.put(Failure(replica, str(error) or type(error).__name__))

    async def _get(self, replica: Replica, path: str) -> Any:
        async with self.io.session.get(f"{replica.url}/{path}") as response:
            await _check_status(response)
            return await response.json()

    async def _post(self, replica: Replica, path: str, body: dict[str, Any] | None = None) -> Any:
        async with self.io.session.post(f"{replica.url}/{path}", json=body) as response:
            await _check_status(response)
            text = await response.text()
            return json.loads(text) if text else None


class Background:
    """An event loop in its own thread, with an HTTP session."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True, name="vllm-servers")
        self.thread.start()
        self.session: aiohttp.ClientSession = self.run(self._open())

    def start(self, coroutine: Coroutine) -> Any:
        """A concurrent future of the coroutine's result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def run(self, coroutine: Coroutine) -> Any:
        return self.start(coroutine).result()

    def close(self) -> None:
        self.run(self.session.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    @staticmethod
    async def _open() -> aiohttp.ClientSession:
        # A kept connection may be closed by the server just as a request goes out on it: that looks like a
        # replica that died.
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None, connect=10),
        )


async def _check_status(response: aiohttp.ClientResponse) -> None:
    """ConnectionError with the server's words for anything but success."""
    if response.status != 200:
        text = (await response.text())[:500]
        raise ConnectionError(f"HTTP {response.status} from {response.url.path}: {text}")


def read_event(request_id: str, event: dict[str, Any]) -> Delta:
    """One server-sent event of ``/inference/v1/generate`` as a delta."""
    choice = event["choices"][0]
    reason = choice["finish_reason"]
    logprobs = [token["logprob"] for token in (choice["logprobs"] or {"content": []})["content"]]
    return Delta(
        request_id,
        choice["token_ids"] or [],
        logprobs,
        reason if reason in ("stop", "length", None) else "lost",
    )


def _cached_tokens(event: dict[str, Any]) -> int | None:
    details = (event.get("usage") or {}).get("prompt_tokens_details")
    return details["cached_tokens"] if details else None


def chunks(named_tensors: Iterable[tuple[str, Tensor]]) -> Iterable[dict[str, Tensor]]:
    """Group a stream of weights into parts of about ``CHUNK_BYTES``."""
    part: dict[str, Tensor] = {}
    size = 0
    for name, tensor in named_tensors:
        part[name] = tensor.detach().cpu().contiguous()
        size += tensor.numel() * tensor.element_size()
        if size >= CHUNK_BYTES:
            yield part
            part, size = {}, 0
    if part:
        yield part


def sampling_params(rollout: RolloutRecipe, eos_token_ids: Iterable[int]) -> dict[str, Any]:
    """The recipe's sampling as ``/inference/v1/generate`` takes it."""
    return {
        "temperature": rollout.temperature,
        "top_p": rollout.top_p,
        "top_k": max(rollout.top_k, 0),
        "min_p": rollout.min_p,
        "stop_token_ids": sorted(eos_token_ids),
        "logprobs": 0,
        "detokenize": False,
        "stream_interval": TOKENS_PER_EVENT,
    }


def server_command(recipe: Recipe, port: int, host: str = "0.0.0.0") -> tuple[list[str], dict[str, str]]:
    """Arguments and environment of a server that ``ServerEngine`` can use with this recipe."""
    from vllm.platforms import current_platform  # the client needs no vLLM

    rollout = recipe.rollout
    arguments = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", recipe.model.path]
    arguments += ["--host", host, "--port", str(port), "--dtype", recipe.model.dtype]
    arguments += ["--max-model-len", str(recipe.data.max_prompt_length + rollout.max_response_length)]
    arguments += ["--max-num-seqs", str(rollout.max_num_seqs), "--block-size", str(rollout.block_size)]
    arguments += ["--max-num-batched-tokens", str(rollout.max_num_batched_tokens)]
    arguments += ["--tensor-parallel-size", str(rollout.tensor_parallel), "--generation-config", "vllm"]
    arguments += ["--skip-tokenizer-init", "--return-tokens-as-token-ids", "--enable-scale-out"]
    arguments += ["--enable-prompt-tokens-details", "--disable-uvicorn-access-log", "--disable-log-stats"]
    arguments += ["--worker-extension-cls", "megatron_eqlen.rollout.vllm_worker.WorkerExtension"]
    arguments += ["--weight-transfer-config", json.dumps({"backend": "eqlen_http"})]
    kv_gib = rollout.kv_cache_gib
    if current_platform.is_cpu():
        arguments.append("--enforce-eager")
        kv_gib = kv_gib or 1.0
    else:
        arguments += ["--gpu-memory-utilization", str(rollout.gpu_memory_utilization)]
    if kv_gib:
        arguments += ["--kv-cache-memory-bytes", str(int(kv_gib * 2**30))]
    return arguments, {"VLLM_SERVER_DEV_MODE": "1", "VLLM_USE_V2_MODEL_RUNNER": "0"}


def main() -> None:
    parser = argparse.ArgumentParser(description="Start a vLLM server for a recipe's rollouts.")
    parser.add_argument("recipe")
    parser.add_argument("--host", default="0.0.0.0")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value")
    args = parser.parse_args()
    command, environ = server_command(load(args.recipe, args.overrides), args.port, args.host)
    os.execve(command[0], command, os.environ | environ)


if __name__ == "__main__":
    main()

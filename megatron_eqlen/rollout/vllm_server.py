"""vLLM servers on other nodes: token ids in, token ids out, over HTTP.

    step ◄── queue ◄── one stream of server-sent events per request ◄── replica 1, 2, ...
                 ◄── one heartbeat per replica: alive, and with the weights we sent?
    update_weights ──► one TCP connection per worker of each replica (``weight_feed``)

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
import json
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from torch import Tensor

from megatron_eqlen import layout
from megatron_eqlen.models.hf_config import read_config
from megatron_eqlen.recipe import Recipe, RolloutRecipe, load
from megatron_eqlen.rollout.engine import SEED, Delta, EngineError, check_request
from megatron_eqlen.rollout.weight_feed import Feed
from megatron_eqlen.rollout.weight_stream import buckets, encode
from megatron_eqlen.rollout.weights import WeightTable
from megatron_eqlen.types import Metrics

logger = logging.getLogger(__name__)

HEARTBEAT = 1.0
"""Seconds between a replica's heartbeats."""
PATIENCE = 30.0
"""Seconds a replica may take to answer one: it may be in the middle of a long engine step."""
TOKENS_PER_EVENT = 8
"""Tokens a server collects before it sends them."""
BUCKET_BYTES = 64 * 2**20
"""Weights that a sync sends at once; a larger tensor goes alone."""
PREEMPTIONS = "vllm:num_preemptions_total"
"""vLLM's counter of requests that were pushed out of the KV cache."""
UNTOUCHED = "default"
"""vLLM's name for the version of weights that were loaded at start."""

ReplicaError = (aiohttp.ClientError, OSError)
"""What a dead, dying or silent replica looks like from here (timeouts are OSErrors)."""


@dataclass(eq=False)
class Replica:
    url: str
    alive: bool = False
    requests: set[str] = field(default_factory=set)
    workers: int = 0
    """Its tensor-parallel ranks."""
    preemptions: float = 0.0
    """vLLM's counter when it was last read."""
    absence: str = ""
    """Why it is left out."""

    def leave_out(self, why: str) -> None:
        """Say so, but not again at every sync."""
        if why != self.absence:
            logger.warning("%s: left out: %s", self.url, why)
        self.absence = why


Calls = dict[Replica, Any]
"""What is under way with each replica, as concurrent futures."""


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
        self.silence = rollout.request_timeout / 2
        """Seconds of silence after which a replica is dead."""
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
            "sampling_params": self.sampling | {"max_tokens": max_tokens, "extra_args": {SEED: seed}},
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
        checked = self.weights.check(named_tensors)
        try:
            self._update_replicas(checked, str(policy_version))
        except EngineError:
            for _ in checked:  # exporting them is collective: other ranks take part to the end
                pass
            raise
        self.arrivals = queue.SimpleQueue()  # what was said of a replica before it got these weights is void
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
            "engine/preemptions": sum(self._each("metrics", self._new_preemptions)),
            "engine/removed_probability": removed / max(sampled, 1),
            "engine/live_replicas": float(sum(replica.alive for replica in self.replicas)),
        }
        metrics |= self.sync
        self.sync = {}
        return metrics

    def _connect(self, any_weights: bool = False) -> None:
        """Set up every replica that answers and has the right weights, or will get them now."""
        expected = None if any_weights else self.weight_version
        calls = {replica: self.io.start(self._set_up(replica, expected)) for replica in self.replicas}
        for replica, call in calls.items():
            try:
                workers = call.result()
            except ReplicaError as error:
                replica.alive = False
                replica.leave_out(words(error))
                continue
            self._check_limits(replica, workers[0])
            replica.workers = len(workers)
            replica.alive, replica.absence = True, ""
        self._check_any_alive()
        if not any_weights:
            self._start_heartbeats()

    async def _set_up(self, replica: Replica, expected: str | None) -> list[dict[str, int]]:
        """What each worker of a replica with the ``expected`` weights (None: any) says of its limits."""
        async with asyncio.timeout(PATIENCE):
            version = await self._weight_version(replica)
            if expected not in (None, version):
                raise ConnectionError(f"expected weights {expected!r}, found {version!r}")
            if not replica.alive:
                replica.preemptions = await self._preemptions(replica)
            setup = {
                "method": "eqlen_setup",
                "args": [self.rollout.logprobs_mode, self.rollout.mask_width],
            }
            return (await self._post(replica, "collective_rpc", setup))["results"]

    def _update_replicas(self, named_tensors: Iterable[tuple[str, Tensor]], weight_version: str) -> None:
        """Bring all replicas that answer to these weights. Raises EngineError when none is left, and
        whatever the stream raises."""
        self._connect(any_weights=True)
        self.refusal = "the last weight update failed half way; update_weights must succeed first"
        self._stop_heartbeats()
        self._everywhere("start_weight_update")
        try:
            self._stream_weights(named_tensors)
        finally:
            self._everywhere("finish_weight_update", {"weight_version": weight_version})
        self._everywhere("reset_prefix_cache")

    def _stream_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Send weights to the workers of all live replicas at once; fetch some while others are sent."""
        feeds = {replica: self._feed(replica) for replica in self.replicas if replica.alive}
        sending: Calls = {}
        try:
            self._each("waiting for its workers", lambda replica: feeds[replica].open())
            try:
                for bucket in buckets(named_tensors, BUCKET_BYTES):
                    self._settle("sending weights", sending)
                    frame = encode(bucket)
                    sending = self._start(lambda replica, frame=frame: feeds[replica].send(frame))
            finally:  # workers of a stream that failed its check must not wait for more
                self._settle("sending weights", sending)
                self._each("update_weights", lambda replica: feeds[replica].finish())
        finally:
            for feed in feeds.values():
                self.io.run(feed.close())

    def _feed(self, replica: Replica) -> Feed:
        def post(invitation: dict[str, Any]) -> Coroutine:
            return self._post(replica, "update_weights", {"update_info": invitation})

        return Feed(replica.url, replica.workers, self.rollout.request_timeout, post)

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
        """The same POST to every live replica at once."""
        return self._each(path, lambda replica: self._post(replica, path, body))

    def _each(self, what: str, call: Callable[[Replica], Coroutine]) -> list[Any]:
        return self._settle(what, self._start(call))

    def _start(self, call: Callable[[Replica], Coroutine]) -> Calls:
        """``call`` for every live replica at once; each fails after ``silence`` seconds."""

        async def limited(replica: Replica) -> Any:
            try:
                async with asyncio.timeout(self.silence):
                    return await call(replica)
            except TimeoutError:
                raise ConnectionError(f"silent for {self.silence:g} s") from None

        return {replica: self.io.start(limited(replica)) for replica in self.replicas if replica.alive}

    def _settle(self, what: str, calls: Calls) -> list[Any]:
        """The answers; a replica that failed to give one is buried. Raises EngineError when none is left."""
        answers = []
        for replica, call in calls.items():
            try:
                answers.append(call.result())
            except ReplicaError as error:
                self._bury(replica, f"{what}: {words(error)}")
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
                async with asyncio.timeout(PATIENCE):  # wait_for may swallow a cancellation (Python 3.11)
                    version = await self._weight_version(replica)
                if version != expected:
                    raise ConnectionError(f"expected weights {expected!r}, found {version!r}")
        except ReplicaError as error:
            self.arrivals.put(Failure(replica, f"heartbeat: {words(error)}"))

    async def _stream(self, replica: Replica, request_id: str, body: dict[str, Any]) -> None:
        """Put a request's deltas in the queue as they arrive, or a failure."""
        timeout = aiohttp.ClientTimeout(total=None, sock_read=self.silence)
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
                        delta = read_event(request_id, event, self.rollout.keep_sampling_mask)
                        if delta.finish_reason is None:
                            self.arrivals.put(delta)
                        else:  # the usage comes after the end
                            last = delta
            if last is None:
                raise ConnectionError(f"request {request_id}: the stream broke off")
            self.arrivals.put(last)
        except ReplicaError as error:
            self.arrivals.put(Failure(replica, words(error)))

    async def _new_preemptions(self, replica: Replica) -> float:
        """Preemptions since the last call. A counter that fell is that of a server that was restarted."""
        before, replica.preemptions = replica.preemptions, await self._preemptions(replica)
        return replica.preemptions - (before if before <= replica.preemptions else 0)

    async def _preemptions(self, replica: Replica) -> float:
        return read_counter(await self._get(replica, "metrics"), PREEMPTIONS)

    async def _weight_version(self, replica: Replica) -> str:
        return json.loads(await self._get(replica, "weight_info"))["weight_version"]

    async def _get(self, replica: Replica, path: str) -> str:
        async with self.io.session.get(f"{replica.url}/{path}") as response:
            await _check_status(response)
            return await response.text()

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


def words(error: BaseException) -> str:
    return str(error) or type(error).__name__


async def _check_status(response: aiohttp.ClientResponse) -> None:
    """ConnectionError with the server's words for anything but success."""
    if response.status != 200:
        text = (await response.text())[:500]
        raise ConnectionError(f"HTTP {response.status} from {response.url.path}: {text}")


def read_event(request_id: str, event: dict[str, Any], masked: bool = False) -> Delta:
    """One server-sent event of ``/inference/v1/generate`` as a delta, with sampling masks if ``masked``."""
    choice = event["choices"][0]
    reason = choice["finish_reason"]
    chosen = (choice["logprobs"] or {"content": []})["content"]
    return Delta(
        request_id,
        choice["token_ids"] or [],
        [token["logprob"] for token in chosen],
        reason if reason in ("stop", "length", None) else "lost",
        [_kept(token["top_logprobs"]) for token in chosen] if masked else None,
    )


def _kept(top_logprobs: list[dict[str, Any]]) -> tuple[int, ...]:
    """``PathSampler`` puts the sampling mask where vLLM has the most likely tokens."""
    return tuple(sorted(int(token["token"].removeprefix("token_id:")) for token in top_logprobs))


def _cached_tokens(event: dict[str, Any]) -> int | None:
    details = (event.get("usage") or {}).get("prompt_tokens_details")
    return details["cached_tokens"] if details else None


def read_counter(text: str, name: str) -> float:
    """The sum of a counter's lines in Prometheus' text format. Raises EngineError if there are none."""
    lines = [line for line in text.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
    if not lines:
        raise EngineError(f"/metrics: expected {name}, found none: was --disable-log-stats given?")
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def sampling_params(rollout: RolloutRecipe, eos_token_ids: Iterable[int]) -> dict[str, Any]:
    """The recipe's sampling as ``/inference/v1/generate`` takes it."""
    return {
        "temperature": rollout.temperature,
        "top_p": rollout.top_p,
        "top_k": max(rollout.top_k, 0),
        "min_p": rollout.min_p,
        "stop_token_ids": sorted(eos_token_ids),
        "logprobs": rollout.mask_width,
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
    arguments += ["--enable-prompt-tokens-details", "--disable-uvicorn-access-log"]
    arguments += ["--max-logprobs", str(max(rollout.top_k, 20))]  # sampling masks come as these
    arguments += ["--worker-extension-cls", "megatron_eqlen.rollout.vllm_worker.WorkerExtension"]
    arguments += ["--weight-transfer-config", json.dumps({"backend": "eqlen_tcp"})]
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
    recipe = load(args.recipe, args.overrides)
    layout.require(layout.engine(recipe.rollout, read_config(recipe.model.path)))
    command, environ = server_command(recipe, args.port, args.host)
    os.execve(command[0], command, os.environ | environ)


if __name__ == "__main__":
    main()

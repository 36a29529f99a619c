"""vLLM servers on other nodes: token ids in, token ids out, over HTTP.

    step ◄── queue ◄── one stream of server-sent events per request ◄── replica 1, 2, ...
                 ◄── one heartbeat per replica: alive, and with the weights we sent?
    update_weights ──► one TCP connection per node of each replica (``tcp_sender``), or NCCL (``nccl_sender``)

Requests of a replica that dies (``pool``) come back as ``lost`` with all their tokens kept, and the harvester
submits the rest to another replica. With ``rollout.staleness`` one thread harvests while another sends new
weights: the servers pause, and each request then continues where it was. Nothing here imports vLLM, unless
NCCL sends the weights.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Collection, Iterable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_eqlen.hf.config import read_config
from megatron_eqlen.metrics import (
    ENGINE_PREEMPTIONS,
    ENGINE_REMOVED_PROBABILITY,
    ENGINE_ROUTE_SECONDS,
    ENGINE_SYNC_BYTES,
    ENGINE_SYNC_SECONDS,
    ENGINE_SYNC_SENT_BYTES,
)
from megatron_eqlen.recipe import RolloutRecipe
from megatron_eqlen.rollout.engine import Delta, EngineError, check_request
from megatron_eqlen.rollout.vllm.server.generate_api import (
    PATH,
    cached_tokens,
    read_event,
    request_body,
    sampling_params,
)
from megatron_eqlen.rollout.vllm.server.pool import ReplicaPool
from megatron_eqlen.rollout.vllm.server.replica import ReplicaError, ServerReplica, words
from megatron_eqlen.rollout.vllm.weights.tcp_sender import TcpSender, WeightSender
from megatron_eqlen.rollout.weights import WeightTable
from megatron_eqlen.types import Metrics

UNTOUCHED = "default"
"""vLLM's name for the version of weights that were loaded at start."""


@dataclass
class Failure:
    """A failed request or replica; it is queued like a delta."""

    replica: ServerReplica
    reason: str
    weight_version: str
    """Engine's weight version at that time."""
    request_id: str | None = None


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
        self.moe_layers = read_config(model_path).moe_layers if rollout.keep_routes else []
        self.rollout = rollout
        self.sampling = sampling_params(rollout, eos_token_ids)
        self.max_model_len = max_model_len
        self.policy_version = policy_version
        self.weight_version = UNTOUCHED
        self.homes: dict[str, ServerReplica] = {}
        self.versions = {UNTOUCHED: policy_version}
        """Policy versions of the weights that may sample tokens, by vLLM's names; the newest is last."""
        self.arrivals: queue.SimpleQueue[Delta | Failure] = queue.SimpleQueue()
        self.lost: list[str] = []
        """Requests whose replica died; ``step`` gives them back."""
        self.busy = threading.RLock()
        """Held by one call at a time: a weight sync blocks a thread that harvests."""
        self.vocab_size = 0
        self.refusal = "update_weights must come first" if syncs_first else None
        self.closed = False
        self.sync: Metrics = {}
        self.sent_bytes = 0
        """Bytes that the last weight sync sent, to all replicas."""
        self.pool = ReplicaPool(rollout.servers, rollout.request_timeout / 2, self.lost.append)
        try:
            self.sender = self._sender()
            self._connect(any_weights=syncs_first)
        except EngineError:
            self.close()
            raise
        if not syncs_first:
            self.pool.start_heartbeats(self.weight_version, self._failed)

    @property
    def max_num_seqs(self) -> int:
        return self.rollout.max_num_seqs * max(len(self.pool.alive), 1)

    def submit(
        self, request_id: str, token_ids: list[int], max_tokens: int, seed: int, path_rows: int = 0
    ) -> None:
        with self.busy:
            if self.refusal is not None:
                raise EngineError(f"request {request_id}: {self.refusal}")
            if self._replica_of(request_id) is not None:
                raise ValueError(f"request {request_id}: expected an unused id, found it in flight")
            check_request(request_id, token_ids, max_tokens, self.max_model_len, self.vocab_size)
            body = request_body(
                request_id,
                token_ids,
                self.sampling,
                max_tokens,
                seed,
                path_rows,
                self._cache_salt(),
            )
            replica = self._home(request_id)
            replica.requests[request_id] = self.pool.io.start(self._stream(replica, request_id, body))

    def step(self) -> list[Delta]:
        """Return the deltas that have arrived; wait a moment if there are none. Raises EngineError once the
        engine is closed."""
        arrived: list[Delta | Failure] = []
        with suppress(queue.Empty):
            arrived.append(self.arrivals.get(timeout=0.05))
            while True:
                arrived.append(self.arrivals.get_nowait())
        with self.busy:
            if self.closed:
                raise EngineError("the engine was closed")
            deltas = [delta for arrival in arrived for delta in self._take(arrival)]
            deltas += [Delta(request_id, [], {}, "lost") for request_id in self.lost]
            self.lost.clear()
            return deltas

    def abort(self, request_ids: Iterable[str]) -> None:
        with self.busy:
            for request_id in request_ids:
                if (replica := self._replica_of(request_id)) is not None:
                    replica.forget(request_id)

    @property
    def has_unfinished(self) -> bool:
        return any(replica.requests for replica in self.pool.replicas)

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], policy_version: int) -> None:
        if self.has_unfinished and not self.rollout.staleness:
            raise EngineError("update_weights: requests are unfinished")
        start = time.perf_counter()
        checked = self.weights.check(named_tensors)
        with self.busy:
            try:
                self._update_replicas(checked, policy_version)
            except EngineError:
                for _ in checked:  # exporting weights is collective: the other ranks need this one to finish
                    pass
                raise
            self.refusal = None
            self.policy_version, self.weight_version = policy_version, str(policy_version)
            self.pool.start_heartbeats(self.weight_version, self._failed)
        self.sync = {
            ENGINE_SYNC_SECONDS: time.perf_counter() - start,
            ENGINE_SYNC_BYTES: self.weights.bytes_seen,
            ENGINE_SYNC_SENT_BYTES: self.sent_bytes,
        }

    def reset_cache(self) -> None:
        self.pool.post("reset_prefix_cache")

    def sleep(self) -> None:
        """Do nothing: servers have their own GPUs."""

    def wake(self) -> None:
        """Do nothing: servers do not sleep."""

    def state(self) -> dict[str, Any]:
        replicas = [
            {
                "url": replica.url,
                "alive": replica.alive,
                "requests": len(replica.requests),
                "absence": replica.absence,
            }
            for replica in self.pool.replicas
        ]
        return {"policy_version": self.policy_version, "refusal": self.refusal, "replicas": replicas}

    def close(self) -> None:
        """Close the engine. Safe to call more than once, and while another thread harvests."""
        with self.busy:
            if not self.closed:
                self.closed = True
                self.abort([name for replica in self.pool.replicas for name in replica.requests])
                self.pool.close()

    def metrics(self) -> Metrics:
        with self.busy:
            return self._metrics()

    def _metrics(self) -> Metrics:
        counts = [first for first, *_ in self.pool.rpc("eqlen_counts")]
        removed, sampled = (sum(count[i] for count in counts) for i in (0, 1))
        preemptions = sum(self.pool.each("metrics", lambda replica: replica.new_preemptions()))
        metrics = {
            ENGINE_PREEMPTIONS: preemptions,
            ENGINE_REMOVED_PROBABILITY: removed / max(sampled, 1),
            "engine/live_replicas": float(len(self.pool.alive)),
        }
        if self.rollout.keep_routes and all(len(count) > 2 for count in counts):  # V2 does not count it
            metrics[ENGINE_ROUTE_SECONDS] = max(count[2] for count in counts)
        metrics |= self.sync
        self.sync = {}
        return metrics

    # ---- requests -----------------------------------------------------------------------------------

    def _replica_of(self, request_id: str) -> ServerReplica | None:
        """Return the replica that runs an unfinished request."""
        return next((replica for replica in self.pool.replicas if request_id in replica.requests), None)

    def _home(self, request_id: str) -> ServerReplica:
        """Return the replica for a request. Requests whose ids agree up to the last ``/`` share a prefix, so
        they share a replica."""
        family = request_id.rpartition("/")[0]
        home = self.homes.get(family)
        if home is None or not home.alive:
            self.pool.check_any_alive()
            home = self.homes[family] = min(self.pool.alive, key=lambda replica: len(replica.requests))
        return home

    def _take(self, arrival: Delta | Failure) -> list[Delta]:
        if isinstance(arrival, Failure):
            self._fail(arrival)
            return []
        replica = self._replica_of(arrival.request_id)
        if replica is None:  # sent before the server saw the abort
            return []
        if arrival.finish_reason is not None:
            del replica.requests[arrival.request_id]
        return [arrival]

    def _fail(self, failure: Failure) -> None:
        """Handle a failure. A replica's failure before the newest weights is void; a request's is not."""
        if failure.weight_version == self.weight_version:
            self.pool.bury(failure.replica, failure.reason)
        elif failure.request_id in failure.replica.requests:
            failure.replica.forget(failure.request_id)
            self.lost.append(failure.request_id)

    async def _stream(self, replica: ServerReplica, request_id: str, body: dict[str, Any]) -> None:
        """Put a request's deltas in the queue as they arrive, or a failure."""
        last: Delta | None = None
        try:
            async with aclosing(replica.events(PATH, body, self.pool.silence)) as events:
                async for event in events:
                    if "error" in event:
                        raise ConnectionError(event["error"])
                    if last is not None:
                        last.num_cached_tokens = cached_tokens(event)
                    elif event.get("choices"):
                        deltas = read_event(request_id, event, self.versions, self.rollout, self.moe_layers)
                        if deltas[-1].finish_reason is not None:  # token usage comes after the last tokens
                            last = deltas.pop()
                        for delta in deltas:
                            self.arrivals.put(delta)
            if last is None:
                raise ConnectionError(f"request {request_id}: the stream broke off")
            self.arrivals.put(last)
        except ReplicaError as error:
            self._failed(replica, words(error), request_id)

    def _failed(self, replica: ServerReplica, reason: str, request_id: str | None = None) -> None:
        self.arrivals.put(Failure(replica, reason, self.weight_version, request_id))

    # ---- weights ------------------------------------------------------------------------------------

    def _sender(self) -> WeightSender:
        if self.rollout.sync == "tcp":
            return TcpSender(self.pool, self.rollout.request_timeout)
        from megatron_eqlen.rollout.vllm.weights.nccl_sender import NcclSender  # imports vLLM

        return NcclSender(self.pool, self.weights.shapes)

    def _connect(self, any_weights: bool = False) -> None:
        """Set up every replica that answers and has the right weights (or any weights, before a sync)."""
        expected = None if any_weights else self.weight_version
        setup = [self.rollout.logprobs_mode, self.rollout.mask_width, self.rollout.keep_columns]
        self.pool.connect(expected, setup, self._check_limits)

    def _check_limits(self, replica: ServerReplica, limits: dict[str, int]) -> None:
        self.vocab_size = limits["vocab_size"]
        if limits["max_model_len"] < self.max_model_len:
            raise EngineError(
                f"{replica.url}: expected a server with --max-model-len of at least {self.max_model_len}, "
                f"found {limits['max_model_len']}"
            )
        for key in ("keep_routes", "batch_invariant", "quantization"):
            if (value := getattr(self.rollout, key)) and not limits[key]:
                raise EngineError(
                    f"{replica.url}: expected a server started with rollout.{key}: {str(value).lower()}, "
                    f"found one without"
                )

    def _update_replicas(self, named_tensors: Iterable[tuple[str, Tensor]], policy_version: int) -> None:
        """Send these weights to all replicas that answer. Raises EngineError when none is left, and whatever
        the stream raises."""
        self._connect(any_weights=True)
        self.refusal = "the last weight update failed half way; update_weights must succeed first"
        self.pool.stop_heartbeats()
        if self.rollout.staleness:
            self._pause()
        self.pool.post("start_weight_update")
        before = self.versions if self.has_unfinished else {}
        self.versions = before | {str(policy_version): policy_version}
        try:
            self.sent_bytes = self.sender.send(named_tensors)
        finally:
            self.pool.post("finish_weight_update", {"weight_version": str(policy_version)})
        self.pool.post("resume" if self.rollout.staleness else "reset_prefix_cache")

    def _pause(self) -> None:
        """Stop decoding until the weights are loaded; requests stay where they are.

        With ``on_sync: recompute`` and routes, requests are lost instead: the caller that submits them again
        asks for the routes that the new weights choose for their paths. A server that computes a path again
        in the middle of a request would not send these.
        """
        recompute = self.rollout.on_sync == "recompute"
        if recompute and self.rollout.keep_routes:
            for replica in self.pool.replicas:
                for request_id in list(replica.requests):
                    replica.forget(request_id)
                    self.lost.append(request_id)
        self.pool.post(f"pause?mode=keep&clear_cache={str(recompute).lower()}")

    def _cache_salt(self) -> str | None:
        """Return the salt of the prefix cache. With ``on_sync: continue`` it changes with the weights, so
        that no request begins from keys and values cached under older ones."""
        keeps = self.rollout.staleness and self.rollout.on_sync == "continue"
        return self.weight_version if keeps else None

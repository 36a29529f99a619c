"""vLLM servers on other nodes: token ids in, token ids out, over HTTP.

    step ◄── readers (``readers``) ◄── one stream of server-sent events per request ◄── replica 1, 2, ...
    update_weights ──► files in the run's folder (``weights.folder``), or NCCL (``weights.nccl``)

Requests of a replica that dies come back as ``lost`` with their tokens, and the harvester submits the rest to
another. With ``rollout.staleness`` one thread harvests while another sends new weights: the servers pause,
and each request then continues. Nothing here imports vLLM, unless NCCL sends the weights.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Collection, Iterable
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from megatron_eqlen.engines.generate_api import read_event
from megatron_eqlen.engines.protocol import EngineError, Request, sampling_params, seeded
from megatron_eqlen.engines.readers import PATH, Readers, Settings
from megatron_eqlen.engines.replica import UNTOUCHED, OpenRequest, Replica, ReplicaPool, events
from megatron_eqlen.engines.weight_table import WeightTable
from megatron_eqlen.engines.weights.folder import FolderSender
from megatron_eqlen.hf.config import read_config
from megatron_eqlen.recipe import RolloutRecipe
from megatron_eqlen.recipe.contents import Contents, function, weights
from megatron_eqlen.tokens import GrowingTokens, Tokens
from megatron_eqlen.types import Delta, Metrics, Node, TokenTree

if TYPE_CHECKING:
    from megatron_eqlen.engines.weights.nccl import NcclSender

logger = logging.getLogger(__name__)

TOKENS_PER_EVENT = 8
"""Tokens a server collects before it sends them."""
READERS = 16
"""Most processes that read streams; each reads some 200,000 tokens a second."""
PROBED = 32
"""Tokens that a replica samples after a sync, to be compared with the trainer."""
DECIDE = ("quantization", "vllm")
"""Keys of ``rollout`` that decide what a server computes, also where the recipe leaves them out."""


def name_of_sync(policy_version: int) -> str:
    """Return a name, unique among all runs, by which servers label the tokens of one sync's weights."""
    return f"{policy_version}-{secrets.token_hex(8)}"


class ServerEngine:
    """An ``Engine`` (see there) over ``rollout.servers``.

    ``model_path``: the model that the servers were started with, as version 0. With ``syncs_first`` servers
    may hold any weights (those of the last sync before a restart), and requests are refused until
    ``update_weights``. ``run``: the run's folder, through which weights pass, and which other trainers are
    told if they find its servers in use; None: a temporary one. ``dtype``: the recipe's. Raises EngineError
    if no server answers, or another trainer uses one.
    """

    def __init__(
        self,
        model_path: str | Path,
        rollout: RolloutRecipe,
        eos_token_ids: Collection[int],
        max_model_len: int,
        syncs_first: bool = False,
        run: Path | None = None,
        dtype: str = "float32",
    ) -> None:
        # a name that no other engine has, in this run or another: servers tell owners apart by it
        own = f"{os.getpid()}-{secrets.token_hex(4)}"
        trainer = f"{run or 'a trainer'} (process {own} on {socket.gethostname()})"
        self.function = function(Path(model_path), dtype)
        self.weights = WeightTable.read(model_path)
        self.moe_layers = read_config(model_path).moe_layers if rollout.keep_routes else []
        self.rollout = rollout
        self.eos_token_ids = eos_token_ids
        self.sample_as(rollout)
        self.max_model_len = max_model_len
        self.policy_version = 0
        self.weight_version = UNTOUCHED
        self.homes: dict[str, Replica] = {}
        self.versions = {UNTOUCHED: 0}
        """Policy versions of the weights that may sample tokens, by vLLM's names; the newest is last."""
        self.busy = threading.RLock()
        """Held by one call at a time: a weight sync blocks a thread that harvests."""
        self.vocab_size = 0
        self.refusal = "update_weights must come first" if syncs_first else None
        self.closed = False
        self.sync: Metrics = {}
        # half of what the driver waits for: a silent replica's requests go elsewhere before it gives up
        self.pool = ReplicaPool(rollout.servers, rollout.request_timeout / 2, trainer)
        settings = Settings(self.pool.io.headers, self.pool.silence, rollout, self.moe_layers)
        self.readers = Readers(settings, min(len(rollout.servers), READERS))
        self.readers.know(self.versions)
        try:
            self.sender = self._sender(run or Path(tempfile.gettempdir(), own))
            # without a sync servers sample from what they were started with: it must be this model's files
            self._connect(None if syncs_first else weights(Path(model_path)))
            self.pool.refuse_taken()
            self.readers.wait()
        # readers are processes of their own, and would stay as long as this one
        except EngineError:
            self.close()
            raise

    def sample_as(self, rollout: RolloutRecipe) -> None:
        self.sampling = sampling_params(rollout, self.eos_token_ids)

    @property
    def max_num_seqs(self) -> int:
        return self.rollout.max_num_seqs * max(len(self.pool.alive), 1)

    def submit(self, request: Request) -> None:
        with self.busy:
            self._check_open()
            request_id = request.request_id
            if self.refusal is not None:
                raise EngineError(f"request {request_id}: {self.refusal}")
            assert self._replica_of(request_id) is None
            replica = self._home(request_id)
            replica.requests[request_id] = sent = OpenRequest(request_id, replica, self.readers.forget)
            self.readers.start(sent, self.pool.replicas.index(replica), self._body(replica, request))

    def step(self) -> list[Delta]:
        """Return the deltas that have arrived; wait a moment for some. Raises EngineError if closed."""
        # not under the lock: a sync need not wait for what has not arrived
        arrived = self.readers.arrived()
        with self.busy:
            self._check_open()
            deltas = [delta for arrival in arrived if (delta := self._take(*arrival)) is not None]
            deltas += [Delta(request_id, [], {}, "lost") for request_id in self.pool.lost]
            self.pool.lost.clear()
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
            self.policy_version, self.weight_version = policy_version, [*self.versions][-1]
        self.sync = {
            "engine/sync_seconds": time.perf_counter() - start,
            "engine/sync_bytes": self.weights.bytes_seen,
        }

    # servers have their own GPUs
    def sleep(self) -> None: ...
    def wake(self) -> None: ...

    def close(self) -> None:
        """Close the engine. Safe to call more than once, and while another thread harvests."""
        with self.busy:
            if not self.closed:
                self.closed = True
                self.abort([name for replica in self.pool.replicas for name in replica.requests])
                self.readers.close()
                self.pool.close()

    def metrics(self) -> Metrics:
        with self.busy:
            metrics = {"engine/live_replicas": float(len(self.pool.alive)), **self.sync}
            self.sync = {}
            return metrics

    def _check_open(self) -> None:
        if self.closed:
            raise EngineError("the engine was closed")

    # ---- requests -----------------------------------------------------------------------------------

    def _replica_of(self, request_id: str) -> Replica | None:
        return next((replica for replica in self.pool.replicas if request_id in replica.requests), None)

    def _home(self, request_id: str) -> Replica:
        """Return a request's replica: ids that agree up to the last ``/`` share a prefix, so a replica."""
        family = request_id.rpartition("/")[0]
        home = self.homes.get(family)
        if home is None or not home.alive:
            self.pool.check_any_alive()
            home = self.homes[family] = min(self.pool.alive, key=lambda replica: len(replica.requests))
        return home

    def _take(self, request: OpenRequest, arrival: Delta | str) -> Delta | None:
        """Return what arrived; None if the request was aborted, or failed: its replica is left out then."""
        replica = request.replica
        if replica.requests.get(request.request_id) is not request:
            return None
        if isinstance(arrival, str):
            self.pool.leave_out(replica, arrival)
            return None
        if arrival.finish_reason is not None:
            replica.forget(request.request_id)
        return arrival

    def _body(self, to: Replica, request: Request) -> dict[str, Any]:
        """Return the body of a request. Only requests of one ``cache_salt`` share cached prefixes. It changes
        with the weights under ``on_sync: continue``, so none begins from keys and values of older ones."""
        own = {
            "max_tokens": request.max_tokens,
            "stream_interval": TOKENS_PER_EVENT,
            # the key depends on the replica's sampler, ours or vLLM's
            **seeded(request.seed, to.stock),
            "routed_experts_prompt_start": request.path_start,
        }
        # otherwise a pause clears the cache (`_pause`), and no salt is needed
        keeps = self.rollout.staleness and self.rollout.on_sync == "continue"
        return {
            "request_id": request.request_id,
            "token_ids": request.token_ids,
            "sampling_params": self.sampling | own,
            "stream": True,
            # usage comes after the last tokens, and tells how many of the prompt's were cached
            "stream_options": {"include_usage": True},
            "cache_salt": self.weight_version if keeps else None,
        }

    def probe(self) -> list[TokenTree]:
        """Return ``PROBED`` tokens of each replica after tokens spread over the vocabulary's first half."""
        length = min(2 * PROBED, self.max_model_len - PROBED)
        prompt = np.linspace(0, self.vocab_size // 2, max(length, 1), dtype=int).tolist()
        with self.busy:
            sampled = self.pool.each("probe", lambda replica: self._probe(replica, prompt))
        root = Node(-1, Tokens.of(prompt))
        return [TokenTree(each.url, [root, Node(0, tokens, weight=1.0)]) for each, tokens in sampled.items()]

    async def _probe(self, replica: Replica, prompt: list[int]) -> Tokens:
        body = self._body(replica, Request("probe", prompt, PROBED, seed=0))
        # a salt of its own: nothing is cached, so the new weights compute the whole prompt
        body["cache_salt"], body["sampling_params"]["stop_token_ids"] = secrets.token_hex(), []
        grown = GrowingTokens()
        url = f"{replica.url}/{PATH}"
        async with aclosing(events(replica.io.session, url, body, self.pool.silence)) as stream:
            async for event in stream:
                if event.get("choices"):
                    delta = read_event("probe", event, self.versions, self.rollout, replica.stock)
                    grown.append(delta.token_ids, delta.columns, self.policy_version)
        return grown[:].without(self.rollout.untrained_columns)

    # ---- weights ------------------------------------------------------------------------------------

    def _sender(self, run: Path) -> FolderSender | NcclSender:
        if self.rollout.sync == "folder":
            return FolderSender(self.pool, run / "weights")
        from megatron_eqlen.engines.weights.nccl import NcclSender  # imports vLLM

        return NcclSender(self.pool, self.weights)

    def _connect(self, untouched: Contents | None) -> None:
        """Set up replicas that answer and have ``untouched`` weights (None: any). EngineError for none."""
        answers = self.pool.each("connecting", lambda replica: replica.set_up(untouched), self.pool.replicas)
        for replica, workers in answers.items():
            self._check_limits(replica, workers[0])
            if len(workers) not in (replica.workers, self.rollout.tensor_parallel):
                found = f"{self.rollout.tensor_parallel} GPUs (rollout.tensor_parallel), found {len(workers)}"
                logger.warning("%s: expected %s: GPU hours will be wrong", replica.url, found)
            replica.stock = workers[0]["stock"]
            replica.alive, replica.absence, replica.workers = True, "", len(workers)

    def _check_limits(self, replica: Replica, limits: dict[str, Any]) -> None:
        self.vocab_size = limits["vocab_size"]
        # the same weights with another config, dtype, tokenizer or template are another policy
        theirs = limits["function"] or {}
        for key in sorted(self.function.keys() | theirs.keys()):
            if (ours := self.function.get(key)) != theirs.get(key):
                expected = f"a server of the same model, {key} {ours!r}"
                found = f"{theirs.get(key)!r}: it computes another function of the same weights"
                raise EngineError(f"{replica.url}: expected {expected}, found {found}")
        if (longest := limits["max_model_len"]) < self.max_model_len:
            expected = f"expected a server with --max-model-len of at least {self.max_model_len}"
            raise EngineError(f"{replica.url}: {expected}, found {longest}")
        for key, started in limits["started_with"].items():
            # a server may have more than the recipe asks for, unless that changes what it computes
            value = getattr(self.rollout, key) or None
            if value != (started or None) and (value or key in DECIDE):
                expected = f"expected a server started with rollout.{key}: {str(value).lower()}"
                found = f"one {f'with {started}' if started else 'without'}"
                raise EngineError(f"{replica.url}: {expected}, found {found}")

    def _update_replicas(self, named_tensors: Iterable[tuple[str, Tensor]], policy_version: int) -> None:
        """Send these weights to all replicas that answer. Raises EngineError when none is left."""
        # replicas that were left out come back here, and get the weights with the others
        self._connect(None)
        self.refusal = "the last weight update failed half way; update_weights must succeed first"
        self._pause()
        self.pool.post("start_weight_update")
        # tokens of the old weights may still be on their way; without requests there are none
        before = self.versions if self.has_unfinished else {}
        name = name_of_sync(policy_version)
        self.versions = before | {name: policy_version}
        self.readers.know(self.versions)
        try:
            sent = self.sender.send(named_tensors)
        finally:
            # after a failure, too: during an update a server refuses every request for tokens
            self.pool.post("finish_weight_update", {"weight_version": name})
        # a worker that cannot read the folder logs it and keeps old weights; by NCCL both numbers are 0
        for replica, workers in self.pool.each("weights", lambda replica: replica.rpc("eqlen_setup")).items():
            if (received := min(worker["received"] for worker in workers)) != sent:
                why = f"expected it to read {sent} weights through the run's folder, found {received}"
                self.pool.leave_out(replica, f"{why}: it must see that folder under the same path")
        self.pool.check_any_alive()
        self.pool.post("resume")

    def _pause(self) -> None:
        """Stop decoding until the weights are loaded; requests stay where they are, those of others, too."""
        recompute = not self.rollout.staleness or self.rollout.on_sync == "recompute"
        self.pool.post(f"pause?mode=keep&clear_cache={str(recompute).lower()}")

"""Weights to all servers at once over TCP, a connection to each of their nodes."""

from __future__ import annotations

from collections.abc import Coroutine, Iterable
from typing import Any, Protocol

from torch import Tensor

from megatron_eqlen.rollout.vllm.server.pool import Calls, ReplicaPool
from megatron_eqlen.rollout.vllm.server.replica import ServerReplica
from megatron_eqlen.rollout.vllm.weights.feed import Feed
from megatron_eqlen.rollout.vllm.weights.stream import buckets, encode

BUCKET_BYTES = 64 * 2**20
"""Weights that a sync sends at once; a larger tensor goes alone."""


class WeightSender(Protocol):
    """Sends weights to the live replicas of a pool, between ``start_weight_update`` and
    ``finish_weight_update``."""

    def send(self, named_tensors: Iterable[tuple[str, Tensor]]) -> int:
        """Send the weights; return the bytes that this process sent. Raises EngineError when no replica is
        left, and whatever ``named_tensors`` raises."""
        ...


class TcpSender:
    """A ``WeightSender`` over TCP: a replica that fails is left out (``ReplicaPool.bury``), the others get
    everything."""

    def __init__(self, pool: ReplicaPool, timeout: float) -> None:
        self.pool = pool
        self.timeout = timeout

    def send(self, named_tensors: Iterable[tuple[str, Tensor]]) -> int:
        """Send the weights; the next part is fetched while one is sent."""
        feeds = {replica: self._feed(replica) for replica in self.pool.alive}
        sending: Calls = {}
        try:
            self.pool.each("waiting for its workers", lambda replica: feeds[replica].open())
            try:
                for bucket in buckets(named_tensors, BUCKET_BYTES):
                    self.pool.settle("sending weights", sending)
                    frame = encode(bucket)
                    sending = self.pool.start(lambda replica, frame=frame: feeds[replica].send(frame))
            finally:  # the stream failed: the workers must not wait for more weights
                self.pool.settle("sending weights", sending)
                self.pool.each("update_weights", lambda replica: feeds[replica].finish())
        finally:
            for feed in feeds.values():
                self.pool.io.run(feed.close())
        return sum(feed.sent_bytes for feed in feeds.values())

    def _feed(self, replica: ServerReplica) -> Feed:
        def post(invitation: dict[str, Any]) -> Coroutine:
            return replica.post("update_weights", {"update_info": invitation})

        return Feed(replica.url, replica.workers, self.timeout, post)

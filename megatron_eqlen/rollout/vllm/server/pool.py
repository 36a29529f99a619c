"""All servers of a run: calls to every live server, and the handling of one that fails.

A replica that refuses, breaks off, or falls silent is dead: it is left out until the next weight sync, when
it gets the same weights as all. A server takes far longer to start than ``HEARTBEAT``, so a restart (which
brings old weights back) is always noticed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from megatron_eqlen.rollout.engine import EngineError
from megatron_eqlen.rollout.vllm.server.replica import (
    PATIENCE,
    Background,
    ReplicaError,
    ServerReplica,
    at_most,
    words,
)

logger = logging.getLogger(__name__)

HEARTBEAT = 1.0
"""Seconds between a replica's heartbeats."""

Calls = dict[ServerReplica, Any]
"""The pending call to each replica."""


class ReplicaPool:
    """Replicas at ``urls``; one that is silent for ``silence`` seconds is dead.

    ``on_lost`` is called with the id of each request that a dead replica had.
    """

    def __init__(self, urls: Iterable[str], silence: float, on_lost: Callable[[str], None]) -> None:
        self.io = Background()
        self.silence = silence
        self.on_lost = on_lost
        self.replicas = [ServerReplica(url.rstrip("/"), self.io) for url in urls]
        self.heartbeats: list[Any] = []

    @property
    def alive(self) -> list[ServerReplica]:
        return [replica for replica in self.replicas if replica.alive]

    def connect(
        self, expected: str | None, setup: list[Any], check: Callable[[ServerReplica, Any], None]
    ) -> None:
        """Set up every replica that answers and has the ``expected`` weights (see ``ServerReplica.set_up``).

        ``check`` gets each replica with the limits of its first worker. Raises EngineError if none answers.
        """
        calls = {replica: self.io.start(replica.set_up(expected, setup)) for replica in self.replicas}
        for replica, call in calls.items():
            try:
                workers = call.result()
            except ReplicaError as error:
                replica.leave_out(words(error))
                self._lose_requests(replica)
                continue
            check(replica, workers[0])
            replica.take_in(len(workers))
        self.check_any_alive()

    def check_any_alive(self) -> None:
        if not self.alive:
            absent = "; ".join(
                f"{replica.url}: {replica.absence} (since {_clock(replica.absent_since)})"
                for replica in self.replicas
            )
            raise EngineError(
                f"rollout.servers: none is alive of {absent}; start them again, and the same command resumes"
            )

    def post(self, path: str, body: dict[str, Any] | None = None) -> list[Any]:
        """Send the same POST to every live replica at once; return the answers."""
        return self.each(path, lambda replica: replica.post(path, body))

    def rpc(self, method: str, *args: Any) -> list[list[Any]]:
        """Return the answers of ``WorkerExtension.method``, from each worker of each live replica."""
        return self.each(method, lambda replica: replica.rpc(method, list(args)))

    def each(self, what: str, call: Callable[[ServerReplica], Coroutine]) -> list[Any]:
        return self.settle(what, self.start(call))

    def start(self, call: Callable[[ServerReplica], Coroutine]) -> Calls:
        """Start ``call`` for every live replica at once; each fails after ``silence`` seconds."""

        async def limited(replica: ServerReplica) -> Any:
            async with at_most(self.silence):
                return await call(replica)

        return {replica: self.io.start(limited(replica)) for replica in self.alive}

    def settle(self, what: str, calls: Calls) -> list[Any]:
        """Wait for the answers; a replica that gives none is dead (``bury``). Raises EngineError when no
        replica is left."""
        answers = []
        for replica, call in calls.items():
            try:
                answers.append(call.result())
            except ReplicaError as error:
                self.bury(replica, f"{what}: {words(error)}")
        self.check_any_alive()
        return answers

    def bury(self, replica: ServerReplica, reason: str) -> None:
        """Mark a replica as dead; its requests are lost."""
        if replica.alive:
            logger.warning(
                "%s: dead until the next weight sync, %d requests go elsewhere: %s",
                replica.url,
                len(replica.requests),
                reason,
            )
            replica.miss(reason)
        self._lose_requests(replica)

    def _lose_requests(self, replica: ServerReplica) -> None:
        for request_id in sorted(replica.requests):
            replica.forget(request_id)
            self.on_lost(request_id)

    def start_heartbeats(self, expected: str, on_failure: Callable[[ServerReplica, str], None]) -> None:
        """Ask every live replica at regular intervals whether it is alive and has the ``expected``
        weights."""
        self.stop_heartbeats()
        self.heartbeats = [
            self.io.start(_watch(replica, expected, on_failure)) for replica in self.replicas if replica.alive
        ]

    def stop_heartbeats(self) -> None:
        for heartbeat in self.heartbeats:
            heartbeat.cancel()
        self.heartbeats = []

    def close(self) -> None:
        self.stop_heartbeats()
        self.io.close()


async def _watch(
    replica: ServerReplica, expected: str, on_failure: Callable[[ServerReplica, str], None]
) -> None:
    try:
        while True:
            await asyncio.sleep(HEARTBEAT)
            async with at_most(PATIENCE):
                version = await replica.weight_version()
            if version != expected:
                raise ConnectionError(f"expected weights {expected!r}, found {version!r}")
    except ReplicaError as error:
        on_failure(replica, f"heartbeat: {words(error)}")


def _clock(moment: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(moment))

"""Processes that read the servers' streams, so that HTTP and JSON take no time of the trainer's rank.

    driver ── start, drop, versions ──► reader ◄── server-sent events ── its servers
       ▲───────── deltas, batch by batch ──┘

A reader ends with the trainer, which ends its pipe.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from megatron_eqlen.engines.generate_api import read_event
from megatron_eqlen.engines.replica import OpenRequest, ReplicaError, events, session, words
from megatron_eqlen.recipe import RolloutRecipe
from megatron_eqlen.types import Delta

PATH = "inference/v1/generate"
BATCH_SECONDS = 0.005
"""Time for which a reader collects deltas before it hands them over."""
TAKEN_SECONDS = 0.05
"""Time for which ``arrived`` waits for a first batch."""
ENDED = "the process that reads its tokens ended"

Arrival = tuple[int, Delta | str]
"""A request's number, and its next delta or why it failed."""


@dataclass(frozen=True)
class Settings:
    """Settings of a reader, which the trainer sends first."""

    headers: Mapping[str, str]
    silence: float
    """Seconds without an event after which a request has failed."""
    rollout: RolloutRecipe
    layers: Sequence[int]
    """Layers whose routes are kept."""


class Readers:
    """``count`` readers; one that has ended starts again with its next request."""

    def __init__(self, settings: Settings, count: int) -> None:
        self.settings, self.count = settings, count
        self.numbers = itertools.count()
        self.open: dict[int, OpenRequest] = {}
        """Requests that have not ended, by number."""
        self.pipes: dict[int, Connection] = {}
        self.processes: list[subprocess.Popen] = []
        self.receivers: list[threading.Thread] = []
        self.batches: queue.SimpleQueue[list[Arrival]] = queue.SimpleQueue()
        self.versions: dict[str, int] = {}
        self.ready = [threading.Event() for _ in range(count)]
        for reader in range(count):
            self._launch(reader)

    def wait(self) -> None:
        """Wait until all can read, or have ended."""
        for ready in self.ready:
            ready.wait()

    def start(self, request: OpenRequest, place: int, body: dict[str, Any]) -> None:
        """Send a request to its replica, the one at ``place`` among all. Its number becomes known."""
        request.number, request.reader = next(self.numbers), place % self.count
        self.open[request.number] = request
        if request.reader not in self.pipes:
            self._launch(request.reader)
        replica = request.replica
        said = request.number, replica.url, request.request_id, body, replica.stock
        self._tell(request.reader, ("start", *said))

    def forget(self, request: OpenRequest) -> None:
        """Close the request's connection, whereupon vLLM aborts it."""
        if self.open.pop(request.number, None) is not None:
            self._tell(request.reader, ("drop", request.number))

    def know(self, versions: Mapping[str, int]) -> None:
        """Accept tokens of these weights from now on."""
        self.versions = dict(versions)
        for reader in [*self.pipes]:
            self._tell(reader, ("versions", self.versions))

    def arrived(self) -> list[tuple[OpenRequest, Delta | str]]:
        """Return what has arrived for open requests; wait a moment if there is nothing."""
        arrivals: list[Arrival] = []
        with contextlib.suppress(queue.Empty):
            # wait for a first batch, then take all others that are there
            arrivals += self.batches.get(timeout=TAKEN_SECONDS)
            while True:
                arrivals += self.batches.get_nowait()
        known = ((self.open.get(number), found) for number, found in arrivals)
        return [(request, found) for request, found in known if request is not None]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        for receiver in self.receivers:
            receiver.join()

    def _launch(self, reader: int) -> None:
        ours, theirs = socket.socketpair()
        # only the child keeps its end open: when it dies, ours reads the end of the pipe
        with theirs:
            self.processes.append(subprocess.Popen([sys.executable, "-m", __name__], stdin=theirs.fileno()))
        self.pipes[reader] = pipe = Connection(ours.detach())
        name = f"reader-{reader}"
        receiver = threading.Thread(target=self._receive, args=(reader, pipe), daemon=True, name=name)
        receiver.start()
        self.receivers.append(receiver)
        self._tell(reader, self.settings)
        self._tell(reader, ("versions", self.versions))

    def _tell(self, reader: int, message: Any) -> None:
        if (pipe := self.pipes.get(reader)) is None:  # it ended since, and _receive fails its requests
            return
        with contextlib.suppress(OSError):  # it ends just now
            pipe.send(message)

    def _receive(self, reader: int, pipe: Connection) -> None:
        """Put batches into the queue until the reader ends; then all its requests have failed."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                self.batches.put(pipe.recv())
                self.ready[reader].set()
        self.ready[reader].set()
        del self.pipes[reader]
        pipe.close()
        lost = [number for number, request in [*self.open.items()] if request.reader == reader]
        self.batches.put([(number, ENDED) for number in lost])


@dataclass
class _Reader:
    """The process's own side."""

    pipe: Connection
    settings: Settings
    versions: dict[str, int] = field(default_factory=dict[str, int])
    tasks: dict[int, asyncio.Task] = field(default_factory=dict[int, asyncio.Task])
    batch: list[Arrival] = field(default_factory=list[Arrival])

    async def run(self) -> None:
        """Do what the trainer says until the pipe's end."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        async with await session(self.settings.headers) as http:

            def obey() -> None:
                try:
                    while self.pipe.poll():
                        self._obey(http, *self.pipe.recv())
                except (EOFError, OSError):
                    ended.set()

            self._hand_over()  # it is ready
            # in the turn of the loop in which a message arrives, before a stream sees what followed it
            loop.add_reader(self.pipe.fileno(), obey)
            await ended.wait()
            os._exit(0)

    def _obey(self, http: Any, what: str, *said: Any) -> None:
        if what == "versions":
            (self.versions,) = said
        elif what == "start":
            number = said[0]
            self.tasks[number] = asyncio.create_task(self._stream(http, *said))
            self.tasks[number].add_done_callback(lambda _: self.tasks.pop(number, None))
        elif (task := self.tasks.get(said[0])) is not None:
            task.cancel()

    def _put(self, number: int, found: Delta | str) -> None:
        if not self.batch:
            asyncio.get_running_loop().call_later(BATCH_SECONDS, self._hand_over)
        self.batch.append((number, found))

    def _hand_over(self) -> None:
        batch, self.batch = self.batch, []
        with contextlib.suppress(OSError):  # the trainer has ended, which ``run`` notices
            self.pipe.send(batch)

    async def _stream(
        self, http: Any, number: int, url: str, request_id: str, body: dict[str, Any], stock: str
    ) -> None:
        """Hand over a request's deltas as they arrive, or why it failed."""
        last: Delta | None = None
        rollout, layers = self.settings.rollout, self.settings.layers
        try:
            async with aclosing(events(http, f"{url}/{PATH}", body, self.settings.silence)) as stream:
                async for event in stream:
                    if last is not None:
                        details = (event.get("usage") or {}).get("prompt_tokens_details") or {}
                        last.num_cached_tokens = details.get("cached_tokens")
                    elif event.get("choices"):
                        delta = read_event(request_id, event, self.versions, rollout, stock, layers)
                        if delta.finish_reason is not None:  # token usage comes after the last tokens
                            last = delta
                        else:
                            self._put(number, delta)
            if last is None:
                raise ConnectionError(f"request {request_id}: the stream broke off")
            self._put(number, last)
        except ReplicaError as error:
            self._put(number, words(error))


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer handles Ctrl-C
    pipe = Connection(sys.stdin.fileno())
    asyncio.run(_Reader(pipe, pipe.recv()).run())


if __name__ == "__main__":
    main()

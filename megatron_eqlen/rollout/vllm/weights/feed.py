"""The trainer's end of a weight sync with one replica (``weight_stream`` has the wire format).

    open    HTTP POST ──► server            where to connect, and with which nonce
                          workers ──► hello     (one of each node: ``weight_relay``)
    send    frame ──► workers               as often as there are weights
    finish  last frame ──► workers
                          workers ──► done; server ──► answer to the POST

Workers send the nonce back. A connection without it comes from somebody else and is closed.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Callable, Coroutine
from contextlib import ExitStack, suppress
from typing import Any
from urllib.parse import urlsplit

from megatron_eqlen.rollout.vllm.weights.stream import DONE, HELLO, NONCE_BYTES, Frame, encode

LAST_WORDS = 1.0
"""Seconds in which a server may report over HTTP why its worker hung up."""


class Feed:
    """Connections to the ``workers`` of the server at ``url``, each of which fails after ``timeout`` seconds
    of silence.

    ``post`` gives a server an invitation for its workers, and returns when they have loaded everything. Used
    inside one event loop. Every step raises OSError if a connection breaks, or the error of ``post`` if the
    server reports more; ``close`` must follow in any case.
    """

    def __init__(
        self, url: str, workers: int, timeout: float, post: Callable[[dict[str, Any]], Coroutine]
    ) -> None:
        self.url = url
        self.post = post
        self.workers = workers
        self.timeout = timeout
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self.sockets: list[socket.socket] = []
        self.reached = 0
        """Number of workers behind these connections."""
        self.sent_bytes = 0
        self.met = asyncio.Event()
        self.answer: asyncio.Task[Any] | None = None

    async def open(self) -> None:
        """Invite the workers, and wait until all have come."""
        with await listen_towards(self.url) as listener:
            host, port = listener.getsockname()[:2]
            invitation = {"host": host, "port": port, "nonce": self.nonce.hex(), "timeout": self.timeout}
            self.answer = asyncio.create_task(self.post(invitation))
            self.answer.add_done_callback(lambda _: self.met.set())
            reception = asyncio.create_task(self._receive(listener))
            try:
                await self.met.wait()
            finally:
                reception.cancel()
                await asyncio.wait({reception})
        if self.reached < self.workers:
            await self._answered()  # raises the server's error
            raise ConnectionError(f"expected {self.workers} workers to connect, found {self.reached}")

    async def send(self, frame: Frame) -> None:
        await self._with_all(lambda sock: _send(sock, frame))
        self.sent_bytes += len(self.sockets) * sum(map(len, frame))

    async def finish(self) -> None:
        """Wait until the workers have loaded everything that was sent."""
        await self.send(encode([]))
        await self._with_all(lambda sock: _read(sock, len(DONE)))
        await self._answered()

    async def close(self) -> None:
        """Close the connections; workers that still wait for weights fail."""
        for sock in self.sockets:
            sock.close()
        if self.answer is not None:
            self.answer.cancel()
            await asyncio.gather(self.answer, return_exceptions=True)

    async def _with_all(self, work: Callable[[socket.socket], Coroutine]) -> None:
        """Do ``work`` with all workers at once. If one fails, raise the server's answer if there is one, else
        the connection's error."""
        try:
            async with asyncio.TaskGroup() as group:
                for sock in self.sockets:
                    group.create_task(work(sock))
        except ExceptionGroup as failures:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._answered(), LAST_WORDS)
            raise failures.exceptions[0] from None

    async def _answered(self) -> None:
        assert self.answer is not None, "open comes first"
        await self.answer

    async def _receive(self, listener: socket.socket) -> None:
        """Accept connections, each in a task of its own: a client that is not a worker may stay silent for
        ever."""
        async with asyncio.TaskGroup() as group:
            while True:
                sock, _ = await asyncio.get_running_loop().sock_accept(listener)
                group.create_task(self._greet(sock))

    async def _greet(self, sock: socket.socket) -> None:
        """Keep a connection that sends the nonce; close any other."""
        with suppress(OSError), ExitStack() as stranger:
            stranger.enter_context(sock)
            nonce, workers = HELLO.unpack(await _read(sock, HELLO.size))
            if secrets.compare_digest(nonce, self.nonce):
                stranger.pop_all()
                self.sockets.append(sock)
                self.reached += workers
                if self.reached == self.workers:
                    self.met.set()


async def listen_towards(url: str) -> socket.socket:
    """Return a listening socket at the address by which this machine reaches ``url``, on a free port."""
    server = urlsplit(url)
    default_port = 443 if server.scheme == "https" else 80
    _, writer = await asyncio.open_connection(server.hostname, server.port or default_port)
    family = writer.get_extra_info("socket").family
    host = writer.get_extra_info("sockname")[0]
    writer.close()
    listener = socket.create_server((host, 0), family=family)
    listener.setblocking(False)
    return listener


async def _send(sock: socket.socket, frame: Frame) -> None:
    for part in frame:
        await asyncio.get_running_loop().sock_sendall(sock, part)


async def _read(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = await asyncio.get_running_loop().sock_recv(sock, count - len(data))
        if not part:
            raise ConnectionError("the worker hung up")
        data += part
    return data

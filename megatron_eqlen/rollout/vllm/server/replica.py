"""One vLLM server of a run: its state, and HTTP to it."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
import time
from collections.abc import AsyncGenerator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from megatron_eqlen.rollout.engine import EngineError

logger = logging.getLogger(__name__)

PATIENCE = 30.0
"""Seconds a replica may take to answer a short request: it may be in the middle of a long engine step."""
PATIENCE_ABSENT = 5.0
"""Limit for a replica that is not used: it has nothing to do, and each weight sync asks it again."""
PREEMPTIONS = "vllm:num_preemptions_total"
"""vLLM's counter of requests that were pushed out of the KV cache."""

ReplicaError = (aiohttp.ClientError, OSError)
"""Errors raised here when a replica is dead, dying or silent (timeouts are OSErrors)."""


class Background:
    """An event loop in its own thread, with an HTTP session. Any thread may use and close it."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True, name="vllm-servers")
        self.thread.start()
        self._closed = False
        self._starts = threading.Lock()
        """Protects the loop's end: a coroutine handed over later would never run, and its caller would
        hang."""
        self.session: aiohttp.ClientSession = self.run(self._open())

    def start(self, coroutine: Coroutine) -> Any:
        """Return a concurrent future of the coroutine's result, cancelled if ``close`` comes before its end.
        Raises EngineError after ``close``."""
        with self._starts:
            if not self._closed:
                return asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        coroutine.close()
        raise EngineError("the engine was closed")

    def run(self, coroutine: Coroutine) -> Any:
        return self.start(coroutine).result()

    def close(self) -> None:
        with self._starts:
            self._closed = True
            ending = asyncio.run_coroutine_threadsafe(self._end(), self.loop)
        ending.result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    async def _end(self) -> None:
        """Cancel all coroutines that were started before."""
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self.session.close()

    @staticmethod
    async def _open() -> aiohttp.ClientSession:
        # A kept connection may be closed by the server just as a request goes out on it: that looks like a
        # replica that died.
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None, connect=10),
        )


class ServerReplica:
    """The server at ``url``. Its coroutines raise one of ``ReplicaError`` if it fails to answer."""

    def __init__(self, url: str, io: Background) -> None:
        self.url = url
        self.io = io
        self.alive = False
        self.requests: dict[str, Any] = {}
        """Unfinished requests by id, each with the concurrent future that reads the answer."""
        self.workers = 0
        """Number of its tensor-parallel ranks."""
        self.preemptions = 0.0
        """Last value read of vLLM's counter."""
        self.absence = ""
        """Why the replica is not used; empty while it is used."""
        self.absent_since = 0.0
        """Start of the absence in seconds since 1970."""

    def leave_out(self, why: str) -> None:
        """Stop using the replica; logged once, not at every sync."""
        if why != self.absence:
            logger.warning("%s: left out: %s", self.url, why)
        self.miss(why)

    def miss(self, why: str) -> None:
        """Note why the replica is absent, and since when."""
        if not self.absence:
            self.absent_since = time.time()
        self.alive, self.absence = False, why

    def take_in(self, workers: int) -> None:
        self.alive, self.absence, self.workers = True, "", workers

    def forget(self, request_id: str) -> None:
        """Drop a request: vLLM aborts a request whose connection is closed."""
        self.requests.pop(request_id).cancel()

    async def set_up(self, expected: str | None, setup: list[Any]) -> list[dict[str, int]]:
        """Set each worker's sampling by ``setup`` (``WorkerExtension.eqlen_setup``); returns each worker's
        limits. The weights must be the ``expected`` version (None: any)."""
        async with at_most(PATIENCE_ABSENT if self.absence else PATIENCE):
            version = await self.weight_version()
            if expected not in (None, version):
                raise ConnectionError(f"expected weights {expected!r}, found {version!r}")
            workers = await self.rpc("eqlen_setup", setup)
            if not self.alive:
                await self.new_preemptions()
                await self.rpc("eqlen_counts")
                await self.post("resume")  # a trainer that was killed may have left it paused
            return workers

    async def weight_version(self) -> str:
        found = parsed(await self.get("weight_info"), "weight_info")
        if not isinstance(found, dict) or "weight_version" not in found:
            raise ConnectionError(f"expected a version from /weight_info, found {shortened(str(found))}")
        return found["weight_version"]

    async def new_preemptions(self) -> float:
        """Preemptions since the last call. A counter that is lower than before means that the server was
        restarted."""
        before, self.preemptions = self.preemptions, read_counter(await self.get("metrics"), PREEMPTIONS)
        return self.preemptions - (before if before <= self.preemptions else 0)

    async def rpc(self, method: str, args: list[Any] | None = None) -> list[Any]:
        """Return the answers of ``WorkerExtension.method``, one from each worker."""
        return (await self.post("collective_rpc", {"method": method, "args": args or []}))["results"]

    async def get(self, path: str) -> str:
        async with self.io.session.get(f"{self.url}/{path}") as response:
            await _check_status(response)
            return await response.text()

    async def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        async with self.io.session.post(f"{self.url}/{path}", json=body) as response:
            await _check_status(response)
            text = await response.text()
            return parsed(text, path) if text else None

    async def events(
        self, path: str, body: dict[str, Any], silence: float
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the server-sent events that answer a POST, as long as none is ``silence`` seconds late."""
        timeout = aiohttp.ClientTimeout(total=None, sock_read=silence)
        async with self.io.session.post(f"{self.url}/{path}", json=body, timeout=timeout) as response:
            await _check_status(response)
            try:
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        yield json.loads(line[6:])
            except aiohttp.SocketTimeoutError:
                raise _silent(silence) from None


@asynccontextmanager
async def at_most(seconds: float) -> AsyncGenerator[None, None]:
    """Raise ConnectionError if the block takes longer than ``seconds``."""
    try:
        async with asyncio.timeout(seconds) as limit:  # wait_for may swallow a cancellation (Python 3.11)
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise _silent(seconds) from None


def _silent(seconds: float) -> ConnectionError:
    return ConnectionError(f"silent for {seconds:g} s")


def words(error: BaseException) -> str:
    return str(error) or type(error).__name__


async def _check_status(response: aiohttp.ClientResponse) -> None:
    """Raise ConnectionError with the server's message unless the request succeeded."""
    if response.status != 200:
        text = shortened(await response.text())
        raise ConnectionError(f"HTTP {response.status} from {response.url.path}: {text}")


def parsed(text: str, path: str) -> Any:
    """Return the JSON of an answer. Raises ConnectionError if the text is no JSON."""
    try:
        return json.loads(text)
    except ValueError:
        raise ConnectionError(f"expected JSON from /{path}, found {shortened(text)}") from None


def shortened(text: str) -> str:
    """Return an answer in one line; of a web page its title, since it comes from another kind of server."""
    if re.match(r"\s*<(!doctype|html)", text, re.IGNORECASE):
        title = re.search(r"<title>(.*?)</title>", text, re.IGNORECASE | re.DOTALL)
        return f"a web page ({' '.join(title[1].split()) if title else 'without a title'}): not a vLLM server"
    return " ".join(text.split())[:300]


def read_counter(text: str, name: str) -> float:
    """Return the sum of a counter's lines in Prometheus' text format. Raises EngineError if there are
    none."""
    lines = [line for line in text.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
    if not lines:
        raise EngineError(f"/metrics: expected {name}, found none: was --disable-log-stats given?")
    return sum(float(line.rpartition(" ")[2]) for line in lines)

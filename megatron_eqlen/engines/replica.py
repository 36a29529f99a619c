"""The servers of a run: HTTP to each, calls to all in use, and the handling of one that fails. A replica that
refuses, breaks off, or falls silent is left out until the next weight sync brings it the weights."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from megatron_eqlen.engines.protocol import EngineError
from megatron_eqlen.engines.server.gate import DISOWN, LEASE, OWN, REPLACING, RPC, TRAINER, authorization
from megatron_eqlen.recipe.contents import Contents

logger = logging.getLogger(__name__)

UNTOUCHED = "default"
"""vLLM's name for the version of weights that were loaded at start."""
PATIENCE = 30.0
"""Seconds a replica may take to be set up: it may be in the middle of a long engine step."""
PATIENCE_ABSENT = 5.0
"""Limit for a replica that is not used: it is idle, and each weight sync asks it again."""

AGAIN = 0.5
"""Seconds between two tries of a request that meets a weight update."""
STAY = LEASE / 4
"""Seconds between two signs of life to the servers that a run owns."""


class TakenError(ConnectionError):
    """A server whose owner is another trainer."""


ReplicaError = (aiohttp.ClientError, OSError)
"""Errors raised here when a replica is dead, dying or silent (timeouts are OSErrors)."""
Call = Callable[["Replica"], Coroutine]


class HttpLoop:
    """An event loop in its own thread, with an HTTP session that sends ``headers``. Any thread may use it."""

    def __init__(self, headers: dict[str, str]) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True, name="vllm-servers")
        self.thread.start()
        self._closed = False
        self._starts = threading.Lock()
        """Protects the loop's end: a coroutine handed over later never runs, and its caller would hang."""
        self.headers = headers
        self.session: aiohttp.ClientSession = self.run(session(headers))

    def start(self, coroutine: Coroutine) -> Any:
        """Return a concurrent future of the coroutine's result, or raise EngineError after ``close``."""
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


async def session(headers: Mapping[str, str]) -> aiohttp.ClientSession:
    """Return a session of the running event loop, whose requests have ``headers`` and a connection each."""
    # The server may close a kept connection just as a request goes out: that looks like a dead replica.
    return aiohttp.ClientSession(
        headers=headers,
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=None, connect=10),
    )


@dataclass(eq=False)
class OpenRequest:
    """An unfinished request. Its id may come again after its end, so arrivals belong to this object."""

    request_id: str
    replica: Replica
    forgotten: Callable[[OpenRequest], None]
    """Closes its connection."""
    number: int = -1
    reader: int = 0
    """The process that reads its answer, and the request's number there (``readers``)."""


@dataclass(eq=False)
class Replica:
    """The server at ``url``. Its coroutines raise one of ``ReplicaError`` if it fails to answer."""

    url: str
    io: HttpLoop
    alive: bool = False
    requests: dict[str, OpenRequest] = field(default_factory=dict[str, OpenRequest])
    workers: int = 0
    """Number of its tensor-parallel ranks."""
    stock: str = ""
    """Name of vLLM's own sampler there."""
    absence: str = ""
    """Why the replica is not used; empty while it is used."""
    absent_since: str = ""
    """Time of day at the start of the absence."""
    is_taken: bool = False
    """True if another trainer owned it when it was asked last."""

    def forget(self, request_id: str) -> None:
        """Drop a request that has ended, or is to be aborted."""
        request = self.requests.pop(request_id)
        request.forgotten(request)

    async def set_up(self, untouched: Contents | None) -> list[dict[str, Any]]:
        """Return what each worker says of the engine (``WorkerExtension.eqlen_setup``). With ``untouched``
        the server must hold the weights that it was started with, and these contents."""
        async with at_most(PATIENCE_ABSENT if self.absence else PATIENCE):
            await self._own()
            if untouched is not None:
                held = (await self._json("GET", "weight_info")).get("weight_version")
                if held != UNTOUCHED:
                    raise ConnectionError(f"expected weights {UNTOUCHED!r}, found {held!r}")
                if (await self.rpc("eqlen_weights"))[0] != untouched:
                    raise ConnectionError("expected a server of the same model.path, found other weights")
            workers = await self.rpc("eqlen_setup")
            if not self.alive:
                await self.post("resume")  # a trainer that was killed may have left it paused
            return workers

    async def _own(self) -> None:
        """Become the server's owner; at the start wait for one that has ended without a word."""
        ends = time.monotonic() + (0.0 if self.absence else LEASE + 1)
        self.is_taken = False
        while True:
            try:
                await self.post(OWN[1:])
                return
            except TakenError:
                if time.monotonic() > ends:
                    self.is_taken = True
                    raise
                await asyncio.sleep(0.5)

    async def rpc(self, method: str) -> list[Any]:
        """Return the answers of ``WorkerExtension.method``, one from each worker."""
        return (await self.post(RPC[1:], {"method": method, "args": []}))["results"]

    async def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        return await self._json("POST", path, body)

    async def _json(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Return an answer's JSON object, {} if there is none. Raises ConnectionError for other answers."""
        async with self.io.session.request(method, f"{self.url}/{path}", json=body) as response:
            text = await _text(response)
        try:
            answer = json.loads(text or "{}")
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise ConnectionError(f"expected a JSON object from /{path}, found {_line(text)}")
        return answer


async def events(
    http: aiohttp.ClientSession, url: str, body: dict[str, Any], silence: float
) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the server-sent events that answer a POST, each at most ``silence`` seconds after the last. A
    request that meets a weight update, during which a server takes none, is sent again."""
    timeout, ends = aiohttp.ClientTimeout(total=None, sock_read=silence), time.monotonic() + silence
    try:
        async with AsyncExitStack() as stack:
            while True:
                response = await stack.enter_async_context(http.post(url, json=body, timeout=timeout))
                is_refused = response.status == 409 and REPLACING in await response.text()
                if not is_refused or time.monotonic() > ends:
                    break
                await asyncio.sleep(AGAIN)
            if response.status != 200:
                await _text(response)
            rest = b""
            async for chunk in response.content.iter_any():  # which may hold many events, or none whole
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    # not the empty lines between events, nor ``data: [DONE]`` at the end
                    if line.startswith(b"data: {"):
                        if "error" in (event := msgspec.json.decode(line[6:])):
                            raise ConnectionError(event["error"])
                        yield event
    except aiohttp.SocketTimeoutError:  # before the first event, too
        raise _silent(silence) from None


class ReplicaPool:
    """Replicas at ``urls``; one that is silent for ``silence`` seconds is left out."""

    def __init__(self, urls: Iterable[str], silence: float, trainer: str) -> None:
        self.io = HttpLoop(authorization() | {TRAINER: trainer})
        self.silence = silence
        self.lost: list[str] = []
        """Requests whose replica was left out."""
        self.replicas = [Replica(url.rstrip("/"), self.io) for url in urls]
        self.io.start(self._stay())

    @property
    def alive(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.alive]

    async def _stay(self) -> None:
        """Remain the owner of the servers in use while nothing else is asked of them."""
        while True:
            await asyncio.sleep(STAY)
            staying = [replica.post(OWN[1:]) for replica in self.alive]
            await asyncio.gather(*staying, return_exceptions=True)  # the next call to a lost server notices

    def refuse_taken(self) -> None:
        """Raise EngineError if another trainer owns one of the servers."""
        for replica in self.replicas:
            if replica.is_taken:
                remedy = "end that one, or start servers for this one"
                why = f"{replica.absence}; servers obey one trainer at a time: {remedy}"
                raise EngineError(f"rollout.servers: {replica.url}: {why}")

    def check_any_alive(self) -> None:
        if not self.alive:
            self.refuse_taken()
            absent = "; ".join(f"{r.url}: {r.absence} (since {r.absent_since})" for r in self.replicas)
            remedy = "start them again, and the same command resumes"
            raise EngineError(f"rollout.servers: none is alive of {absent}; {remedy}")

    def post(self, path: str, body: dict[str, Any] | None = None) -> None:
        """Send the same POST to every replica in use at once, and wait for the answers."""
        self.each(path, lambda replica: replica.post(path, body))

    def each(self, what: str, call: Call, replicas: list[Replica] | None = None) -> dict[Replica, Any]:
        """Return the answers of these replicas (default: those in use) to ``call``, see ``settle``."""
        return self.settle(what, self.start(call, replicas))

    def start(self, call: Call, replicas: list[Replica] | None = None) -> dict[Replica, Any]:
        """Start ``call`` for these replicas at once; each fails after ``silence`` seconds."""

        async def limited(replica: Replica) -> Any:
            async with at_most(self.silence):
                return await call(replica)

        return {replica: self.io.start(limited(replica)) for replica in replicas or self.alive}

    def settle(self, what: str, calls: dict[Replica, Any]) -> dict[Replica, Any]:
        """Wait for answers; leave out replicas that give none. Raises EngineError if no replica answered."""
        answers = {}
        for replica, call in calls.items():
            try:
                answers[replica] = call.result()
            except ReplicaError as error:
                self.leave_out(replica, f"{what}: {words(error)}")
        if not answers:
            self.check_any_alive()
        return answers

    def leave_out(self, replica: Replica, why: str) -> None:
        """Stop using a replica; its requests are lost. Logged when the reason is new."""
        if why != replica.absence:
            text = "%s: left out until the next weight sync, %d requests go elsewhere: %s"
            logger.warning(text, replica.url, len(replica.requests), why)
        if not replica.absence:
            replica.absent_since = time.strftime("%H:%M:%S")
        replica.alive, replica.absence = False, why
        for request_id in sorted(replica.requests):
            replica.forget(request_id)
            self.lost.append(request_id)

    def close(self) -> None:
        self.io.run(self._leave())
        self.io.close()

    async def _leave(self) -> None:
        async def leave(replica: Replica) -> None:
            async with at_most(2.0):
                await replica.post(DISOWN[1:])

        await asyncio.gather(*map(leave, self.alive), return_exceptions=True)


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


async def _text(response: aiohttp.ClientResponse) -> str:
    """Return the answer's text. Raises ConnectionError with it unless the request succeeded."""
    text = await response.text()
    if response.status != 200:
        error = TakenError if response.status == 409 else ConnectionError
        raise error(f"HTTP {response.status} from {response.url.path}: {_line(text)}")
    return text


def _line(text: str) -> str:
    return " ".join(text.split())[:300]

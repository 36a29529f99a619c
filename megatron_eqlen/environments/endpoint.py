"""An endpoint as OpenAI's, at which an agent finds the policy for the length of one response.

    agent ── POST BASE_URL/chat/completions ──► Episode ── new messages ──► Agent.step's observation
          ◄─────────── policy's turn ──────────         ◄── text of a turn ──

A request must continue the conversation so far; the same request again, from a client that retries, waits for
the same turn. The key of an episode is in its URL, and is checked before anything else is read.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Mapping
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from megatron_eqlen.environments.tool_calls import ToolError, spoken, tool_calls
from megatron_eqlen.files import shallow_json
from megatron_eqlen.hf.tokenizer import read_arguments

log = logging.getLogger(__name__)

Message = dict[str, Any]

POLL_SECONDS = 0.05
SILENCE = 30.0
"""Seconds that a client may be silent in the middle of a request, or between two."""
LONGEST = 16 * 2**20
"""Bytes of a request."""
STRANGERS = 256
"""Connections without a key at a time; one more closes the oldest."""
USED = {"messages", "tools", "model", "stream", "stream_options"}
ONLY: dict[str, tuple[Any, ...]] = {
    "n": (None, 1), "logprobs": (None, False), "tool_choice": (None, "auto"),
    "response_format": (None, {"type": "text"}),
}  # fmt: skip
"""Values that a request may have; all other keys are ignored."""
MODELS = {"object": "list", "data": [{"id": "policy", "object": "model", "created": 0, "owned_by": "eqlen"}]}
USAGE = dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), 0)  # not known here


class RefusedError(ValueError):
    """A request that cannot be answered. The text is for the agent."""


Reply = tuple[int, str, bytes]
"""Status, content type and body."""


class Request(NamedTuple):
    messages: list[Message]
    tools: list[Message]

    @classmethod
    def read(cls, body: Any) -> Request:
        """Return the request in a JSON body. Raises RefusedError."""
        if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
            raise RefusedError("expected a JSON object with messages")
        for key, values in ONLY.items():
            if body.get(key) not in values:
                raise RefusedError(f"{key}: expected {values[-1]!r} or nothing, found {body[key]!r:.200}")
        tools = body.get("tools") or []
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise RefusedError(f"tools: expected a list of objects, found {tools!r:.200}")
        return cls([_plain(message) for message in body["messages"]], tools)


def _plain(message: Any) -> Message:
    """Return what the chat template reads of a message."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RefusedError(f"messages: expected objects with a role, found {message!r:.200}")
    # Clients send text, null, or a list of parts: ``[{"type": "text", "text": "..."}]``.
    content = message.get("content") or ""
    if isinstance(content, list):
        if not all(isinstance(part, dict) and part.get("type") == "text" for part in content):
            raise RefusedError("messages: expected text, found other content")
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(content, str):
        raise RefusedError(f"messages: expected text, found {content!r:.200}")
    plain: Message = {"role": message["role"], "content": content}
    if message["role"] == "tool" and message.get("tool_call_id"):
        plain["tool_call_id"] = str(message["tool_call_id"])
    # Name and arguments are all that the template renders of a call.
    if calls := message.get("tool_calls"):
        try:
            plain["tool_calls"] = [dict(call["function"]) for call in calls]
        except (KeyError, TypeError, ValueError):
            expected = "expected objects with a function"
            raise RefusedError(f"messages: tool_calls: {expected}, found {calls!r:.200}") from None
    return plain


def as_message(text: str, turn: int, tools: bool) -> Message:
    """Return a turn's text as an assistant's message: thinking apart, and calls of ``tools``, if any."""
    # ``<think>...</think>``, then what is said and called.
    thinking, closed, _ = text.removesuffix(spoken(text)).rpartition("</think>")
    said = spoken(text) if closed else text
    calls = []
    if tools:
        with contextlib.suppress(ToolError):  # the agent sees the text
            calls = list(tool_calls(text))
    # What is said ends where the first call begins.
    if calls:
        said = said.partition("<tool_call>")[0] if "<tool_call>" in said else ""
    message: Message = {"role": "assistant", "content": said.strip() or (None if calls else "")}
    if closed:
        message["reasoning_content"] = thinking.removeprefix("<think>").strip()
    if calls:
        functions = [{"name": call.name, "arguments": json.dumps(call.arguments)} for call in calls]
        message["tool_calls"] = [
            {"id": f"call_{turn}_{number}", "type": "function", "function": function}
            for number, function in enumerate(functions)
        ]
    return message


class Episode:
    """Conversation of one agent: its requests, which the policy's turns answer, and its result."""

    def __init__(self) -> None:
        self.key = secrets.token_urlsafe(16)
        self.requests: list[Request] = []
        self.turns: list[Message] = []
        """Answers to ``requests``; the last one may be missing."""
        self.refused = 0
        self.ended = False
        self.reward: Any = None
        self.error: BaseException | None = None
        self._closed: str | None = None
        self._changed = threading.Condition()

    # ---- the agent's side ----------------------------------------------------------------------------

    def ask(self, body: Any) -> Message:
        """Return the policy's turn that answers a request, once there is one. Raises RefusedError."""
        with self._changed:
            try:
                number = self._number_of(Request.read(body))
            except RefusedError:
                self.refused += 1
                raise
            self._changed.notify_all()
            # The lock is free while this waits for the turn or for the end of the response.
            self._changed.wait_for(lambda: len(self.turns) > number or self._closed is not None)
            if len(self.turns) <= number:
                raise RefusedError(str(self._closed))
            return self.turns[number]

    def end(self, reward: Any = None, error: BaseException | None = None) -> None:
        with self._changed:
            self.ended, self.reward, self.error = True, reward, error
            self._changed.notify_all()

    def _number_of(self, request: Request) -> int:
        # A client that retries sends the same request again.
        if request in self.requests:
            return self.requests.index(request)
        if self._closed is not None:
            raise RefusedError(self._closed)
        if len(self.turns) < len(self.requests):
            raise RefusedError("another request waits for its turn: requests must come one after the other")
        if self.requests:
            self._refuse_changes(request)
        self.requests.append(request)
        return len(self.requests) - 1

    def _refuse_changes(self, request: Request) -> None:
        """Raise RefusedError unless a request continues the conversation."""
        # The last request with our turn must be the beginning of this one.
        before = [*self.requests[-1].messages, _plain(self.turns[-1])]
        for number, message in enumerate(before):
            if number >= len(request.messages) or _compared(message) != _compared(request.messages[number]):
                expected = f"a conversation that goes on as it was, with {message}"
                found = request.messages[number : number + 1]
                raise RefusedError(f"messages[{number}]: expected {expected}, found {found}")
        new = request.messages[len(before) :]
        if not new or any(message["role"] == "assistant" for message in new):
            expected = "new messages after the policy's last turn, none of them its own"
            raise RefusedError(f"messages: expected {expected}")
        if request.tools != self.requests[-1].tools:
            raise RefusedError("tools: expected those of the first request")

    # ---- the environment's side ----------------------------------------------------------------------

    def asked(self) -> list[Message] | None:
        """Return the next request's new messages, once there; None at the agent's end. Raises its error."""
        with self._changed:
            self._changed.wait_for(
                lambda: len(self.requests) > len(self.turns) or self.ended or self._closed is not None
            )
            # A request that came before the agent ended is answered first.
            if len(self.requests) > len(self.turns):
                # Messages of the request before, and the turn that answered it, are known.
                known = len(self.requests[-2].messages) + 1 if self.turns else 0
                calls = (call for turn in self.turns[-1:] for call in turn.get("tool_calls", ()))
                names = {call["id"]: call["function"]["name"] for call in calls}
                return [_named(each, names) for each in self.requests[-1].messages[known:]]
            if self.error is not None:
                raise self.error
            return None

    def answer(self, text: str) -> None:
        """Answer the open request with the text of a turn."""
        with self._changed:
            self.turns.append(as_message(text, len(self.turns), bool(self.requests[-1].tools)))
            self._changed.notify_all()

    def close(self, why: str) -> None:
        """Refuse the open request and all later ones."""
        with self._changed:
            self._closed = self._closed or why
            self._changed.notify_all()

    def wait(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.ended)


def _named(message: Message, names: dict[str, str]) -> Message:
    """Return a tool's message with the name of its call, by id or else in order; templates read no id."""
    if message["role"] != "tool":
        return message
    asked = message.get("tool_call_id")
    named = {key: value for key, value in message.items() if key != "tool_call_id"}
    return named | ({"name": names.pop(asked if asked in names else next(iter(names)))} if names else {})


def _compared(message: Message) -> Any:
    """Return a message without space around the text of a policy's turn and in its calls' JSON."""
    if message["role"] != "assistant":
        return message
    # Clients may write the JSON of arguments anew, with other spaces.
    calls = message.get("tool_calls", ())
    read = [(call.get("name"), read_arguments(call.get("arguments"))) for call in calls]
    return message["content"].strip(), read


class Endpoint:
    """HTTP server of all episodes of this process, on a port of its own of the loopback interface."""

    def __init__(self) -> None:
        self.episodes: dict[str, Episode] = {}
        self.strangers: dict[socket.socket, None] = {}
        """Connections that have shown no key, oldest first."""
        self.ignored: set[str] = set()
        """Keys of requests that have no effect, and that were named."""
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = SILENCE

            def do_POST(self) -> None:
                status, kind, sent = self.answer()
                with contextlib.suppress(ConnectionError):  # a client that has given up
                    self.send_response(status)
                    self.send_header("Content-Type", kind)
                    self.send_header("Content-Length", str(len(sent)))
                    if self.close_connection:
                        self.send_header("Connection", "close")
                    self.end_headers()
                    self.wfile.write(sent)

            do_GET = do_POST

            def answer(self) -> Reply:
                """Return the answer to a request; the connection ends where its body is not read."""
                asks_models = self.command == "GET"
                known = outer.episode(self.path, "models" if asks_models else "chat/completions")
                if isinstance(known, Episode):
                    outer.strangers.pop(self.connection, None)
                    length = self.headers.get("Content-Length", "")
                    fits = re.fullmatch("[0-9]{1,9}", length) and int(length) <= LONGEST
                    if fits and not asks_models:
                        return outer.reply(known, self.rfile.read(int(length)))
                    error = f"Content-Length: expected at most {LONGEST} bytes, found {length!r:.99}"
                    known = _reply(200, MODELS) if asks_models else _error(400, error)
                self.close_connection = True
                return known

            def log_message(self, format: str, *args: Any) -> None: ...

        class Server(ThreadingHTTPServer):
            request_queue_size = 256

            def process_request(self, request: Any, client_address: Any) -> None:
                outer.strangers[request] = None
                # Connections that show no key could otherwise take all threads and file descriptors.
                if len(outer.strangers) > STRANGERS:
                    with contextlib.suppress(KeyError, OSError):  # it has shown a key, or ended
                        oldest = next(iter(outer.strangers))
                        outer.strangers.pop(oldest)
                        oldest.shutdown(socket.SHUT_RDWR)
                super().process_request(request, client_address)

            def shutdown_request(self, request: Any) -> None:
                outer.strangers.pop(request, None)
                super().shutdown_request(request)

            def handle_error(self, request: Any, client_address: Any) -> None:
                if not isinstance(sys.exception(), OSError):  # a client that is silent, or has gone
                    super().handle_error(request, client_address)

        self._server = Server(("127.0.0.1", 0), Handler)
        serve = partial(self._server.serve_forever, POLL_SECONDS)
        threading.Thread(target=serve, name="endpoint", daemon=True).start()

    def open(self, episode: Episode) -> str:
        """Return the base URL of an episode."""
        self.episodes[episode.key] = episode
        return f"http://127.0.0.1:{self._server.server_port}/rollout/{episode.key}/v1"

    def episode(self, path: str, place: str) -> Episode | Reply:
        """Return the episode that a request for ``place`` is for, or the answer if there is none."""
        # ``/rollout/KEY/v1/chat/completions``
        _, rollout, key, below = [*path.split("/", 3), "", "", ""][:4]
        if rollout != "rollout" or below.rstrip("/") != f"v1/{place}":
            return _error(404, f"expected .../v1/{place}, found {path:.200}")
        return self.episodes.get(key) or _error(404, "the rollout has ended")

    def reply(self, episode: Episode, body: bytes) -> Reply:
        """Return the answer to a request. A stream is one chunk: a turn is complete before it is answered."""
        try:
            asked = shallow_json(body)
            self._name_ignored(asked)
            message = episode.ask(asked)
        except ValueError as error:
            return _error(400, str(error))
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        choice = {"index": 0, "finish_reason": reason, "logprobs": None}
        named = {"id": f"chatcmpl-{secrets.token_hex(8)}", "model": asked.get("model")}
        reply = named | {"created": int(time.time()), "usage": USAGE}
        if not asked.get("stream"):
            choices = [choice | {"message": message}]
            return _reply(200, reply | {"object": "chat.completion", "choices": choices})
        # Calls of a stream have indices, as they could come in parts.
        calls = [{"index": number} | call for number, call in enumerate(message.get("tool_calls", ()))]
        choice["delta"] = message | ({"tool_calls": calls} if calls else {})
        chunk = json.dumps(reply | {"object": "chat.completion.chunk", "choices": [choice]})
        return 200, "text/event-stream", f"data: {chunk}\n\ndata: [DONE]\n\n".encode()

    def close(self) -> None:
        for episode in [*self.episodes.values()]:
            episode.close("the harvest has ended")
        self._server.shutdown()
        self._server.server_close()

    def _name_ignored(self, asked: Any) -> None:
        new = {*asked} - USED - {*ONLY} - self.ignored if isinstance(asked, dict) else set[str]()
        if new:
            self.ignored |= new
            names = ", ".join(sorted(new))
            log.warning("requests of agents: %.200s: ignored, the recipe decides", names)


def _error(status: int, text: str) -> Reply:
    return _reply(status, {"error": {"message": text, "type": "invalid_request_error"}})


def _reply(status: int, content: Mapping[str, Any]) -> Reply:
    return status, "application/json", json.dumps(content).encode()

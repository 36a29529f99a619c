"""The secret that a run shares with its servers, the requests that a server answers, and whom it obeys.

Trainer and servers have the secret in ``VLLM_API_KEY`` and send it as OpenAI's clients do. vLLM itself asks
for it only on some paths, and its development endpoints do anything, so ``Gate`` stands before all of them.
Only the owner may change what a server computes: the first trainer that asks, until it ends or is silent for
``LEASE``.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from typing import Any

from megatron_eqlen.files import shallow_json

KEY = "VLLM_API_KEY"
HEALTH = "/health"
"""Needs no secret: batch scripts and load balancers ask whether a server is up."""
RPC = "/collective_rpc"
METHODS = ("eqlen_setup", "eqlen_weights")
"""Methods of ``WorkerExtension``, the only ones that ``RPC`` calls."""
CALLS = [{"method": method, "args": []} for method in METHODS]
OWN, DISOWN = "/own", "/disown"
"""Paths of the gate itself: become the owner or stay it, and end being it."""
PAUSE, RESUME = "/pause", "/resume"
START, UPDATE, FINISH = "/start_weight_update", "/update_weights", "/finish_weight_update"
OWNED = {RPC, PAUSE, RESUME, START, UPDATE, FINISH, OWN, DISOWN, "/init_weight_transfer_engine"}
GENERATES = {"/inference/v1/generate", "/v1/completions"}
SERVED = {HEALTH, "/metrics", "/version", "/v1/models", "/weight_info", *GENERATES, *OWNED}
TRAINER = "eqlen-trainer"
"""Header with a trainer's name, of its own."""
LEASE = 15.0
"""Seconds of silence after which a server has no owner."""
REPLACING = "the weights are being replaced"
"""Answer to a request for tokens during a weight update, 409: it is sent again."""
LONGEST = 32 * 2**20
"""Bytes of a request."""


def authorization() -> dict[str, str]:
    """Return the header with the secret. Raises ValueError if the environment has none."""
    if not os.environ.get(KEY):
        remedy = f'export {KEY}="$(openssl rand -hex 16)" before both are started'
        expected = "a secret in the environment of the trainer and of its servers"
        raise ValueError(f"{KEY}: expected {expected}, found none: {remedy}")
    return {"Authorization": f"Bearer {os.environ[KEY]}"}


class Gate:
    """ASGI middleware that refuses requests without the secret, those that a run does not need, a second
    trainer's, and any for tokens while the weights are being replaced, which the engine would not survive."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.expected = authorization()["Authorization"].encode()
        self.owner, self.seen = "", 0.0
        self.paused = self.updating = False

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] != HEALTH:
            headers = dict(scope["headers"])
            # before the body is read, which costs memory; in constant time, which tells nothing of the secret
            if not secrets.compare_digest(headers.get(b"authorization", b""), self.expected):
                await _answer(send, 401, f"expected the secret of {KEY}")
                return
            if scope["path"] not in SERVED:
                await _answer(send, 404, "not served here")
                return
            body = await _body(receive)
            trainer = headers.get(TRAINER.encode(), b"").decode(errors="replace")
            status, text = self._refusal(scope["path"], trainer, body)
            if status or scope["path"] in (OWN, DISOWN):
                await _answer(send, status or 200, text)
                return
            receive, send = _repeated(body or b"", receive), self._noting(scope["path"], body or b"", send)
        await self.app(scope, receive, send)

    def _refusal(self, path: str, trainer: str, body: bytes | None) -> tuple[int, str]:
        """Return status and text of a refusal; status 0 if there is none."""
        if body is None:
            return 413, f"expected at most {LONGEST} bytes"
        try:
            asked = shallow_json(body) if body else {}
        except ValueError as error:
            return 400, f"expected JSON: {error}"
        # any client with the secret may ask for tokens, whichever trainer owns the server
        if path in GENERATES:
            return (409, REPLACING) if self.updating else (0, "")
        if path not in OWNED:
            return 0, ""
        if not trainer:
            return 400, f"expected the header {TRAINER}, the name of a trainer"
        # the first trainer to ask owns the server; after a silent owner, the next one
        now = time.monotonic()
        if self.owner not in ("", trainer) and now < self.seen + LEASE:
            return 409, f"used by {self.owner}"
        self.owner, self.seen = "" if path == DISOWN else trainer, now
        if path == RPC and (not isinstance(asked, dict) or asked not in CALLS):
            return 403, f"expected one of {', '.join(METHODS)}, without arguments"
        # the engine does not survive another order
        fits = {START: self.paused and not self.updating, RESUME: not self.updating}
        if not (fits | dict.fromkeys((UPDATE, FINISH), self.updating)).get(path, True):
            return 409, f"{path}: expected {', '.join((PAUSE, START, UPDATE, FINISH, RESUME))} in this order"
        return 0, ""

    def _noting(self, path: str, body: bytes, send: Any) -> Any:
        """Return ``send`` that notes the state which an answer reports."""
        # `eqlen_setup` ends an update that a killed trainer has left open; `eqlen_weights` only reads a name
        ends = path == FINISH or (path == RPC and b"eqlen_setup" in body)

        async def noting(message: dict[str, Any]) -> None:
            if message.get("status") == 200:
                self.paused = path == PAUSE or (self.paused and path != RESUME)
                self.updating = path == START or (self.updating and not ends)
            await send(message)

        return noting


async def _answer(send: Any, status: int, text: str) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps({"error": text} if text else {}).encode()})


async def _body(receive: Any) -> bytes | None:
    """Return a request's body; None if it is too long."""
    parts, size, more = [], 0, True
    while more:
        message = await receive()
        parts.append(message.get("body", b""))
        size, more = size + len(parts[-1]), message.get("more_body", False)
        if size > LONGEST:
            return None
    return b"".join(parts)


def _repeated(body: bytes, receive: Any) -> Any:
    """Return a ``receive`` that gives a body again that was read."""
    parts = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> dict[str, Any]:
        return parts.pop() if parts else await receive()

    return again

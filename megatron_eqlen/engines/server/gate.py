"""The secret that a run shares with its servers, and the requests that a server answers.

Trainer and servers have the secret in ``VLLM_API_KEY`` and send it as OpenAI's clients do. vLLM itself asks
for it only on some paths, and its development endpoints do anything: ``Gate`` stands before all of them.
"""

from __future__ import annotations

import json
import os
import secrets
from typing import Any

KEY = "VLLM_API_KEY"
HEALTH = "/health"
"""Needs no secret: batch scripts and load balancers ask whether a server is up."""
RPC = "/collective_rpc"
METHODS = ("eqlen_setup", "eqlen_weights")
"""Methods of ``WorkerExtension``, the only ones that ``RPC`` calls."""
SERVED = {
    *(HEALTH, RPC, "/metrics", "/version"),
    *("/inference/v1/generate", "/v1/models", "/v1/completions", "/v1/chat/completions"),
    *("/pause", "/resume", "/reset_prefix_cache", "/weight_info"),
    *("/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update"),
}


def authorization() -> dict[str, str]:
    """Return the header with the secret. Raises ValueError if the environment has none."""
    if not os.environ.get(KEY):
        raise ValueError(
            f"{KEY}: expected a secret in the environment of the trainer and of its servers, found none: "
            f'export {KEY}="$(openssl rand -hex 16)" before both are started'
        )
    return {"Authorization": f"Bearer {os.environ[KEY]}"}


class Gate:
    """ASGI middleware that refuses requests without the secret, and those that a run does not need."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.expected = authorization()["Authorization"].encode()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close"})
            return
        if scope["type"] == "http" and scope["path"] != HEALTH:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not secrets.compare_digest(given, self.expected):
                await _refuse(send, 401, f"expected the secret of {KEY}")
                return
            if scope["path"] not in SERVED:
                await _refuse(send, 404, "not served here")
                return
            if scope["path"] == RPC:
                body = await _body(receive)
                if _method(body) not in METHODS:
                    await _refuse(send, 403, f"expected one of {', '.join(METHODS)}")
                    return
                receive = _repeated(body, receive)
        await self.app(scope, receive, send)


async def _refuse(send: Any, status: int, text: str) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps({"error": text}).encode()})


async def _body(receive: Any) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body


def _method(body: bytes) -> Any:
    """Return the method of a call as vLLM reads it; None if it cannot be read."""
    try:
        asked = json.loads(body)
    except ValueError:
        return None
    return asked.get("method") if isinstance(asked, dict) else None


def _repeated(body: bytes, receive: Any) -> Any:
    """Return a ``receive`` that gives a body again that was read."""
    parts = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> dict[str, Any]:
        return parts.pop() if parts else await receive()

    return again

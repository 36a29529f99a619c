"""HTTP of a server towards those who do not have its secret: they keep neither memory nor a connection."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

SILENCE = 30.0
"""Seconds in which a connection must bring the head of its request."""


class Impatient(H11Protocol):
    """uvicorn's HTTP that bounds a head's length, as its ``httptools`` does not, and here its time."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self.loop.call_later(SILENCE, self.end_silence)

    def end_silence(self) -> None:
        if self.cycle is None:
            self.transport.close()


SETTINGS: dict[str, Any] = {"http": Impatient, "ws": "none", "headers": [("connection", "close")]}
"""uvicorn's, for one request a connection and no websockets."""

"""Routes as columns of a record: bytes, and shape and type of a token's row, for example ``48x8:uint8``."""

from __future__ import annotations

from typing import cast

import numpy as np

from megatron_eqlen.types import Placeholder, Routes


def route_name(routes: Routes | None) -> str | None:
    """Return shape and type of a row."""
    return None if routes is None else f"{'x'.join(map(str, routes.shape[1:]))}:{routes.dtype}"


def as_bytes(routes: Routes | None) -> np.ndarray | None:
    """Return the routes as [L * bytes of a row] uint8."""
    return None if routes is None else np.ascontiguousarray(routes).reshape(-1).view(np.uint8)


def from_bytes(name: str | None, data: np.ndarray | None) -> Routes | None:
    """Return routes as a view of ``data``, the inverse of ``as_bytes``."""
    if name is None or data is None:
        return None
    row, dtype = _parsed(name)
    return data.view(dtype).reshape(-1, *row)


def unread(name: str | None, length: int) -> Routes | None:
    """Return a placeholder for routes that were not read."""
    if name is None:
        return None
    row, dtype = _parsed(name)
    return cast(Routes, Placeholder(length, row, dtype))


def _parsed(name: str) -> tuple[tuple[int, ...], str]:
    row, dtype = name.split(":")
    return tuple(map(int, row.split("x"))), dtype

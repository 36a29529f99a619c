"""Handlers for worker pools, which a test directs through its items."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def make_handler(log: str = "") -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return a handler that answers with the item's ``name``, once it has done what ``do`` says; it notes in
    the file ``log`` which items began, and in which process."""

    def handle(item: dict[str, Any]) -> dict[str, Any]:
        if log:
            with open(log, "a", encoding="utf-8") as file:
                file.write(f"{item['name']} {os.getpid()}\n")
        what, _, path = item.get("do", "").partition(" ")
        if what == "die":
            os._exit(1)
        if what == "die-once" and not Path(path).exists():
            Path(path).touch()
            os._exit(1)
        if what == "raise":
            raise ValueError(item["name"])
        while what == "loop" or (what == "wait" and not Path(path).exists()):
            time.sleep(0.005) if what == "wait" else None
        return {"name": item["name"]}

    return handle

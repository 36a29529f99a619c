"""vLLM servers on this machine."""

from __future__ import annotations

import socket
import time
import urllib.error
import urllib.request
from typing import Protocol

ENVIRON = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""Environment: several servers on one machine must not bind their threads to the same cores."""


class Process(Protocol):
    def poll(self) -> int | None: ...
    def kill(self) -> None: ...


HELD: list[socket.socket] = []
"""Sockets whose ports are taken."""

STARTED: dict[str, Process] = {}
"""Servers, by URL, that run until the last test of a group of files has ended."""


def stop_all() -> None:
    """Kill the servers of the group of files that has ended."""
    while STARTED:
        STARTED.popitem()[1].kill()


def wait_until_up(url: str, process: Process) -> None:
    """Wait until the server is up. Raises RuntimeError if it stops instead."""
    while process.poll() is None:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5)
            return
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            time.sleep(0.5)
    raise RuntimeError(f"the server of {url} stopped: {getattr(process, 'stderr', None)}")


def free_ports(count: int) -> list[int]:
    """Return ports at which servers of this process's tests can listen. It holds them until it ends: the
    kernel gives a free port to the next that asks, long before a server has loaded its model."""
    for _ in range(count):
        held = socket.socket()
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # like a server, which may bind it then
        held.bind(("127.0.0.1", 0))
        HELD.append(held)
    return [held.getsockname()[1] for held in HELD[-count:]]

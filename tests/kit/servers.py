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
    raise RuntimeError(f"the server of {url} stopped")


def free_ports(count: int) -> list[int]:
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports

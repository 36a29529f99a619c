"""vLLM servers on this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from megatron_eqlen.processes.lifeline import named

ENVIRON = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""Environment: several servers on one machine must not bind their threads to the same cores."""


class Process(Protocol):
    def poll(self) -> int | None: ...
    def kill(self) -> None: ...


STARTED: list[Process] = []
"""Servers that run until the last test of a group of files has ended."""


def stop_all() -> None:
    """Kill the servers of the group of files that has ended."""
    while STARTED:
        STARTED.pop().kill()


def start(
    command: Sequence[str | Path], environ: Mapping[str, str], cwd: Path | None = None
) -> subprocess.Popen:
    """Start a silent server that dies with this process."""
    return subprocess.Popen(
        command,
        env=os.environ | named() | ENVIRON | dict(environ),
        cwd=cwd,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def wait_until_up(url: str, process: Process) -> None:
    """Wait until the server is up. Raises RuntimeError if it stops instead."""
    while process.poll() is None:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5)
            return
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            time.sleep(0.5)
    raise RuntimeError(f"the server of {url} stopped")


def stop(process: subprocess.Popen) -> None:
    """Kill a server; its engine dies with it."""
    process.kill()
    process.wait()


def free_ports(count: int) -> list[int]:
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports

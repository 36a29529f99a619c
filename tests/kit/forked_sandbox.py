"""A sandbox whose zygote is a fork of this process, with all that a test has changed in it."""

from __future__ import annotations

import json
import os
import socket
from typing import Any
from unittest.mock import patch

from megatron_eqlen.graders.sandbox.client import Sandbox
from megatron_eqlen.graders.sandbox.program import Isolation
from megatron_eqlen.graders.sandbox.zygote import serve

SPAWN = os.posix_spawn


def forked(isolation: Isolation, python: str = "") -> Sandbox:
    with patch.object(os, "posix_spawn", _fork):
        return Sandbox(isolation, python)


def _fork(
    python: str, arguments: list[str], environment: Any, file_actions: list[tuple[int, int, int]]
) -> int:
    if (pid := os.fork()) == 0:
        os.posix_spawn = SPAWN
        *_, isolation, worker = arguments
        connection = socket.socket(fileno=os.dup(file_actions[0][1]))
        serve(connection, Isolation(**json.loads(isolation)), int(worker))
    return pid

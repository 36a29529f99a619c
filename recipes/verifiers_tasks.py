"""Environments of the package ``verifiers``, played by a worker in the virtual environment that has it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Any, ClassVar

from megatron_eqlen.environments.agent import Agent
from megatron_eqlen.environments.environment import LostError
from megatron_eqlen.processes import lifeline
from megatron_eqlen.types import Prompt

PLAY = f"{__name__}:play"
WORKER = Path(__file__).with_name("verifiers_worker.py")


class VerifiersTask(Agent):
    """Plays ``prompt.gold``, a task, in the worker. ``python``: interpreter that has verifiers; ``config``:
    JSON of verifiers' environment."""

    worker: ClassVar[_Worker | None] = None
    """Shared by all; there is one from ``start`` to ``end``."""

    def __init__(self, prompt: Prompt, seed: int, python: str, config: str, tools: str | None = None) -> None:
        super().__init__(prompt, seed, PLAY, tools)

    @classmethod
    def start(cls, python: str, config: str, tools: str | None = None) -> None:
        super().start(function=PLAY)
        if cls.worker is None:
            cls.worker = _Worker(python, config)
            cls.worker.ask({})

    @classmethod
    def end(cls) -> None:
        if cls.worker is not None:
            cls.worker.close()
            cls.worker = None
        super().end()


def play(base_url: str, prompt: Prompt, seed: int) -> float:
    """Play an episode. Raises RuntimeError where it fails, LostError where its worker has ended."""
    assert VerifiersTask.worker is not None
    answer = VerifiersTask.worker.ask({"base_url": base_url, "task": prompt.gold})
    if "error" in answer:
        raise RuntimeError(f"verifiers: {answer['error']}")
    return answer["reward"]


def ungraded(answer: str) -> float:
    """Grade nothing, as the ``grader`` of a data source of tasks: an episode brings its reward."""
    return 0.0


class _Worker:
    """Process that plays all episodes of an environment, each over a connection of its own. It ends with this
    process, however that ends."""

    def __init__(self, python: str, config: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="eqlen-")  # of this user alone
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(address := f"{self._folder.name}/worker")
            listening.listen(1024)
            self._address = address
            self._process = subprocess.Popen(
                [python, "-P", str(WORKER), config],
                stdin=listening.fileno(),
                env=os.environ | lifeline.named(),
                start_new_session=True,
            )

    def ask(self, episode: dict[str, str]) -> dict[str, Any]:
        """Return the reward of an episode, or its error; nothing, once the worker is ready, for no episode.
        Raises LostError if the worker has ended."""
        line = b""
        with contextlib.suppress(ConnectionError, FileNotFoundError), socket.socket(socket.AF_UNIX) as link:
            link.connect(self._address)
            link.sendall(json.dumps(episode).encode() + b"\n")
            line = link.makefile("rb").readline()
        if not line:
            status = self._process.wait()
            raise LostError(f"verifiers: the worker ended with status {status}: {self._process.args}")
        return json.loads(line)

    def close(self) -> None:
        """End the worker, with all that it plays."""
        self._process.terminate()
        self._process.wait()
        self._folder.cleanup()

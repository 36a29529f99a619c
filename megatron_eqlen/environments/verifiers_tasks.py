"""Environments of the package ``verifiers``, played by a worker in the virtual environment that has it."""

from __future__ import annotations

import itertools
import json
import subprocess
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from megatron_eqlen.environments.agent import Agent
from megatron_eqlen.types import Prompt

PLAY = f"{__name__}:play"
WORKER = Path(__file__).with_name("verifiers_worker.py")


class VerifiersTask(Agent):
    """Plays ``prompt.gold``, a task, in the worker. ``python``: interpreter that has verifiers; ``config``:
    JSON of verifiers' environment."""

    def __init__(self, prompt: Prompt, seed: int, python: str, config: str, tools: str | None = None) -> None:
        super().__init__(prompt, seed, PLAY, tools, python=python, config=config)

    @classmethod
    def start(cls, **options: Any) -> None:
        super().start(function=PLAY, **options)
        _worker(options["python"], options["config"])

    @classmethod
    def end(cls) -> None:
        while _WORKERS:
            _WORKERS.popitem()[1].close()
        super().end()


def play(base_url: str, prompt: Prompt, seed: int, python: str, config: str) -> float:
    """Play an episode. Raises RuntimeError where it fails."""
    return _worker(python, config).play(base_url, prompt.gold).result()


def ungraded(answer: str) -> float:
    """Grade nothing, as the ``grader`` of a data source of tasks: an episode brings its reward."""
    return 0.0


def _worker(python: str, config: str) -> _Worker:
    if (python, config) not in _WORKERS:
        _WORKERS[python, config] = _Worker(python, config)
    return _WORKERS[python, config]


class _Worker:
    """Process that plays all episodes of an environment. It ends with this one, whose pipe it reads."""

    def __init__(self, python: str, config: str) -> None:
        self._process = subprocess.Popen(
            [python, "-P", str(WORKER), config],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self._numbers = itertools.count()
        self._open: dict[int, Future[float]] = {}
        self._lock = threading.Lock()
        threading.Thread(target=self._read, name="verifiers", daemon=True).start()

    def play(self, base_url: str, task: str) -> Future[float]:
        assert self._process.stdin is not None
        with self._lock:
            number, future = next(self._numbers), Future[float]()
            self._open[number] = future
            self._process.stdin.write(json.dumps({"id": number, "base_url": base_url, "task": task}) + "\n")
        return future

    def close(self) -> None:
        """End the worker, with all that it plays."""
        self._process.kill()
        self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            answer: dict[str, Any] = json.loads(line)
            future = self._open.pop(answer["id"])
            if "reward" in answer:
                future.set_result(answer["reward"])
            else:
                future.set_exception(RuntimeError(f"verifiers: {answer['error']}"))
        with self._lock:
            for future in self._open.values():
                future.set_exception(RuntimeError(f"verifiers: the worker ended ({self._process.wait()})"))


_WORKERS: dict[tuple[str, str], _Worker] = {}

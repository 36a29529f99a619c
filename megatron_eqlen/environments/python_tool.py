"""A Python tool: cells that run in the sandbox of the code grader and share their names.

The state is the list of cells that have run; each call runs them all again, in a new process. So a copy is a
copy of the list, and nothing of one episode reaches another. Cells must not depend on the clock.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from queue import Empty, LifoQueue
from threading import Lock
from typing import Any, Literal

from megatron_eqlen.environments.tool_calls import ToolEnvironment, schema
from megatron_eqlen.rewards.sandbox.client import Execution, Sandbox
from megatron_eqlen.rewards.sandbox.interpreter import find_python
from megatron_eqlen.rewards.sandbox.probe import required_isolation
from megatron_eqlen.rewards.sandbox.program import Limits
from megatron_eqlen.types import Prompt

Place = tuple[Literal["strict", "best_effort"], str]
"""Isolation, and the interpreter."""
RUN_CELLS = """
import ast, contextlib, io, random, sys, traceback
random.seed(0)
names = {{"__name__": "__main__"}}
def run(cell):
    tree = ast.parse(cell, "<cell>")
    shown = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<cell>", "exec"), names)
    if shown is not None:
        value = eval(compile(ast.Expression(shown.value), "<cell>", "eval"), names)
        if value is not None:
            print(repr(value))
for cell in {before!r}:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(BaseException):
        run(cell)
try:
    run({cell!r})
except BaseException as error:
    print("".join(traceback.format_exception_only(error)).strip())
"""


class PythonTool(ToolEnvironment):
    """Runs cells."""

    name, argument = "python", "code"
    tools = (
        schema(
            name,
            "Run Python code. Names stay defined. Returns what it prints and the last expression's value.",
            argument,
        ),
    )

    def __init__(
        self,
        prompt: Prompt,
        seed: int,
        timeout: float = 5.0,
        memory_mb: int = 512,
        longest_output: int = 2000,
        sandbox: Literal["strict", "best_effort"] = "strict",
        python: str = "3.11",
    ) -> None:
        """``timeout``: seconds of CPU that all cells may take together. ``longest_output``: characters that
        the policy sees; the middle of a longer output is left out."""
        self.limits = Limits(timeout, 4 * timeout + 2, memory_mb, output_bytes=1 << 20)
        self.longest_output = longest_output
        self.place: Place = (sandbox, python)
        self.cells: tuple[str, ...] = ()

    def run(self, text: str) -> str:
        program = RUN_CELLS.format(before=list(self.cells), cell=text)
        run = _sandboxes(self.place).run(program, self.limits)
        if run.status != "finished":
            return self._short(f"{run.stdout}\nerror: {run.status.replace('_', ' ')}".strip())
        self.cells += (text,)
        return self._short(run.stdout.rstrip() or "(no output)")

    @classmethod
    def start(cls, **options: Any) -> None:
        _sandboxes((options.get("sandbox", "strict"), options.get("python", "3.11")))

    @classmethod
    def end(cls) -> None:
        while _POOLS:
            _POOLS.popitem()[1].close()

    def fork(self) -> PythonTool:
        return copy.copy(self)  # cells are a tuple

    def _short(self, text: str) -> str:
        if len(text) <= self.longest_output:
            return text
        half = self.longest_output // 2
        return f"{text[:half]}\n... ({len(text) - 2 * half} characters)\n{text[-half:]}"


@dataclass
class _Sandboxes:
    """Sandboxes that wait for a program; more are started where all are at work."""

    mode: Literal["strict", "best_effort"]
    python: str

    def __post_init__(self) -> None:
        self.python = find_python(self.python)
        self.isolation = required_isolation(self.mode, self.python)
        self.idle: LifoQueue[Sandbox] = LifoQueue()

    def run(self, program: str, limits: Limits) -> Execution:
        try:
            sandbox = self.idle.get_nowait()
        except Empty:
            sandbox = Sandbox(self.isolation, self.python)
        try:
            result = sandbox.run(program, "", limits)
        except BaseException:
            sandbox.close()
            raise
        self.idle.put(sandbox)
        return result

    def close(self) -> None:
        while not self.idle.empty():
            self.idle.get().close()


_POOLS: dict[Place, _Sandboxes] = {}
_LOCK = Lock()


def _sandboxes(place: Place) -> _Sandboxes:
    with _LOCK:
        if place not in _POOLS:
            _POOLS[place] = _Sandboxes(*place)
        return _POOLS[place]

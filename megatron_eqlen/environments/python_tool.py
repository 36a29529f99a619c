"""A Python tool: cells that run in the sandbox of the code grader and share their names.

The state is the list of cells that have run; each call runs them all again, in a new process. So a copy is a
copy of the list, and nothing of one episode reaches another. Random numbers, addresses and process ids are
the same in each process. Cells must not depend on the clock.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, Literal

from megatron_eqlen.environments.environment import require_limits
from megatron_eqlen.environments.tool_calls import ToolEnvironment, tool
from megatron_eqlen.graders.sandbox.client import Sandbox, SandboxPool
from megatron_eqlen.graders.sandbox.probe import find_python, required_isolation
from megatron_eqlen.graders.sandbox.program import Limits
from megatron_eqlen.types import Prompt

Mode = Literal["strict", "best_effort"]
RUN_CELLS = """
import ast, contextlib, os, random, sys, traceback, types
def seed(self, a=None, version=2, own=random.Random.seed):
    own(self, draw.getrandbits(128) if a is None else a, version)
draw = random.Random(0)
os.urandom = os.getrandom = random._urandom = lambda size, flags=0: draw.randbytes(size)
random.Random.seed = seed
random.seed = random._inst.seed
random.seed(0)
if "numpy" in sys.modules:
    sys.modules["numpy"].random.seed(0)
# the end of a process would be no cell's answer
os._exit = sys.exit
os.getpid = os.getppid = os.getuid = os.geteuid = lambda: 2
sys.stderr = sys.stdout
# a cell that closes it would end all later ones
sys.stdout.close = lambda: None
# where unittest, doctest, timeit and pickle look for names
main = sys.modules["__main__"] = types.ModuleType("__main__")
names = main.__dict__
def run(cell):
    tree = ast.parse(cell, "<cell>")
    shown = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<cell>", "exec"), names)
    if shown is not None:
        value = eval(compile(ast.Expression(shown.value), "<cell>", "eval"), names)
        if value is not None:
            print(repr(value))
for cell in {before!r}:
    with contextlib.suppress(BaseException):
        run(cell)
    # only what the last cell prints is read
    for stream in (sys.stdout, sys.__stdout__):
        with contextlib.suppress(Exception):
            stream.flush()
    os.ftruncate(1, 0)
    os.lseek(1, 0, os.SEEK_SET)
try:
    run({cell!r})
except BaseException as error:
    print("".join(traceback.format_exception_only(error)).strip())
"""


class PythonTool(ToolEnvironment):
    most_calls = 1

    def __init__(
        self,
        prompt: Prompt,
        seed: int,
        timeout: float = 5.0,
        memory_mb: int = 512,
        longest_output: int = 2000,
        sandbox: Mode = "strict",
        python: str = "3.11",
    ) -> None:
        """``timeout``: CPU seconds for all cells. ``longest_output``: characters; the middle is cut out."""
        # Seconds of CPU, and four times as many and two on the clock.
        self.limits = Limits(timeout, 4 * timeout + 2, memory_mb, output_bytes=1 << 20)
        self.longest_output = longest_output
        self.place: tuple[Mode, str] = sandbox, python
        self.cells: tuple[str, ...] = ()

    @tool
    def python(self, code: str) -> str:
        """Run Python code. Names stay defined. Returns what it prints and the last expression's value."""
        program = RUN_CELLS.format(before=list(self.cells), cell=code)
        run = _pool(*self.place).run(lambda sandbox: sandbox.run(program, "", self.limits))
        # A cell that was ended is forgotten: run again, it would end every later call, too.
        if run.status != "finished":
            return self._short(f"{run.stdout}\nerror: {run.status.replace('_', ' ')}".strip())
        # A cell that raised stays: names that it defined before are there.
        self.cells += (code,)
        return self._short(run.stdout.rstrip() or "(no output)")

    def save(self, place: Path) -> str:
        return json.dumps(self.cells)

    def load(self, text: str, place: Path) -> None:
        self.cells = tuple(json.loads(text))

    @classmethod
    def start(cls, **options: Any) -> None:
        require_limits(options, "timeout", "memory_mb", "longest_output")
        _pool(options.get("sandbox", "strict"), options.get("python", "3.11"))

    @classmethod
    def end(cls) -> None:
        _pool.cache_clear()

    def _short(self, text: str) -> str:
        if len(text) <= self.longest_output:
            return text
        half = self.longest_output // 2
        return f"{text[:half]}\n... ({len(text) - 2 * half} characters)\n{text[len(text) - half :]}"


@cache
def _pool(mode: Mode, python: str) -> SandboxPool:
    python = find_python(python)
    isolation = required_isolation(mode, python)
    return SandboxPool(lambda: Sandbox(isolation, python))

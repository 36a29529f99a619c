"""Imports of a command before it needs them: they cost seconds of every start."""

from __future__ import annotations

import subprocess
import sys

from tests.kit import ROOT
from tests.kit.jobs import run


def imported_by(modules: list[str]) -> set[str]:
    """Return the packages that a fresh interpreter has loaded after importing ``modules``."""
    statements = [f"import {module}" for module in modules]
    script = "\n".join(
        [*statements, "import sys", "print(*(name for name in sys.modules if '.' not in name))"]
    )
    command = [sys.executable, "-c", script]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return set(ended.stdout.splitlines()[-1].split())


def test_only_a_start_of_vllm_imports_it_megatron_imports_no_compiler_and_nothing_audio():
    """The jobs of all tests are forked from a process that has noted which of its imports brought these."""
    job = run("-c", "from tests.kit import zygote; print(*zygote.brought.values(), sep='|')")
    vllm, compiler, audio = job.stdout.strip().split("|")
    assert vllm.startswith(("megatron_eqlen.engines.", "tests.engine."))
    assert compiler.startswith((vllm, "transformers.", "tests."))
    assert audio == ""


def test_commands_that_compute_nothing_import_no_torch():
    modules = [
        "megatron_eqlen.cli",
        "megatron_eqlen.report.page",
        "megatron_eqlen.report.text",
        "megatron_eqlen.experiments.compare",
        "megatron_eqlen.experiments.figures",
        "megatron_eqlen.harvest.harvest",
        "megatron_eqlen.hf.config",
        "megatron_eqlen.plan",
    ]
    assert not imported_by(modules) & {"torch", "vllm", "transformers", "megatron", "matplotlib"}


def test_the_graders_for_other_trainers_import_nothing_that_trains():
    tests = '{"inputs": ["3\\n"], "outputs": ["4\\n"]}'
    script = f"""
import sys
from megatron_eqlen.graders import grade_math, grade_program
program = "```python\\nprint(int(input()) + 1)\\n```"
print(grade_math("so \\\\boxed{{5}}", 5).reward, grade_program(program, {tests!r}).reward)
print(*sorted(name for name in sys.modules if name.count(".") < 2))
"""
    command = [sys.executable, "-c", script]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    rewards, modules = ended.stdout.splitlines()
    assert rewards == "1.0 1.0"
    loaded = set(modules.split())
    assert not loaded & {
        "torch",
        "vllm",
        "transformers",
        "megatron",
        "pydantic",
        "pyarrow",
        "huggingface_hub",
    }
    ours = {name.partition(".")[2] for name in loaded if name.startswith("megatron_eqlen.")}
    assert ours <= {"graders", "types", "tokens", "files", "processes"}

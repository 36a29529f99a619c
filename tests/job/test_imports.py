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


def test_only_a_start_of_vllm_imports_it():
    """The jobs of all tests are forked from a process that has noted which of its imports brought vLLM."""
    job = run("-c", "from tests.kit import zygote; print(zygote.brought_vllm)")
    assert job.stdout.startswith(("vllm.", "tests.engine."))


def test_commands_that_compute_nothing_import_no_torch():
    modules = [
        "megatron_eqlen.cli",
        "megatron_eqlen.report.page",
        "megatron_eqlen.report.text",
        "megatron_eqlen.report.compare",
        "megatron_eqlen.report.figures",
        "megatron_eqlen.rollout.harvest",
        "megatron_eqlen.hf.config",
        "megatron_eqlen.plan",
    ]
    assert not imported_by(modules) & {"torch", "vllm", "transformers", "megatron", "matplotlib"}

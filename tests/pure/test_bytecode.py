"""Compiled modules are kept where the environment forbids to keep them beside the sources."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import os, sys
from megatron_eqlen.processes.quiet import keep_bytecode
sys.prefix = os.environ["PLACE"]
keep_bytecode()
import imported_here
print(os.environ.get("PYTHONDONTWRITEBYTECODE"), os.environ.get("PYTHONPYCACHEPREFIX"))
"""


@pytest.mark.parametrize("forbidden", [True, False])
def test_what_is_compiled_is_kept_where_the_shell_forbids_it_beside_sources(forbidden, tmp_path):
    (tmp_path / "imported_here.py").write_text("x = 1\n")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environ |= {"PLACE": str(tmp_path), "PYTHONPATH": str(tmp_path)}
    environ |= {"PYTHONDONTWRITEBYTECODE": "1"} if forbidden else {}
    said = subprocess.check_output([sys.executable, "-c", SCRIPT], env=environ, text=True).split()
    assert said == ["None", str(tmp_path / "bytecode") if forbidden else "None"]
    kept = [path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob("imported_here*.pyc")]
    assert kept == ["bytecode" if forbidden else "__pycache__"]

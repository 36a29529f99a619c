"""The notebook of the documentation runs as it stands."""

import json
import shutil
import subprocess
import sys

import pytest

from tests.kit import ROOT
from tests.kit.marks import EACH_WEEK

NOTEBOOK = "docs/first_run.ipynb"


@EACH_WEEK
@pytest.mark.slow
def test_the_notebook_trains_draws_and_compares(tmp_path):
    ignored = shutil.ignore_patterns(".*", "runs", "__pycache__", "site")
    shutil.copytree(ROOT, copy := tmp_path / "copy", ignore=ignored)
    command = [sys.executable, "tools/run_notebook.py", NOTEBOOK, "--write"]
    ran = subprocess.run(command, cwd=copy, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert [*map(said, cells(copy / NOTEBOOK))] == [*map(said, cells(ROOT / NOTEBOOK))], "as many outputs"
    for run in ("pairs", "brief", "groups"):
        assert (copy / f"runs/first/{run}/evaluation/after.json").is_file()
        assert f"runs/first/{run}/report.html" in ran.stdout


def test_the_notebook_shows_what_its_cells_print():
    shown = cells(ROOT / NOTEBOOK)
    assert [bool(said(cell)) for cell in shown] == [False, *[True] * (len(shown) - 1)]
    assert len((ROOT / NOTEBOOK).read_bytes()) < 20_000


def cells(path):
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def said(cell):
    return [output["output_type"] for output in cell["outputs"]]

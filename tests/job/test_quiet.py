"""Messages on the screen: none of libraries unless asked for, and the command to run first."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from megatron_eqlen.cli.__main__ import main
from tests.kit import ROOT

NOISE = """
from megatron_eqlen.processes.quiet import quiet
quiet()
import logging, torch, torch.distributed
import torch._library.triton
hasattr(torch.distributed.reduce_op, "SUM")
logging.getLogger("torch._library.triton").warning("Triton not available")
logging.getLogger("vllm.triton_utils.importing").warning("no CPU backend")
logging.getLogger("megatron.core.distributed.distributed_data_parallel").warning("no full_param_layout")
import warnings
compile(r"'\\-'", "a library", "exec")
warnings.warn("MimoModelConfig is experimental and still under active development.", UserWarning)
import tempfile
import torch.distributed.checkpoint as checkpoint
with tempfile.TemporaryDirectory() as folder:
    checkpoint.save({"weight": torch.zeros(1)}, checkpoint.FileSystemWriter(folder))
    checkpoint.load({"weight": torch.ones(1)}, checkpoint.FileSystemReader(folder))
from huggingface_hub.utils import are_progress_bars_disabled
if not are_progress_bars_disabled():
    print("progress bars")
"""


@pytest.mark.parametrize(("environ", "silent"), [({}, True), ({"EQLEN_VERBOSE": "1"}, False)])
def test_libraries_are_silent_unless_asked(environ, silent):
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HF_HUB")}
    ended = subprocess.run(
        [sys.executable, "-c", NOISE], cwd=ROOT, env=inherited | environ, capture_output=True, check=True
    )
    assert (ended.stdout + ended.stderr == b"") is silent


@pytest.mark.parametrize("dry_run", [["--dry-run"], []])
def test_a_recipe_whose_inputs_are_not_there_yet_says_what_makes_them(tmp_path, monkeypatch, capsys, dry_run):
    monkeypatch.chdir(tmp_path)
    assert main(["train", str(ROOT / "recipes/tiny_cpu.yaml"), *dry_run]) == 2
    said = capsys.readouterr().err
    assert "model.path: " in said
    assert "runs/search/base" in said
    assert "to make this recipe's inputs, run tools/quickstart" in said

"""Settings that only code for GPUs reads, in the processes that read them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_eqlen.engines import colocated, vllm_args
from megatron_eqlen.recipe import RolloutRecipe
from megatron_eqlen.run import engine as run_engine
from tests.kit import ROOT

SAMPLER = "VLLM_USE_FLASHINFER_SAMPLER"
PACKAGES, OWN = {"CUDA_HOME": "PACKAGES", SAMPLER: "0"}, {}
"""Variables for an engine: nvcc of the packages, and nothing where the user has one."""


@pytest.mark.parametrize(("environ", "on_path", "packaged", "told"), [
    ({}, False, True, PACKAGES),
    ({"CUDA_HOME": ""}, False, True, PACKAGES),
    ({SAMPLER: "1"}, False, True, PACKAGES | {SAMPLER: "1"}),
    ({"CUDA_HOME": "/usr/local/cuda-13"}, False, True, OWN),
    ({"CUDA_PATH": "/usr/local/cuda-13"}, False, True, OWN),
    ({}, True, True, OWN),
    ({}, False, False, {}),
])  # fmt: skip
def test_fp8_kernels_are_compiled_by_the_users_nvcc_or_else_by_that_of_the_packages(
    tmp_path, monkeypatch, environ, on_path, packaged, told
):
    home, tools = tmp_path / "site/nvidia/cu13", tmp_path / "tools"
    for folder, there in ((home / "bin", packaged), (tools, on_path)):
        folder.mkdir(parents=True)
        if there:
            (folder / "nvcc").touch(0o755)
    monkeypatch.setattr(vllm_args, "has_flashinfer", lambda: True)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])  # and no packages of .venv
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    for name in ("CUDA_HOME", "CUDA_PATH", SAMPLER):
        monkeypatch.delenv(name, raising=False)
    for name, value in (environ | {"PATH": str(tools)}).items():
        monkeypatch.setenv(name, value)
    expected = {name: str(home) if value == "PACKAGES" else value for name, value in told.items()}
    for stock, quantization, compiler in ((True, "fp8", expected), (True, None, {}), (False, "fp8", {})):
        monkeypatch.setattr(vllm_args, "VLLM_SAMPLES", stock)
        found = vllm_args.environ(RolloutRecipe(quantization=quantization))
        assert found == {"VLLM_USE_V2_MODEL_RUNNER": str(int(stock))} | compiler


@pytest.mark.parametrize(("environ", "stock", "nvcc", "ninja", "told"), [
    ({}, True, True, True, None),
    ({}, True, False, True, "0"),
    ({}, True, True, False, "0"),  # as in a job that has not activated the virtual environment
    ({"VLLM_ALLREDUCE_USE_FLASHINFER": "1"}, True, False, True, "1"),
    ({}, False, False, False, None),
])  # fmt: skip
def test_flashinfers_all_reduce_is_left_out_where_nothing_can_compile_it(
    tmp_path, monkeypatch, environ, stock, nvcc, ninja, told
):
    for name, there in (("flashinfer/__init__.py", True), ("cuda/bin/nvcc", nvcc), ("tools/ninja", ninja)):
        if there:
            (tmp_path / name).parent.mkdir(parents=True)
            (tmp_path / name).touch(0o755)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("VLLM_ALLREDUCE_USE_FLASHINFER", raising=False)
    paths = {"CUDA_HOME": str(tmp_path / "cuda"), "PATH": str(tmp_path / "tools")}
    for name, value in (environ | paths).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(vllm_args, "VLLM_SAMPLES", stock)
    vllm_args.has_flashinfer.cache_clear()
    found = vllm_args.environ(RolloutRecipe(tensor_parallel=8))
    vllm_args.has_flashinfer.cache_clear()
    assert found.get("VLLM_ALLREDUCE_USE_FLASHINFER") == told


def test_ranks_have_one_connection_and_a_silent_triton_by_default():
    """Under ``eqlen train`` and on SLURM, whose script sets what the launcher sets on one machine."""
    shown = "import os; os.write(1, ' '.join(['rank', *map(os.getenv, {}), '']).encode())"  # at once
    both = ("CUDA_DEVICE_MAX_CONNECTIONS", "TRITON_PRINT_AUTOTUNING")
    inherited = {name: value for name, value in os.environ.items() if name not in both}
    own = dict.fromkeys(both, "8")
    code = f"""
import os
from megatron_eqlen.processes.interrupts import Interrupts
from megatron_eqlen.processes.launch import launch
for settings in ({{}}, {own}):
    os.environ |= settings
    launch(2, ["-n1", "-r1", {shown.format(both)!r}], Interrupts(None), "timeit")
"""
    launched = _output([sys.executable, "-c", code], inherited)
    assert [launched.count(f"rank {each} ") for each in ("1 0", "8 8")] == [2, 2]
    lines = (ROOT / "slurm/train.sbatch").read_text().splitlines()
    (line,) = (line for line in lines if "export CUDA_DEVICE_MAX_CONNECTIONS" in line)
    for settings, connections in (({}, "1"), (own, "8")):
        assert (
            _output(["bash", "-c", f"{line}\nprintenv {both[0]}"], inherited | settings) == f"{connections}\n"
        )


@pytest.mark.parametrize(("own", "told"), [
    ({}, "expandable_segments:True"),
    ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:512"}, "max_split_size_mb:512"),
    ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}, "None"),
])  # fmt: skip
def test_a_command_tells_torch_to_grow_segments_before_it_runs(own, told):
    """A run of one process, too, which starts no other."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    inherited = {name: value for name, value in os.environ.items() if name not in names}
    code = """
import os
from megatron_eqlen.cli import commands
from megatron_eqlen.cli.__main__ import main
commands.status = lambda arguments: print(os.getenv("PYTORCH_ALLOC_CONF"))
main(["status", "run"])
"""
    assert _output([sys.executable, "-c", code], inherited | own) == f"{told}\n"


def _output(command: list[str], environ: dict[str, str]) -> str:
    ended = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=True)
    return ended.stdout


@pytest.mark.parametrize("own", [{}, {"num_gpu_blocks_override": 8}])
@pytest.mark.parametrize(("syncs_first", "skips"), [(True, {"load_format": "dummy"}), (False, {})])
def test_an_engine_reads_weights_only_where_no_sync_brings_them(monkeypatch, own, syncs_first, skips):
    monkeypatch.setattr(colocated, "ColocatedEngine", lambda path, rollout, *_: rollout)
    monkeypatch.setattr(run_engine, "HFFolder", lambda path: SimpleNamespace(check_vllm_reads_the_same=dict))
    recipe = SimpleNamespace(rollout=RolloutRecipe(vllm=own), longest_context=9, seed=0)
    recipe.model = SimpleNamespace(dtype="bfloat16")
    job: Any = SimpleNamespace(recipe=recipe, folder=Path("model"))
    job.tokenizer = SimpleNamespace(eos_token_ids=[1])
    replicas: Any = SimpleNamespace(drives=True)
    engine: Any = run_engine.start_engine(job, replicas, syncs_first)
    assert engine.vllm == skips | own

"""Every recipe for GPUs, constructed as a GPU constructs it (``tests/kit/gpu_rehearsal.py``)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_eqlen.job import Job
from megatron_eqlen.plan.trainer import teacher, trainer
from megatron_eqlen.recipe.load import load
from tests.kit import ROOT
from tests.pure.test_recipe import SHIPPED

NO_MODEL = ("paper.yaml",)
"""Recipes that others extend."""
EXAMPLES = sorted((ROOT / "recipes/examples").glob("*/*.yaml"))
RECIPES = [
    path for path in [*SHIPPED, *EXAMPLES] if path.name not in NO_MODEL and load(path).cluster.device == "gpu"
]


@pytest.fixture(scope="module")
def taught(tmp_path_factory) -> Path:
    """Return a recipe of four pipeline stages with a teacher on the same GPUs."""
    path = tmp_path_factory.mktemp("taught") / "taught.yaml"
    path.write_text(f"extends: {ROOT}/recipes/qwen3_235b_a22b.yaml\nteacher: {{path: Qwen/Qwen3-32B}}\n")
    return path


@pytest.fixture(scope="module")
def built(taught) -> dict[Path, Any]:
    """Return the sizes of what a rank of each pipeline stage builds, and its engine, by recipe."""
    ended = subprocess.run(
        [sys.executable, "-m", "tests.kit.gpu_rehearsal", *map(str, [*RECIPES, taught])],
        cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-3000:]
    lines = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    return {Path(line["recipe"]): line for line in lines}


def check_trainer(job: Job, ranks: list[dict[str, Any]]) -> None:
    """Assert that a rank of each stage has what the plan says, and the optimizer of its recipe."""
    for rank, stage in zip(ranks, trainer(job), strict=True):
        # Buckets are padded, to a multiple that depends on where each of them ends.
        assert rank["gradients"] == pytest.approx(stage.parameters.elements, rel=1e-4)
        assert rank["parameters"] - rank["trained"] == sum(stage.parameters.frozen)
        offload = job.recipe.optimizer.offload
        assert rank["optimizers"] == ["HybridDeviceOptimizer" if offload else "FusedAdam"]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_builds_as_a_gpu_builds_it_and_as_large_as_planned(built, path):
    job = Job(load(path))
    check_trainer(job, built[path]["ranks"])
    assert built[path]["engine"] == {
        "tensor_parallel_size": job.recipe.rollout.tensor_parallel,
        "quantization": "fp8_per_block" if job.recipe.rollout.quantization else None,
        "enforce_eager": False,
        "device": "cuda",
        "sleeps": job.recipe.rollout.engine == "colocated",
    }


def test_a_teacher_is_built_beside_the_policy_in_every_stage(built, taught):
    job = Job(load(taught))
    ranks = built[taught]["ranks"]
    check_trainer(job, ranks)
    assert max(2 * rank["teacher"] for rank in ranks) == teacher(job).weights


def test_the_page_about_gpus_says_how_many_recipes_were_built():
    line = f"The {len(RECIPES)} recipes for GPUs in `recipes/` build as a GPU would build them"
    assert line in (ROOT / "docs/gpu.md").read_text().replace("\n  ", " ")

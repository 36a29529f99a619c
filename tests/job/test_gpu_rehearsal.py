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
from megatron_eqlen.plan.trainer import trainer
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
def built() -> dict[Path, Any]:
    """Return the sizes of what the first and the last rank of each recipe build."""
    ended = subprocess.run(
        [sys.executable, "-m", "tests.kit.gpu_rehearsal", *map(str, RECIPES)],
        cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-3000:]
    lines = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    return {Path(line["recipe"]): line for line in lines}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_builds_as_a_gpu_builds_it_and_as_large_as_planned(built, path):
    recipe = load(path)
    planned = trainer(Job(recipe))
    for rank, stage in zip(built[path]["ranks"], (planned[0], planned[-1]), strict=False):
        # Buckets are padded, to a multiple that depends on where each of them ends.
        assert rank["gradients"] == pytest.approx(stage.parameters.elements, rel=1e-4)
        assert rank["parameters"] - rank["trained"] == sum(stage.parameters.frozen)
        assert rank["optimizers"] == ["HybridDeviceOptimizer" if recipe.optimizer.offload else "FusedAdam"]
    engine = built[path]["engine"]
    assert engine["tensor_parallel_size"] == recipe.rollout.tensor_parallel
    assert engine.get("quantization", "") == ("fp8_per_block" if recipe.rollout.quantization else "")
    assert not engine["enforce_eager"]


def test_the_page_about_gpus_says_how_many_recipes_were_built():
    line = f"The {len(RECIPES)} recipes for GPUs in `recipes/` build as a GPU would build them"
    assert line in (ROOT / "docs/gpu.md").read_text().replace("\n  ", " ")

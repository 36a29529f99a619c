"""Optimizer steps on a GPU, with Transformer Engine's layers and fla's kernels where they are installed, are
those of plain torch on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.updates import Result
from tests.kit.tiny_models import FAMILIES, SHORT, save_tiny

HEADS: dict[str, Any] = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
"""Sizes of Gated DeltaNet's heads that kernels take."""
WITH_EXPERTS = {"qwen3_moe", "qwen3_next", "qwen3_5_moe_text", "glm4_moe"}
"""Families whose routers choose otherwise after rounding; ``test_runs`` trains two with given choices."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("families")
    for family in FAMILIES:
        heads = HEADS if family.startswith(("qwen3_next", "qwen3_5")) else {}
        save_tiny(folder / family, family, **SHORT.get(family, {}) | heads)
    return folder


def updates(folder: Path, name: str, dtype: str, **environ: str) -> dict[str, Result | str]:
    result = folder.with_name(f"{name}.pt")
    command = [sys.executable, "-m", "tests.gpu.updates", folder, dtype, result]
    subprocess.run(command, env=os.environ | environ, check=True, timeout=900)
    return torch.load(result)


@pytest.fixture(scope="module")
def on_the_cpu(folder) -> dict[str, Result | str]:
    return updates(folder, "cpu", "float32", CUDA_VISIBLE_DEVICES="")


@pytest.fixture(scope="module")
def in_float32(folder) -> dict[str, Result | str]:
    """Transformer Engine multiplies float32 in TF32 by default."""
    return updates(folder, "float32", "float32", NVIDIA_TF32_OVERRIDE="0")


@pytest.fixture(scope="module")
def in_bfloat16(folder) -> dict[str, Result | str]:
    return updates(folder, "bfloat16", "bfloat16")


def compared(ours: Result | str, reference: Result | str) -> tuple[float, float]:
    """Return the relative differences of the gradients' norms (the larger) and of the weights' change."""
    assert not isinstance(ours, str), ours
    assert not isinstance(reference, str), reference
    assert ours[1].keys() == reference[1].keys()
    norms = max(abs(a / b - 1) for a, b in zip(ours[0], reference[0], strict=True))
    moved, exact = ([after[name] - before[name] for name in after] for _, before, after in (ours, reference))
    off = sum(float((a - b).square().sum()) for a, b in zip(moved, exact, strict=True))
    return norms, (off / sum(float(b.square().sum()) for b in exact)) ** 0.5


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_updates_are_the_cpus(on_the_cpu, in_float32, family):
    norms, change = compared(in_float32[family], on_the_cpu[family])
    assert norms < 2e-3
    assert change < 2e-2


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in WITH_EXPERTS])
def test_bfloat16_updates_are_the_cpus_up_to_rounding(on_the_cpu, in_bfloat16, family):
    """Adam makes small gradients as large as others: the change of weights is a weak measure."""
    norms, change = compared(in_bfloat16[family], on_the_cpu[family])
    assert norms < 5e-2
    assert change < 0.5

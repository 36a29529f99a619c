"""FlexAttention's kernels for token trees, generated for GPUs that are not there."""

import os
import subprocess
import sys

import pytest

from tests.gpuless.kernels import SHARED

BACKWARD = {80: {128: "4", 256: "8"}, 90: {128: "8", 256: "8"}, 100: {128: "8", 256: "8"}}
"""Warps of the backward pass by head size: with fewer, kernels spill kilobytes of registers (docs/gpu.md)."""


@pytest.mark.parametrize("capability", SHARED)
def test_attention_kernels_fit_into_shared_memory_and_backward_passes_have_the_warps(capability, tmp_path):
    """The kernels of both passes and head sizes stand in an own cache: they are not assembled."""
    code = f"from tests.gpuless import attention_kernels; attention_kernels.print_memory({capability})"
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kernels = [line.split() for line in done.stdout.splitlines()]
    assert [head_dim for head_dim, *_ in kernels] == ["128", "128", "256", "256"]
    assert all(int(shared) <= SHARED[capability] for *_, shared in kernels)
    warps = {int(head_dim): count for head_dim, name, count, _ in kernels if "backward" in name}
    assert warps == BACKWARD[capability]

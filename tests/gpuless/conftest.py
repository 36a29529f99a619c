"""Packages for GPUs on the path of imports, and Triton's interpreter in place of its compiler."""

import os
import sys
from types import SimpleNamespace

from tests.kit.sources import FOR_GPUS

os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are defined
sys.path.append(str(FOR_GPUS / "imported"))

from triton.backends import backends

# vLLM's CPU build takes only a Triton with a backend for CPUs, which is not on PyPI; it asks for its name.
backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))  # pyright: ignore[reportArgumentType]

"""Packages for GPUs on the path of imports, and Triton's interpreter in place of its compiler."""

import os
import sys

from tests.gpuless.sources import PACKAGES

os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are defined
sys.path.append(str(PACKAGES / "imported"))

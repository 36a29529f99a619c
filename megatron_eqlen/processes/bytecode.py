"""Python's compiled modules, kept in the virtual environment."""

from __future__ import annotations

import os
import sys
from pathlib import Path

FORBIDS = "PYTHONDONTWRITEBYTECODE"


def keep_bytecode() -> None:
    """Keep what this process and its children compile in ``bytecode`` of the virtual environment, where a
    shell or an image forbids to keep it beside the sources: each rank would compile all modules again, 10
    CPU-seconds. Call before heavy imports."""
    if sys.dont_write_bytecode and sys.pycache_prefix is None and os.access(sys.prefix, os.W_OK):
        sys.dont_write_bytecode, sys.pycache_prefix = False, str(Path(sys.prefix, "bytecode"))
        os.environ.pop(FORBIDS, None)
        os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix

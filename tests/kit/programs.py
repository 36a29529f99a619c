"""The Python that the tests' programs run in: 3.11, or the tests' own on a machine without it."""

from __future__ import annotations

import sys

from megatron_eqlen.graders.sandbox.probe import find_python


def _version() -> str:
    try:
        find_python("3.11")
    except ValueError:
        return f"3.{sys.version_info.minor}"
    return "3.11"


PYTHON = _version()

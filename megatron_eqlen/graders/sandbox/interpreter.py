"""The Python that programs run in: another than the trainer's, whose recursion through C functions
(``lru_cache``) ends at a depth of about 500 from 3.12 on, whatever ``setrecursionlimit`` says."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import lru_cache

OLDEST = (3, 11)
WHO = "import sys; print(sys.implementation.name, '%d.%d.%d' % sys.version_info[:3], sys.executable)"


@lru_cache(maxsize=16)
def find_python(wanted: str) -> str:
    """Return the path of the interpreter ``wanted``, a version or a path.

    A version is looked for in the environment that ``tools/setup programs`` makes, then on the PATH. Raises
    ValueError if there is none.
    """
    named = os.sep in wanted
    name = "python" + ".".join(wanted.split(".")[:2])
    folders = [f"{sys.prefix}/programs/bin", *os.get_exec_path()]
    places = [path for folder in folders if (path := shutil.which(name, path=folder))]
    seen = []
    for place in [wanted] if named else [*places, sys.executable]:
        version, executable = _ask(place)
        fits = named or f"{version}.".startswith(f"{wanted}.")
        if fits and tuple(map(int, version.split(".")[:2])) >= OLDEST:
            return executable
        seen.append(f"{place} ({version})")
    expected = "a path of CPython 3.11 or newer" if named else f"CPython {wanted}"
    raise ValueError(
        f"reward.code_python: expected {expected} for programs to run in, found {', '.join(seen)}: "
        "tools/setup programs installs 3.11. The key may name another, but from 3.12 on many recursive "
        "programs fail"
    )


def _ask(place: str) -> tuple[str, str]:
    """Return version and path of the CPython that ``place`` starts, "0" for a version if it starts none."""
    command = [place, "-I", "-c", WHO]
    try:
        told = subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True, timeout=60)
        name, version, executable = told.strip().split(" ", 2)
    except (OSError, ValueError, subprocess.SubprocessError):
        return "0", place
    return version if name == "cpython" else "0", executable

"""The image is built from files that exist, and its layer of packages from no others."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from tests.kit import ROOT


def instructions() -> list[tuple[str, str]]:
    """(name, arguments), lines joined."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    joined = text.replace("\\\n", " ").splitlines()
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in joined if line)]


def copied() -> list[tuple[list[str], str]]:
    """(sources, target) of each COPY, in order."""
    words = [shlex.split(rest) for name, rest in instructions() if name == "COPY"]
    arguments = [[word for word in each if not word.startswith("--")] for each in words]
    return [(each[:-1], each[-1]) for each in arguments]


def test_everything_that_is_copied_exists():
    assert [source for sources, _ in copied() for source in sources if not (ROOT / source).exists()] == []


def test_several_files_are_copied_into_folders_only():
    assert all(target.endswith("/") for sources, target in copied() if len(sources) > 1)


def test_the_packages_are_set_up_with_no_more_than_was_copied_before(tmp_path: Path):
    *before, (everything, _) = copied()
    assert everything == ["."]
    for sources, target in before:
        (tmp_path / target).mkdir(parents=True, exist_ok=True)
        for source in sources:
            shutil.copy(ROOT / source, tmp_path / target)
    check = "import os; from megatron_eqlen import packages; assert packages.__file__.startswith(os.getcwd())"
    read = "import setuptools, distutils.core; distutils.core.run_setup('setup.py', stop_after='init')"
    for code in (check, read):
        command = [sys.executable, "-c", code]
        ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env={})
        assert ended.returncode == 0, ended.stderr
    for file in ("tools/setup", "tools/requirements-gpu.txt"):
        assert (tmp_path / file).read_bytes() == (ROOT / file).read_bytes()


def test_the_image_does_not_run_as_root():
    names = [name for name, _ in instructions()]
    assert names.index("USER") < names.index("COPY")
    assert names.index("USER") < names.index("ENTRYPOINT")


def test_what_machines_make_stays_out_of_the_image():
    assert {".git", ".venv", "runs"} <= set((ROOT / ".dockerignore").read_text().split())

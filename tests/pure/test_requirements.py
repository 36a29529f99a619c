"""uv.lock answers pyproject.toml for CPUs and GPUs, and leaves to pip where packages come from."""

from __future__ import annotations

import pkgutil
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.kit import ROOT

UV = Path(sys.executable).with_name("uv")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def exported(*options: str) -> dict[str, str]:
    """Return the versions, by name, that the lock has for these extras or groups."""
    command = [
        UV, "export", "--offline", "--frozen", "--no-hashes", "--no-emit-project", "--no-annotate", *options,
    ]  # fmt: skip
    lines = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return dict(re.findall(r"^([\w.-]+)==([\w.]+)", lines, re.MULTILINE))


def check_lock(folder: Path) -> subprocess.CompletedProcess[str]:
    python, cache = ("--python", sys.executable), ("--cache-dir", folder / "cache")
    command = [UV, "lock", "--check", "--offline", *python, *cache]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_the_lock_answers_pyproject_toml(tmp_path):
    for name in ("pyproject.toml", "uv.lock", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    ended = check_lock(tmp_path)
    assert ended.returncode == 0, f"run tools/lock: {ended.stderr}"
    changed = (ROOT / "pyproject.toml").read_text().replace('"numpy>=', '"numpy>=1')
    (tmp_path / "pyproject.toml").write_text(changed)
    assert check_lock(tmp_path).returncode != 0


def test_the_lock_names_no_place_that_packages_come_from():
    """pip's configuration decides the places."""
    assert re.findall(r"\w+://[^\"]*", (ROOT / "uv.lock").read_text()) == []


def test_packages_that_this_one_imports_have_one_version_on_cpus_and_gpus():
    cpu, gpu = (exported("--extra", kind, "--extra", "test") for kind in ("cpu", "gpu"))
    direct = {re.split("[><=]", each.lower().replace("_", "-"))[0] for each in PROJECT["dependencies"]}
    assert direct <= cpu.keys()
    assert {name: cpu[name] for name in direct} == {name: gpu[name] for name in direct}


def test_the_command_is_a_function_of_the_package():
    assert callable(pkgutil.resolve_name(PROJECT["scripts"]["eqlen"]))


def test_the_parts_of_transformer_engine_have_one_version():
    found = exported("--extra", "gpu", "--group", "transformer-engine")
    assert len({found[f"transformer-engine{part}"] for part in ("", "-cu13", "-torch")}) == 1


def test_the_parts_of_the_cuda_toolkit_have_one_minor_version():
    """A compiler newer than the runtime's headers does not compile TileLang's kernels. nvJitLink may be newer
    than what it links."""
    parts = ("cccl", "crt", "cupti", "nvcc", "nvrtc", "runtime")
    found = exported("--extra", "gpu")
    versions = {found[f"nvidia-cuda-{part}"] for part in parts} | {found["nvidia-nvvm"], found["nvidia-nvtx"]}
    assert len({version.rsplit(".", 1)[0] for version in versions}) == 1, versions


@pytest.mark.parametrize("name", ["transformer-engine", "apex"])
def test_pip_alone_builds_nothing_against_a_torch_of_its_own(name):
    """An isolated build of Transformer Engine takes another torch; the apex of PyPI is another project."""
    declared = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    assert not [each for group in declared for each in group if each.startswith(name)]

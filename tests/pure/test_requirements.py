"""The pinned requirements say what setup.py says, completely, and the same for CPUs and GPUs."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import setuptools  # noqa: F401 (brings distutils, which Python 3.12 lacks)

from distutils.core import run_setup  # isort: skip
from tests.kit import ROOT

DIFFERENT = {"apache-tvm-ffi"}
"""vLLM's build for GPUs needs an older one, by way of tilelang."""


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def lines(kind: str) -> list[str]:
    return list(hashes(kind))


def hashes(kind: str) -> dict[str, list[str]]:
    """Each requirement with the hashes that stand below it."""
    text = re.sub(r"^#.*\n", "", (ROOT / f"tools/requirements-{kind}.txt").read_text(), flags=re.MULTILINE)
    entries = (entry.split() for entry in text.replace("\\\n", " ").splitlines())
    return {name: found for name, *found in entries}


def pins(requirements: list[str]) -> dict[str, str]:
    """Versions by name; whatever is not pinned to one version is an error."""
    matches = [re.fullmatch(r"([\w.-]+)(\[[\w,-]+\])?==([\w.]+)", each) for each in requirements]
    assert all(matches), requirements
    return {canonical(match[1]): match[3] for match in matches if match}


def declared(*extras: str) -> dict[str, str]:
    setup = run_setup(str(ROOT / "setup.py"), stop_after="init")
    return pins(sum((setup.extras_require[extra] for extra in extras), start=list(setup.install_requires)))


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_every_package_is_pinned_once_and_lower_case_as_pip_names_it(kind):
    assert Counter(canonical(line.split("==")[0]) for line in lines(kind)).most_common(1)[0][1] == 1
    assert list(pins(lines(kind))) == [line.split("==")[0] for line in lines(kind)]


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_what_setup_py_requires_is_pinned_at_its_version(kind):
    required = declared(kind, "test")
    assert {name: pins(lines(kind)).get(name) for name in required} == required


def test_shared_packages_have_one_version_on_cpus_and_gpus():
    cpu, gpu = pins(lines("cpu")), pins(lines("gpu"))
    assert {name for name in cpu.keys() & gpu.keys() if cpu[name] != gpu[name]} == DIFFERENT


def test_the_parts_of_transformer_engine_have_one_version_and_what_builds_them_is_there():
    gpu = pins(lines("gpu"))
    assert len({gpu[f"transformer-engine{part}"] for part in ("", "-cu13", "-torch")}) == 1
    assert gpu.keys() >= {"ninja", "pybind11", "setuptools", "wheel", "nvidia-cudnn-frontend"}


def test_pip_alone_builds_nothing_against_a_torch_of_its_own():
    """An isolated build of Transformer Engine takes another torch; the apex of PyPI is another project."""
    for kind in ("cpu", "gpu"):
        assert not [name for name in declared(kind) if name.startswith("transformer-engine")]
        assert "apex" not in pins(lines(kind)).keys() | declared(kind).keys()


@pytest.mark.parametrize(("kind", "without"), [("cpu", ["torch"]), ("gpu", [])])
def test_every_package_has_hashes_but_the_torch_whose_build_pip_s_configuration_chooses(kind, without):
    found = hashes(kind)
    assert [line.split("==")[0] for line, each in found.items() if not each] == without
    assert all(re.fullmatch("--hash=sha256:[0-9a-f]{64}", one) for each in found.values() for one in each)

"""Names that the newest packages on the index would break or changed: ``tools/gpuless --newest``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from importlib.metadata import distributions

from packaging.requirements import Requirement

from tests.gpuless import names
from tests.kit import ROOT
from tests.kit.sources import FOR_GPUS

STRICT = ("torch", "transformers", "vllm", "megatron-core")
"""Packages whose versions others exclude."""


def report() -> None:
    """Print it for the packages in ``EQLEN_GPU_PACKAGES``, beside those of the lock."""
    lock = tomllib.loads((ROOT / "uv.lock").read_text())["package"]
    locked = {package["name"]: package["version"] for package in lock}
    newest = {each.name.replace("_", "-"): each for each in distributions(path=[str(FOR_GPUS / "read")])}
    beside = locked | {name: each.version for name, each in newest.items()}
    for name, each in sorted(newest.items()):
        needs = [Requirement(line) for line in each.requires or ()]
        strict = [
            f"needs {need.name}{need.specifier}, not {beside[need.name]}"
            for need in needs
            if need.name in STRICT and not (need.marker and "extra" in str(need.marker))
            if not need.specifier.contains(beside[need.name])
        ]
        print(f"{name}: locked {locked[name]}, newest {each.version}", *strict, sep="; ")
    print("\nWould break:", *(_faults() or ["nothing that is looked up"]), sep="\n  ")
    theirs = names.used()
    os.environ.pop("EQLEN_GPU_PACKAGES")
    before = json.loads(subprocess.check_output([sys.executable, "-m", __spec__.name, "used"]))
    changed = sorted(key for key, text in theirs.items() if before.get(key, text) != text)
    print("\nChanged, to be read before the version is pinned:", *(changed or ["nothing"]), sep="\n  ")


def _faults() -> list[str]:
    faults = []
    for check in names.CHECKS:
        try:
            faults += check()
        except AssertionError as error:  # a package is not what the check expects
            faults.append(f"{check.__name__}: cannot be looked up: {error}")
    return faults


if __name__ == "__main__":
    print(json.dumps(names.used())) if "used" in sys.argv else report()

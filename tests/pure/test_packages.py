"""Packages that are present, missing or broken are told apart by a real import, and reported once."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from megatron_eqlen.megatron_cpu import packages
from megatron_eqlen.models import config, gated_delta_net
from tests.kit import ROOT

BROKEN = {
    "a shared library is missing": "raise OSError('libcudart.so.13: cannot open shared object file')",
    "built for another torch": "raise ImportError('undefined symbol: _ZN3c10')",
    "no driver": "raise RuntimeError('0 active drivers')",
    "versions do not match": "assert False, 'version mismatch'",
    "a package below is missing": "import no_such_package",
    "syntax of another Python": "def",
}


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Put a package of one's own in the place of an optional one; afterwards remove every trace of it."""
    before = {name: module for name, module in sys.modules.items() if _optional(name)}

    def forget() -> None:
        for name in [name for name in sys.modules if _optional(name)]:
            del sys.modules[name]
        packages.find.cache_clear()
        packages._warn.cache_clear()
        gated_delta_net.fla_kernel.cache_clear()

    def write(modules: tuple[str, ...], *, last: str = "", deepest: bool = True) -> None:
        """Write empty modules; the first holds ``last``, or its top package if not ``deepest``."""
        for module in modules:
            folder = tmp_path.joinpath(*module.split("."))
            folder.mkdir(parents=True, exist_ok=True)
            for each in (folder, *folder.parents[: module.count(".")]):
                (each / "__init__.py").touch()
        place = modules[0] if deepest else modules[0].split(".")[0]
        tmp_path.joinpath(*place.split("."), "__init__.py").write_text(last)

    monkeypatch.syspath_prepend(tmp_path)
    forget()
    yield write
    forget()
    sys.modules.update(before)


def _optional(module: str) -> bool:
    return module.split(".")[0] in {package.name for package in packages.OPTIONAL}


@pytest.mark.parametrize("deepest", [True, False], ids=["in the module used", "at the top"])
@pytest.mark.parametrize("code", BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("package", packages.OPTIONAL, ids=lambda package: package.name)
def test_a_broken_package_is_said_once_with_its_reason_and_looks_absent(
    package, code, deepest, install, caplog
):
    install(package.modules, last=code, deepest=deepest)
    packages.leave_out_broken(on_cpu=False)
    assert not packages.usable(package)
    assert not packages.usable(package)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert package.name in record.message
    assert package.without in record.message
    assert packages._find_or_hide(package).fault in record.message
    assert find_spec(package.name) is None
    with pytest.raises(ImportError):
        __import__(package.modules[0])


def test_transformer_engine_finds_the_libraries_that_torch_has_loaded(install, tmp_path):
    """The process has not imported torch, as after a set-up."""
    install(
        packages.TRANSFORMER_ENGINE.modules,
        last="import sys\nif 'torch' not in sys.modules: raise OSError('libnccl.so.2: cannot open')",
        deepest=False,
    )
    code = "from megatron_eqlen.megatron_cpu.packages import *; print(find(TRANSFORMER_ENGINE).fault or 'ok')"
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    found = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
    assert found.stdout == "ok\n", found.stdout + found.stderr


def test_a_package_that_lacks_what_is_used_of_it_is_broken(install, caplog):
    """An example is the apex of PyPI, which is another project."""
    install(("apex",))
    packages.leave_out_broken(on_cpu=False)
    assert "No module named 'apex.optimizers'" in caplog.text


def test_only_one_rank_of_a_machine_speaks(install, caplog, monkeypatch):
    install(packages.FLA.modules, last="raise OSError")
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert not packages.usable(packages.FLA)
    assert caplog.records == []


def test_a_package_that_imports_is_used_and_nothing_is_said(install, caplog):
    install(packages.TRANSFORMER_ENGINE.modules)
    packages.leave_out_broken(on_cpu=False)
    assert packages.usable(packages.TRANSFORMER_ENGINE)
    assert caplog.records == []


def test_on_a_cpu_megatron_finds_no_optimizer_for_gpus(install, caplog):
    """`eqlen check`, on a login node for example, still finds the package."""
    install(packages.TRANSFORMER_ENGINE.modules)
    packages.leave_out_broken(on_cpu=True)
    assert find_spec("transformer_engine") is None
    assert packages.find(packages.TRANSFORMER_ENGINE).installed
    assert caplog.records == []


def test_an_absent_package_is_said_where_it_would_be_used(install, caplog, monkeypatch):
    monkeypatch.setattr(packages, "find_spec", lambda name: None)
    packages.leave_out_broken(on_cpu=False)
    assert caplog.records == []
    assert not packages.usable(packages.FLA)
    assert "fla " in caplog.text  # with its version, where it only looks absent
    assert "is not installed. Gated DeltaNet runs in plain torch" in caplog.text


@pytest.mark.parametrize("code", ["", "raise OSError"], ids=["works", "broken"])
def test_models_have_transformer_engine_layers_only_where_it_imports(code, install, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    install(packages.TRANSFORMER_ENGINE.modules, last=code)
    assert config.uses_transformer_engine() == (code == "")


def test_without_a_gpu_nobody_asks_for_transformer_engine(install, caplog, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    install(packages.TRANSFORMER_ENGINE.modules, last="raise OSError")
    assert not config.uses_transformer_engine()
    assert caplog.records == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gated_delta_net_takes_the_kernel_of_an_fla_that_imports(dtype, install):
    install(packages.FLA.modules[::-1], last="chunk_gated_delta_rule = 'kernel'")
    assert gated_delta_net.fla_kernel(dtype) == "kernel"


def test_gated_delta_net_goes_without_an_fla_that_does_not_import(install):
    install(packages.FLA.modules[::-1], last="raise RuntimeError('0 active drivers')")
    assert gated_delta_net.fla_kernel(torch.bfloat16) is None


def test_packages_that_are_needed_are_installed_here():
    assert all(find_spec(package.name) and packages._version(package) for package in packages.NEEDED)

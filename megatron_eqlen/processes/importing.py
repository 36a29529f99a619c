"""Imports of heavy libraries at less cost: they are seconds of every start, in each process that trains or
generates."""

from __future__ import annotations

import gc
import importlib.metadata
import inspect
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def importing(*without: str) -> Iterator[None]:
    """Surround imports. In the block, garbage collection does not walk through all modules again and again
    (nor afterwards), Transformers' question which package is of which distribution does not look at each
    installed file, and modules ``without`` raise ImportError."""
    collects, packages = gc.isenabled(), importlib.metadata.packages_distributions
    gc.disable()
    importlib.metadata.packages_distributions = packages_distributions
    absent = [name for name in without if name not in sys.modules]
    sys.modules.update(dict.fromkeys(absent))  # pyright: ignore[reportCallIssue, reportArgumentType] (the documented way)
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]
        importlib.metadata.packages_distributions = packages
        gc.freeze()
        if collects:
            gc.enable()


def packages_distributions() -> Mapping[str, list[str]]:
    """Return what ``importlib.metadata.packages_distributions`` does where every file that a distribution
    lists exists."""
    distributions: dict[str, list[str]] = defaultdict(list)
    for distribution in importlib.metadata.distributions():
        packages = (distribution.read_text("top_level.txt") or "").split()
        for package in packages or _in_record(distribution.read_text("RECORD") or ""):
            distributions[package].append(distribution.metadata["Name"])
    return dict(distributions)


def _in_record(record: str) -> set[str]:
    """Return the top-level names of the files that a distribution's RECORD lists."""
    heads = {line.partition("/")[:2] for line in record.splitlines()}
    names = {head if slash else inspect.getmodulename(head.partition(",")[0]) for head, slash in heads}
    return {name for name in names if name and "." not in name}

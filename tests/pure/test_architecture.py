"""The picture of the package in docs/architecture.md is true: imports point one way."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import megatron_eqlen

PACKAGE = "megatron_eqlen"
ROOT = Path(megatron_eqlen.__file__).resolve().parents[1]


def rooms() -> dict[str, list[Path]]:
    """Return folders and top-level modules of the package, each with its source files."""
    folder = ROOT / PACKAGE
    modules = {file.stem: [file] for file in folder.glob("*.py") if file.stem != "__init__"}
    packages = {path.name: list(path.rglob("*.py")) for path in folder.iterdir() if path.is_dir()}
    return modules | {name: files for name, files in packages.items() if files}


def imported(file: Path) -> Iterator[str]:
    """Yield the names within the package that a file imports, also inside its functions."""
    for node in ast.walk(ast.parse(file.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{name}" for name in names]
        for name in names:
            if name.startswith(f"{PACKAGE}."):
                yield name


def documented_order() -> list[str]:
    """Return the rooms from the lowest to the highest: the first column of the page's table of folders, from
    below."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    table = text.split("## Where things are")[1].split("\n## ")[0]
    return re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)[::-1]


def test_every_folder_and_module_has_its_place_in_the_table():
    assert sorted(documented_order()) == sorted(rooms())


@pytest.mark.parametrize("room", sorted(rooms()))
def test_a_room_imports_only_from_those_below_it(room):
    order = documented_order()
    below = {*order[: order.index(room) + 1]}
    assert {name.split(".")[1] for file in rooms()[room] for name in imported(file)} <= below


def test_no_files_import_each_other_in_a_circle():
    files = {
        ".".join(file.relative_to(ROOT).with_suffix("").parts): file
        for file in (ROOT / PACKAGE).rglob("*.py")
        if file.stem != "__init__"
    }
    above = {
        name: {room for found in imported(file) for room in files if f"{found}.".startswith(f"{room}.")}
        for name, file in files.items()
    }
    list(TopologicalSorter(above).static_order())  # raises CycleError, which names them

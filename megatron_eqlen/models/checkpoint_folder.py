"""Folders of checkpoints: list them, find the newest, and verify their bytes.

    checkpoints/step-00000010/  manifest.json     {file: {"bytes": size, "crc32": checksum}} of all others
                step-00000012/
                latest                            the name of the checkpoint in force

CRC-32 finds any damage of up to 32 neighbouring bits, and misses other damage once in 4 billion times.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megatron_eqlen import files

MANIFEST = "manifest.json"
BLOCK = 1 << 20
READERS = min(8, os.cpu_count() or 1)

Manifest = dict[str, dict[str, Any]]


class CheckpointError(ValueError):
    """A checkpoint that cannot be read; the message names the file and the tensor."""


def steps(folder: Path) -> list[Path]:
    """Return the checkpoints in ``folder``, oldest first."""
    return [path for _, path in files.step_folders(folder)]


def latest(folder: Path) -> Path | None:
    """Return the checkpoint that ``folder/latest`` names; None without that file. Raises CheckpointError."""
    pointer = folder / files.LATEST
    try:
        with files.opened(pointer) as named:
            name = named.read().decode("utf-8").strip()
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{pointer}: not UTF-8: {error}") from None
    if files.step_number(name) is None or not (folder / name).is_dir():
        others = ", ".join(path.name for path in steps(folder)) or "none"
        raise CheckpointError(f"{pointer}: names {name!r:.80}, which is not there (there are: {others})")
    return folder / name


def copy(checkpoint: Path, folder: Path) -> None:
    """Copy a checkpoint, which becomes the one in force of ``folder``. Raises CheckpointError for damage."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / checkpoint.name).exists():
        verify(checkpoint)
        with files.new_folder(folder / checkpoint.name) as partial:
            files.copy_folder(checkpoint, partial)
    set_latest(folder / checkpoint.name)


def set_latest(checkpoint: Path) -> None:
    files.write_text(checkpoint.parent / files.LATEST, checkpoint.name + "\n")


def file_names(folder: Path) -> list[str]:
    """Return the names of all files that a manifest lists, largest first."""
    listed = [path for path in folder.iterdir() if path.is_file() and path.name != MANIFEST]
    return [path.name for path in sorted(listed, key=lambda path: (-path.stat().st_size, path.name))]


def describe(folder: Path, names: Collection[str]) -> Manifest:
    """Return the manifest's entries for these files."""
    # reading and zlib.crc32 release Python's lock
    with ThreadPoolExecutor(READERS) as readers:
        descriptions = readers.map(lambda name: _describe(folder / name), names)
        return dict(zip(names, descriptions, strict=True))


def write_manifest(folder: Path, manifest: Manifest) -> None:
    files.write_json(folder / MANIFEST, dict(sorted(manifest.items())))


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest. Raises CheckpointError if it is missing, damaged, or lacks a data file."""
    file = folder / MANIFEST
    try:
        manifest = files.read_json(file)
    except ValueError as error:
        raise CheckpointError(f"{error}; this is not a whole checkpoint") from None
    if not isinstance(manifest, dict) or not all(map(_is_description, manifest.values())):
        raise CheckpointError(f"{file}: damaged: expected bytes and crc32 of each file")
    # shards that the manifest does not know would be loaded without a check
    for path in sorted(folder.glob("*.distcp")):
        if path.name not in manifest:
            raise CheckpointError(f"{path}: not in {MANIFEST}: one of the two is another checkpoint's")
    return manifest


def faults(folder: Path, manifest: Manifest, names: Collection[str]) -> list[str]:
    """Return the faults of these files, one sentence each."""
    with ThreadPoolExecutor(READERS) as readers:
        per_file = readers.map(lambda name: _fault(folder / name, manifest[name]), names)
        return [fault for fault in per_file if fault]


def verify(folder: Path) -> None:
    """Raise CheckpointError if a file differs from the folder's manifest."""
    manifest = read_manifest(folder)
    if damage := faults(folder, manifest, manifest):
        raise CheckpointError(damage[0])


def _describe(file: Path) -> dict[str, Any]:
    size, crc, block = 0, 0, bytearray(BLOCK)
    with files.opened(file) as content:
        while count := content.readinto(block):
            size, crc = size + count, zlib.crc32(memoryview(block)[:count], crc)
    return {"bytes": size, "crc32": f"{crc:08x}"}


def _is_description(value: Any) -> bool:
    return isinstance(value, dict) and type(value.get("bytes")) is int and isinstance(value.get("crc32"), str)


def _fault(file: Path, expected: dict[str, Any]) -> str | None:
    try:
        if (size := file.stat().st_size) != expected["bytes"]:
            word = "truncated" if size < expected["bytes"] else "too long"
            return f"{file}: {word}: expected {expected['bytes']} bytes, found {size}"
        description = _describe(file)
    except FileNotFoundError:
        return f"{file}: no such file, though the checkpoint has one"
    except OSError as error:
        return f"{file}: cannot be read: {error.strerror}"
    if description["crc32"] != expected["crc32"]:
        return f"{file}: damaged: expected crc32 {expected['crc32']}, found {description['crc32']}"
    return None

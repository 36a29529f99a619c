"""Contents of the files that a run reads and writes, so that a resumed run notices what was replaced.

    RUN/contents.json    {"runs/search/base": {"model.safetensors": DIGEST, ...}, ..., "RUN/export": {...}}

``inputs.keep_inputs`` says what a run reads.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_eqlen.files import expecting, opened, read_json, write_json
from megatron_eqlen.hf.config import read_config

FILE = "contents.json"
BLOCK, BLOCKS = 1 << 18, 64
"""Bytes and number of the blocks that identify a file of weights beyond 16 MiB; 160 GB cost a second."""
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")

TEXT = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json")
TEXT += ("tokenizer_config.json", "chat_template.jinja", "additional_chat_templates/tool_use.jinja")
"""Files that decide which tokens a conversation has."""

Contents = dict[str, str]
"""Digest of each file, by its path in a folder; by "" for a file alone."""


class ContentsError(ValueError):
    """Inputs of a run are not those that it began with; the message names the files."""


def contents(path: Path, hidden: str = ".") -> Contents:
    """Return the digests of a file, or of a folder's files, except below names that begin with ``hidden``."""
    if path.is_file():
        return {"": _digest(path)}
    names = {file.relative_to(path): file for file in sorted(path.rglob("*")) if file.is_file()}
    shown = {name: file for name, file in names.items() if not any(p.startswith(hidden) for p in name.parts)}
    return {str(name): _digest(file) for name, file in shown.items()}


def repository(name: str) -> tuple[list[str], str] | None:
    """Return git in the repository of ``repository@commit``, and the commit; None for a folder or file."""
    path = "" if os.path.exists(name) else name
    while "@" in path:  # a branch may have one in its name, and so may a folder
        path = path.rpartition("@")[0]
        if os.path.isdir(path) and (commit := name[len(path) + 1 :]):
            return ["git", "-c", "safe.directory=*", "-C", path], commit
    return None


def commit(name: str) -> Contents:
    """Return the digest of what ``repository@commit`` of Git holds now; empty for any other name."""
    if (at := repository(name)) is None:
        return {}
    tree = subprocess.run([*at[0], "ls-tree", "--end-of-options", at[1]], capture_output=True)
    return {} if tree.returncode else {"": hashlib.sha256(tree.stdout).hexdigest()}


def weights(model: Path) -> Contents:
    """Return the digests of a model's files of weights, without copies for other programs (``onnx/``)."""
    return {file.name: _digest(file) for file in sorted(model.glob("*.safetensors"))}


def function(model: Path, dtype: str) -> dict[str, Any]:
    """Return what decides, beside the weights, which function of text a model is: the resolved fields of its
    config.json, the dtype, and the digests of the files of tokenizer and chat template."""
    digests = {name: _digest(model / name) for name in TEXT if (model / name).is_file()}
    return json.loads(json.dumps(asdict(read_config(model)) | {"dtype": dtype} | digests))


def written(export: Path) -> Contents:
    """Return the contents of ``RUN/export`` or ``RUN/adapter`` without its card, which people edit."""
    return {name: digest for name, digest in contents(export).items() if name != "README.md"}


def is_whole(export: Path) -> bool:
    """Return True if ``RUN/export`` or ``RUN/adapter`` is there, and holds what was written."""
    return export.exists() and not changed(export)


def changed(export: Path) -> list[str]:
    """Return the files of ``RUN/export`` or ``RUN/adapter`` that differ from what was recorded, if it was."""
    found = written(export)
    # Without a record the files count as they are.
    before = recorded(export.parent).get(f"RUN/{export.name}", found)
    return sorted(name for name in found.keys() | before.keys() if found.get(name) != before.get(name))


def keep(run: Path, found: dict[str, Contents]) -> None:
    """Add contents to the record of ``run``."""
    write_json(run / FILE, recorded(run) | found)


def recorded(run: Path) -> dict[str, Contents]:
    if not (run / FILE).exists(follow_symlinks=False):
        return {}
    with expecting("digests of files by path", run / FILE):
        return {path: {**files} for path, files in read_json(run / FILE).items()}


def keep_same(run: Path, found: dict[str, Contents]) -> None:
    """Record the contents of a run's inputs. Raises ContentsError if an earlier start found others there."""
    before = recorded(run)
    changed = [
        f"{Path(path, name)} {'is new' if was is None else 'is missing' if now is None else 'has changed'}"
        for path in found.keys() & before.keys()
        # Files that are new, missing or changed.
        for name in found[path].keys() | before[path].keys()
        if (was := before[path].get(name)) != (now := found[path].get(name))
    ]
    if changed:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        remedy = f"give this run its own folder (name=... or run_dir=...), or remove {run / FILE}"
        others = f"{', '.join(sorted(changed)[:3])}{more}; put them back, {remedy} to go on with these"
        raise ContentsError(f"{run}: began with other inputs: {others}")
    keep(run, found)


def _digest(file: Path) -> str:
    """Return a file's sha256; for weights beyond 16 MiB of size and blocks, the first one with the shapes."""
    with opened(file) as content:
        size = content.seek(0, os.SEEK_END)
        content.seek(0)
        if not file.name.endswith(WEIGHTS) or size <= BLOCK * BLOCKS:
            return hashlib.file_digest(content, "sha256").hexdigest()
        digest = hashlib.sha256(str(size).encode())
        # Evenly spaced blocks, the first and the last of the file among them.
        for number in range(BLOCKS):
            content.seek((size - BLOCK) * number // (BLOCKS - 1))
            digest.update(content.read(BLOCK))
        return digest.hexdigest()

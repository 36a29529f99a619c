"""Checkpoints of a run: written whole or not at all, read back in any parallel layout.

A checkpoint is a folder ``checkpoints/step-00000012`` that appears by one rename after every file in it
is on disk, with a manifest of its files' sizes. ``checkpoints/latest`` names the newest; it is replaced
atomically afterwards. A run killed at any moment leaves the previous checkpoint in force.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing

from megatron_eqlen.training.policy import Policy

LATEST = "latest"
MANIFEST = "manifest.json"


class CheckpointError(ValueError):
    """A checkpoint that cannot be read; the message names the file."""


def save(folder: Path, step: int, policy: Policy, position: dict[str, Any], keep: int) -> Path:
    """Write ``step``'s checkpoint under ``folder`` and drop all but the ``keep`` newest. Collective.

    ``position`` is plain data beside the model: where the data source is, for example.
    """
    final = folder / f"step-{step:08d}"
    if latest(folder) == final:
        return final
    partial = folder / f".step-{step:08d}.partial"
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    state = policy.sharded_state(is_loading=False)
    state["position"] = {"step": step, "policy_version": policy.version, **position}
    state["rng"] = torch.get_rng_state()
    dist_checkpointing.save(state, str(partial), content_metadata=policy.checkpoint_metadata())
    dist.barrier()
    if dist.get_rank() == 0:
        _publish(partial, final)
        _drop_old(folder, keep)
    dist.barrier()
    return final


def load(folder: Path, policy: Policy) -> dict[str, Any] | None:
    """Restore ``policy`` from the newest checkpoint. Collective.

    Returns the checkpoint's position, None where there is no checkpoint. Raises CheckpointError.
    """
    newest = latest(folder)
    if newest is None:
        return None
    _verify(newest)
    state = policy.sharded_state(is_loading=True)
    loaded = dist_checkpointing.load(state, str(newest))
    policy.load_state(loaded)
    position = loaded["position"]
    policy.version = position["policy_version"]
    torch.set_rng_state(loaded["rng"])
    return position


def latest(folder: Path) -> Path | None:
    """The checkpoint that ``folder/latest`` names, None where nothing was saved yet."""
    pointer = folder / LATEST
    if not pointer.is_file():
        return None
    newest = folder / pointer.read_text(encoding="utf-8").strip()
    if not newest.is_dir():
        raise CheckpointError(f"{pointer}: names {newest.name}, which is not there")
    return newest


def _publish(partial: Path, final: Path) -> None:
    files = {path.name: path.stat().st_size for path in sorted(partial.iterdir()) if path.is_file()}
    (partial / MANIFEST).write_text(json.dumps(files, indent=1), encoding="utf-8")
    for path in partial.iterdir():
        _fsync(path)
    _fsync(partial)
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    pointer = final.parent / f".{LATEST}.partial"
    pointer.write_text(final.name + "\n", encoding="utf-8")
    _fsync(pointer)
    pointer.replace(final.parent / LATEST)
    _fsync(final.parent)


def _drop_old(folder: Path, keep: int) -> None:
    for old in sorted(folder.glob("step-*"))[:-keep]:
        shutil.rmtree(old)


def _verify(checkpoint: Path) -> None:
    manifest = checkpoint / MANIFEST
    if not manifest.is_file():
        raise CheckpointError(f"{manifest}: missing; this is not a whole checkpoint")
    for name, size in json.loads(manifest.read_text(encoding="utf-8")).items():
        path = checkpoint / name
        if not path.is_file():
            raise CheckpointError(f"{path}: missing from the checkpoint")
        if path.stat().st_size != size:
            raise CheckpointError(f"{path}: expected {size} bytes, found {path.stat().st_size}")


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

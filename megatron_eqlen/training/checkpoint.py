"""Checkpoints of a run: written whole or not at all, read back in any parallel layout.

A checkpoint is a folder ``checkpoints/step-00000012`` that appears by one rename after every file in it
is on disk, with a manifest of its files' sizes and checksums. ``checkpoints/latest`` names the newest; it is
replaced atomically afterwards. If a run is killed at any moment, ``latest`` still names the previous
checkpoint. If a checkpoint is damaged, the one before it is used.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Collection
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing

from megatron_eqlen.files import CheckpointError, new_folder, step_name, step_number, sweep, unused
from megatron_eqlen.models import checkpoint_folder
from megatron_eqlen.models.megatron_checkpoint import load_sharded
from megatron_eqlen.training.distributed import agree
from megatron_eqlen.training.policy import Policy

logger = logging.getLogger(__name__)


def save(folder: Path, step: int, policy: Policy, position: dict[str, Any], keep: int) -> Path:
    """Write ``step``'s checkpoint under ``folder`` and drop all but the ``keep`` newest. Collective.

    ``position`` is plain data beside the model: where the data source is, for example. Raises NonFiniteError
    instead of writing a state with numbers that are not finite.
    """
    policy.check_finite()
    final = folder / step_name(step)
    if agree(lambda: _in_force(folder) == final):
        return final
    if dist.get_rank() == 0:
        sweep(folder)
        shutil.rmtree(final, ignore_errors=True)  # a leftover: not what ``latest`` names
    with new_folder(final) if dist.get_rank() == 0 else nullcontext() as made:
        partial = agree(lambda: made)
        assert partial is not None
        with policy.memory.readable():
            _write(partial, step, policy, position)
    if dist.get_rank() == 0:
        checkpoint_folder.set_latest(final)
        _drop_old(folder, step, keep)
    dist.barrier()
    return final


def load(folder: Path, policy: Policy) -> dict[str, Any] | None:
    """Restore ``policy`` from the newest checkpoint that is whole. Collective.

    Damaged ones are named in a warning and set aside as ``step-00000012-damaged``. Returns the checkpoint's
    position, None where there is no checkpoint. Raises CheckpointError where there are only damaged ones.
    """
    newest = _newest_whole(folder)
    if newest is None:
        return None
    state = policy.sharded_state(is_loading=True)
    loaded = load_sharded(state, newest)
    policy.load_state(loaded)
    position = loaded["position"]
    policy.version = position["policy_version"]
    torch.set_rng_state(loaded["rng"])
    return position


def _write(partial: Path, step: int, policy: Policy, position: dict[str, Any]) -> None:
    state = policy.sharded_state(is_loading=False)
    state["position"] = {"step": step, "policy_version": policy.version, **position}
    state["rng"] = torch.get_rng_state()
    dist_checkpointing.save(state, str(partial), content_metadata=policy.checkpoint_metadata())
    dist.barrier()
    names = agree(lambda: checkpoint_folder.file_names(partial))
    parts = _by_all_ranks(lambda mine: checkpoint_folder.describe(partial, mine), names)
    if dist.get_rank() == 0:
        checkpoint_folder.write_manifest(partial, {name: one for part in parts for name, one in part.items()})


def _in_force(folder: Path) -> Path | None:
    with suppress(CheckpointError):  # unreadable, but it is replaced now
        return checkpoint_folder.latest(folder)
    return None


def _newest_whole(folder: Path) -> Path | None:
    damaged: dict[str, str] = {}
    candidates, complaint = agree(lambda: _candidates(folder))
    for checkpoint in candidates:
        if fault := _fault(checkpoint):
            damaged[checkpoint.name] = fault
            continue
        if dist.get_rank() == 0 and (damaged or complaint):
            _go_back(checkpoint, damaged, complaint)
        dist.barrier()
        return checkpoint
    if damaged or complaint:
        raise CheckpointError("; ".join(filter(None, [complaint, *damaged.values()])))
    return None


def _candidates(folder: Path) -> tuple[list[Path], str | None]:
    """(checkpoints from the one that ``latest`` names, newest first; the fault of ``latest``, if any)"""
    found = checkpoint_folder.steps(folder)[::-1]
    try:
        pointed = checkpoint_folder.latest(folder)
    except CheckpointError as error:
        return found, str(error)
    if pointed is None:
        return found, f"{folder / checkpoint_folder.LATEST}: no such file" if found else None
    return [pointed, *(path for path in found if path.name < pointed.name)], None


def _fault(checkpoint: Path) -> str | None:
    """The fault of a checkpoint, the same on every rank; each rank reads a part of the files."""
    manifest, fault = agree(lambda: _manifest(checkpoint))
    if fault:
        return fault
    found = _by_all_ranks(lambda mine: checkpoint_folder.faults(checkpoint, manifest, mine), [*manifest])
    return next((fault for part in found for fault in part), None)


def _manifest(checkpoint: Path) -> tuple[checkpoint_folder.Manifest, str | None]:
    try:
        return checkpoint_folder.read_manifest(checkpoint), None
    except CheckpointError as error:
        return {}, str(error)


def _go_back(to: Path, damaged: dict[str, str], complaint: str | None) -> None:
    """Make ``to`` the newest checkpoint; damaged ones are renamed, so that later steps do not meet them."""
    for fault in filter(None, [complaint, *damaged.values()]):
        logger.warning("%s", fault)
    for name in damaged:
        aside = unused(to.with_name(f"{name}-damaged"))
        to.with_name(name).rename(aside)
        logger.warning("%s: set aside; you may examine or remove it", aside)
    checkpoint_folder.set_latest(to)
    logger.warning("%s: the run goes on from this checkpoint", to)


def _drop_old(folder: Path, step: int, keep: int) -> None:
    older = [path for path in checkpoint_folder.steps(folder) if (step_number(path.name) or 0) <= step]
    for old in older[:-keep]:
        shutil.rmtree(old)


def _by_all_ranks(work: Callable[[Collection[str]], Any], names: list[str]) -> list[Any]:
    """``work`` on all names, of which every rank takes its share; all ranks' results."""
    ranks = dist.get_world_size()
    results: list[Any] = [None] * ranks
    dist.all_gather_object(results, work(names[dist.get_rank() :: ranks]))
    return results

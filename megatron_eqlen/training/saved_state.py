"""Checkpoints of a run: written atomically, in the background.

    saving = begin(folder, step, policy, ...)    the state is being written and must not change until ...
    saving.finish()                              ... the checkpoint is in force

A checkpoint is a folder ``checkpoints/step-00000012`` that appears by one rename, when its files and a
manifest with their checksums are on disk. Then ``checkpoints/latest``, the name of the newest one, is
replaced atomically: a killed run keeps the previous one. If it is damaged, the next older one is read.

Every rank writes its shard in a thread: a process would outlive a killed rank and keep its locks. Weights on
the device are copied first; the optimizer state is read in place, so ``finish`` precedes the next update.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest

from megatron_eqlen import files
from megatron_eqlen.hf.folder import writing
from megatron_eqlen.models import checkpoint_folder
from megatron_eqlen.models.checkpoint_folder import CheckpointError
from megatron_eqlen.models.torch_dist import content_metadata, load_sharded, together
from megatron_eqlen.processes.distributed import agree, gather
from megatron_eqlen.training import sharded_state
from megatron_eqlen.training.policy import Policy
from megatron_eqlen.types import Metrics

logger = logging.getLogger(__name__)


class Saving:
    """Checkpoint that is being written. ``move``: renames its folder ``partial`` to ``final`` at the end."""

    def __init__(self, final: Path, partial: Path, move: ExitStack, request: AsyncRequest, keep: int) -> None:
        self.final, self._partial, self._move, self._keep = final, partial, move, keep
        self._request = request
        self._seconds = 0.0
        self._written: checkpoint_folder.Manifest = {}
        self._failure: Exception | None = None
        arguments = [*request.async_fn_args]
        if request.preload_fn is not None:
            arguments[1] = request.preload_fn()  # copies of the data on the device
        self._thread = threading.Thread(target=self._write, args=arguments, name="checkpoint")
        self._thread.start()

    def finish(self) -> Metrics:
        """Wait until every rank has written its part, and put the checkpoint in force. Collective."""
        self._thread.join()
        with self._move, writing(self.final):
            if failures := gather([str(self._failure)] if self._failure else []):
                raise OSError(failures[0])
            for finalize in self._request.finalize_fns:
                finalize()
            parts = gather([(self._seconds, self._written)])
            manifest = {name: entry for _, part in parts for name, entry in part.items()}
            if dist.get_rank() == 0:
                # Megatron's own files, which no rank's thread has written
                others = set(checkpoint_folder.file_names(self._partial)) - manifest.keys()
                manifest |= checkpoint_folder.describe(self._partial, others)
                checkpoint_folder.write_manifest(self._partial, manifest)
        if dist.get_rank() == 0:
            checkpoint_folder.set_latest(self.final)
            step = files.step_number(self.final.name) or 0
            # later steps are of a run that went back before them: they take no place of those kept
            older = [path for number, path in files.step_folders(self.final.parent) if number <= step]
            for old in older[: -self._keep]:
                shutil.rmtree(old)
        size = agree(lambda: sum(entry["bytes"] for entry in manifest.values()))
        return {
            "checkpoint/bytes": float(size),
            "checkpoint/write_seconds": max(seconds for seconds, _ in parts),
        }

    def _write(self, *arguments: Any) -> None:
        """Write this rank's files and compute their checksums."""
        started = time.perf_counter()
        try:
            if self._request.async_fn is not None:
                self._request.async_fn(*arguments, **self._request.async_fn_kwargs)
            own = [file.name for file in self._partial.glob(f"__{dist.get_rank()}_*")]
            self._written = checkpoint_folder.describe(self._partial, own)
        except Exception as error:  # noqa: BLE001  ``finish`` raises it, on every rank
            self._failure = error
        self._seconds = time.perf_counter() - started


def begin(folder: Path, step: int, policy: Policy, position: dict[str, Any], keep: int) -> Saving | None:
    """Begin to write ``step``'s checkpoint under ``folder``, with the plain data ``position``; ``finish``
    removes all but the ``keep`` newest. Return None if the checkpoint exists. Collective."""
    final = folder / files.step_name(step)
    if agree(lambda: _in_force(folder) == final):
        return None
    move = ExitStack()
    if dist.get_rank() == 0:
        files.remove_partial(folder)
        shutil.rmtree(final, ignore_errors=True)  # a leftover that ``latest`` does not name
    partial = agree(lambda: move.enter_context(files.new_folder(final)))
    # parked tensors read their copies on the host, so saving needs no room on the device
    with policy.memory.readable():
        state = sharded_state.of(policy)
        state["position"] = {"step": step, "policy_version": policy.version, **position}
        state["rng"] = torch.get_rng_state()
        content = sharded_state.content(policy)
        request = dist_checkpointing.save(
            state, str(partial), content_metadata=content, async_sharded_save=True, async_strategy="mcore"
        )
        assert request is not None
        # inside the block: what is on the device is copied as the saving begins
        return Saving(final, partial, move, request, keep)


def load(folder: Path, policy: Policy) -> dict[str, Any] | None:
    """Restore ``policy`` from the newest complete checkpoint, and return its position, None if there is none.
    Damaged ones are named in a warning and renamed to ``step-00000012-damaged``. Collective. Raises
    CheckpointError if all are damaged, or if the newest is bound to another layout or has other weights."""
    if (newest := _newest_whole(folder)) is None:
        return None
    saved = together(lambda: content_metadata(newest))
    # refused before any weight is overwritten
    sharded_state.check_content(newest, saved, policy)
    loaded = load_sharded(sharded_state.like(policy), newest)
    sharded_state.load(policy, loaded)
    position = loaded["position"]
    policy.version = position["policy_version"]
    torch.set_rng_state(loaded["rng"])
    return position


def _in_force(folder: Path) -> Path | None:
    with suppress(CheckpointError):  # unreadable, but replaced now
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
        # no rank reads while rank 0 renames
        dist.barrier()
        return checkpoint
    if damaged or complaint:
        raise CheckpointError("; ".join(filter(None, [complaint, *damaged.values()])))
    return None


def _candidates(folder: Path) -> tuple[list[Path], str | None]:
    """Return (checkpoints from the one that ``latest`` names, newest first; ``latest``'s fault, if any)."""
    checkpoints = checkpoint_folder.steps(folder)[::-1]
    try:
        pointed = checkpoint_folder.latest(folder)
    except CheckpointError as error:
        return checkpoints, str(error)
    if pointed is None:
        return checkpoints, f"{folder / files.LATEST}: no such file" if checkpoints else None
    return [pointed, *(path for path in checkpoints if path.name < pointed.name)], None


def _fault(checkpoint: Path) -> str | None:
    """Return the fault of a checkpoint, the same on every rank; each rank reads a part of the files."""
    try:
        manifest = together(lambda: checkpoint_folder.read_manifest(checkpoint))
    except CheckpointError as error:
        return str(error)
    mine = [*manifest][dist.get_rank() :: dist.get_world_size()]
    return next(iter(gather(checkpoint_folder.faults(checkpoint, manifest, mine))), None)


def _go_back(to: Path, damaged: dict[str, str], complaint: str | None) -> None:
    """Make ``to`` the newest checkpoint; rename damaged ones, so that later steps can use their names."""
    for fault in filter(None, [complaint, *damaged.values()]):
        logger.warning("%s", fault)
    for name in damaged:
        aside = files.unused(to.with_name(f"{name}-damaged"))
        to.with_name(name).rename(aside)
        logger.warning("%s: set aside; you may examine or remove it", aside)
    checkpoint_folder.set_latest(to)
    logger.warning("%s: the run continues from this checkpoint", to)

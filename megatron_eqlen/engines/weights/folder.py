"""Weights to all servers by files in a folder that trainer and servers share, a part of the model at a time.

    trainer ──save──► RUN/weights/3.safetensors ◄──read── every worker, told over HTTP      then it is removed

A part is announced when it is complete, under a name that no other part has had.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_eqlen.engines.replica import Replica, ReplicaPool
from megatron_eqlen.hf.folder import save_tensors

PART_BYTES = 512 * 2**20
"""Weights of a file; a larger tensor goes alone."""


class FolderSender:
    """Sends weights to the live replicas of ``pool`` that do not fail. ``folder`` exists during a sync."""

    def __init__(self, pool: ReplicaPool, folder: Path) -> None:
        self.pool, self.folder = pool, folder

    def send(self, named_tensors: Iterable[tuple[str, Tensor]]) -> int:
        """Send the weights; return how many. The next part is written while one is read. Raises EngineError
        when no replica is left, ValueError for a full disk, and whatever ``named_tensors`` raises."""
        count, reading, written = 0, dict[Replica, Any](), self.folder / "none"
        shutil.rmtree(self.folder, ignore_errors=True)  # of a trainer that was killed
        self.folder.mkdir(parents=True)
        try:
            for part in parts(named_tensors, PART_BYTES):
                path = self.folder.absolute() / f"{secrets.token_hex(8)}.safetensors"
                save_tensors(part, path)
                self.pool.settle("update_weights", reading)
                # every replica has read the part before, or was left out
                written.unlink(missing_ok=True)
                body = {"update_info": {"path": str(path)}}
                reading = self.pool.start(lambda replica, body=body: replica.post("update_weights", body))
                count, written = count + len(part), path
        finally:
            try:
                self.pool.settle("update_weights", reading)
            finally:
                shutil.rmtree(self.folder, ignore_errors=True)
        return count


def parts(named_tensors: Iterable[tuple[str, Tensor]], limit: int) -> Iterator[dict[str, Tensor]]:
    """Group a stream of weights into parts of at most ``limit`` bytes on the CPU; larger tensors go alone."""
    part: dict[str, Tensor] = {}
    size = 0
    for name, tensor in named_tensors:
        tensor = tensor.detach().cpu().contiguous()
        if part and size + tensor.nbytes > limit:
            yield part
            part, size = {}, 0
        part[name] = tensor
        size += tensor.nbytes
    if part:
        yield part

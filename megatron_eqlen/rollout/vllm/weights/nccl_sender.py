"""Weights to all servers at once by NCCL broadcasts, for trainers and servers that share a fabric.

The group is the trainer's sending rank and every worker of every live replica; vLLM's own packed broadcast
(``vllm.distributed.weight_transfer``) fills and empties its buffers. Unlike with TCP, a replica that dies in
the middle ends the sync for all: NCCL cannot leave a member out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import accumulate, chain
from math import prod
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.nccl_common import (
    NCCLWeightTransferInitInfo,
    trainer_init,
    worker_init_payload,
)
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferUpdateInfo
from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

from megatron_eqlen.rollout.engine import EngineError
from megatron_eqlen.rollout.vllm.server.pool import ReplicaPool
from megatron_eqlen.rollout.vllm.server.replica import ServerReplica
from megatron_eqlen.rollout.vllm.weights.feed import listen_towards

BUFFERS, BUFFER_BYTES = 2, 256 * 2**20
"""Buffers on each side while weights are sent."""


class NcclSender:
    """A ``WeightSender``. The group is made at the first sync, and again when the set of live replicas
    changes.

    ``shapes``: of all weights in the order in which they are sent, by Hugging Face name. Raises EngineError
    on a machine without a GPU.
    """

    def __init__(self, pool: ReplicaPool, shapes: dict[str, tuple[int, ...]]) -> None:
        if not torch.cuda.is_available():
            raise EngineError(
                "rollout.sync: nccl sends from GPU to GPU, and this process has no GPU: use rollout.sync: tcp"
            )
        self.pool = pool
        self.shapes = shapes
        self.members: list[ServerReplica] = []
        self.group: Any = None

    def send(self, named_tensors: Iterable[tuple[str, Tensor]]) -> int:
        if self.members != self.pool.alive:
            self._meet()
        stream = self._in_order(iter(named_tensors))
        first = next(stream)
        announcement = {"update_info": self._announcement(first[1].dtype)}
        receiving = self.pool.start(lambda replica: replica.post("update_weights", announcement))
        packed_nccl_broadcast_producer(
            iterator=_made_on(torch.cuda.current_stream(), chain([first], stream)),
            group=self.group,
            src=0,
            post_iter_func=lambda item: item[1],
            buffer_size_bytes=BUFFER_BYTES,
            num_buffers=BUFFERS,
        )
        self.pool.settle("update_weights", receiving)
        return first[1].dtype.itemsize * sum(map(prod, self.shapes.values()))

    def _meet(self) -> None:
        """Make the group: this process is its rank 0, then come the workers, replica by replica."""
        self.members = self.pool.alive
        counts = [replica.workers for replica in self.members]
        first_ranks = accumulate(counts, initial=1)
        with self.pool.io.run(listen_towards(self.members[0].url)) as listener:
            host, port = listener.getsockname()[:2]
        place = {"master_address": host, "master_port": port, "world_size": 1 + sum(counts)}
        infos = {
            replica: _worker_info(place, rank)
            for replica, rank in zip(self.members, first_ranks, strict=False)
        }
        meeting = self.pool.start(
            lambda replica: replica.post(
                "init_weight_transfer_engine", {"init_info": worker_init_payload(infos[replica])}
            )
        )
        self.group = trainer_init(place)
        self.pool.settle("init_weight_transfer_engine", meeting)

    def _announcement(self, dtype: torch.dtype) -> dict[str, Any]:
        return asdict(
            NCCLWeightTransferUpdateInfo(
                names=list(self.shapes),
                dtype_names=[str(dtype).removeprefix("torch.")] * len(self.shapes),
                shapes=[list(shape) for shape in self.shapes.values()],
            )
        )

    def _in_order(self, named_tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the same weights, checked against the announced order and dtype, by which workers cut the
        stream."""
        dtype = None
        for expected, (name, tensor) in zip(self.shapes, named_tensors, strict=False):
            dtype = dtype or tensor.dtype
            if (name, tensor.dtype) != (expected, dtype):
                raise EngineError(f"weight {name!r}: expected {expected!r} of {dtype}, found {tensor.dtype}")
            yield name, tensor
        for _ in named_tensors:  # it checks that nothing is missing or left over at its end
            raise EngineError("weights: more were sent than announced")


def _made_on(
    stream: torch.cuda.Stream, named_tensors: Iterator[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the same weights, made on ``stream`` and safe to read on the stream that asks for them.

    vLLM's producer asks and packs on several streams of its own, which wait neither for ours nor for each
    other: it could read a weight before the optimizer has written it, or a tensor that was gathered on
    another of its streams, or memory that has been freed and used again.
    """
    while True:
        with torch.cuda.stream(stream):
            named = next(named_tensors, None)
        if named is None:
            return
        reader = torch.cuda.current_stream()
        reader.wait_stream(stream)
        named[1].record_stream(reader)  # the allocator hands its memory out only after the read
        yield named


def _worker_info(place: dict[str, Any], first_rank: int) -> NCCLWeightTransferInitInfo:
    """Return the settings of one replica's workers, the first of which has ``first_rank``."""
    return NCCLWeightTransferInitInfo(
        **place,
        rank_offset=first_rank,
        packed=True,
        packed_buffer_size_bytes=BUFFER_BYTES,
        packed_num_buffers=BUFFERS,
    )

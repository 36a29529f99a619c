"""Weights to all servers at once by NCCL broadcasts, for trainers and servers that share a fabric.

The group is the trainer's sending rank and every worker of every live replica. It lives for one sync: a
server that was started again is in none, and buffers take memory. Workers get NCCL's unique id over HTTP with
the servers' secret; vLLM's other way is a store that anybody may write to, whose values are unpickled.
vLLM's packed broadcast (``vllm.distributed.weight_transfer``) fills and empties its buffer. Unlike with
files, a replica that dies in the middle ends the sync for all: NCCL cannot leave a member out.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import accumulate, chain
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary
from vllm.distributed.weight_transfer.nccl_common import (
    NCCLWeightTransferInitInfo,
    uid_init_process_group,
    worker_init_payload,
)
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferUpdateInfo
from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

from megatron_eqlen.engines.protocol import EngineError
from megatron_eqlen.engines.replica import Replica, ReplicaPool
from megatron_eqlen.engines.weight_table import WeightTable

Stream = Iterator[tuple[str, Tensor]]
BUFFER_BYTES = 256 * 2**20
BUFFERS = 1
"""Buffers on each side. With two, vLLM fills one on a second stream while a layer that is not complete still
holds views of the other, whose memory no stream keeps (``record_stream``)."""


class NcclSender:
    """Sends weights to the live replicas of ``pool``. ``table``: all weights, in sending order. Raises
    EngineError without a GPU."""

    def __init__(self, pool: ReplicaPool, table: WeightTable) -> None:
        if not torch.cuda.is_available():
            lacks = "nccl sends from GPU to GPU, and this process has no GPU"
            raise EngineError(f"rollout.sync: {lacks}: use rollout.sync: folder")
        self.pool = pool
        self.table = table

    def send(self, named_tensors: Iterable[tuple[str, Tensor]]) -> int:
        """Send the weights; return 0, for none by files. Raises EngineError when no replica is left."""
        group, shapes, coming = self._meet(), self.table.shapes, iter(named_tensors)
        # the first weight tells the dtype of all that are trained; `_in_order` refuses any other
        first = next(coming)
        dtypes = {name: torch.float32 if name in self.table.wide else first[1].dtype for name in shapes}
        info = NCCLWeightTransferUpdateInfo(
            names=list(shapes),
            dtype_names=[str(dtype).removeprefix("torch.") for dtype in dtypes.values()],
            shapes=[list(shape) for shape in shapes.values()],
        )
        body = {"update_info": asdict(info)}
        # not waited for: workers answer when the broadcast, which needs them all, has ended
        receiving = self.pool.start(lambda replica: replica.post("update_weights", body))
        broadcast(_in_order(chain([first], coming), dtypes), group)
        self.pool.settle("update_weights", receiving)
        group.destroy()  # when all have received: it drops what is under way
        return 0

    def _meet(self) -> Any:
        """Make the group: this process is its rank 0, then come the workers, replica by replica."""
        counts = {replica: replica.workers for replica in self.pool.alive}
        # the last sum is the world's size, and no replica's
        first_ranks = dict(zip(counts, accumulate(counts.values(), initial=1), strict=False))
        world, unique_id = 1 + sum(counts.values()), bytes(NCCLLibrary().ncclGetUniqueId().internal)

        async def invite(replica: Replica) -> None:
            info = NCCLWeightTransferInitInfo(
                rank_offset=first_ranks[replica],
                world_size=world,
                nccl_unique_id_b64=b64encode(unique_id).decode(),
                packed=True,
                packed_buffer_size_bytes=BUFFER_BYTES,
                packed_num_buffers=BUFFERS,
            )
            await replica.post("init_weight_transfer_engine", {"init_info": worker_init_payload(info)})

        # NCCL waits for all members: the workers must be joining while this rank does
        meeting = self.pool.start(invite)
        group = uid_init_process_group(unique_id, 0, world, torch.cuda.current_device())
        self.pool.settle("init_weight_transfer_engine", meeting)
        return group


def _in_order(named_tensors: Stream, dtypes: dict[str, torch.dtype]) -> Stream:
    """Yield weights, checked against the announced order and dtypes, by which workers cut the stream."""
    for (expected, dtype), (name, tensor) in zip(dtypes.items(), named_tensors, strict=False):
        if (name, tensor.dtype) != (expected, dtype):
            raise EngineError(f"weight {name!r}: expected {expected!r} of {dtype}, found {tensor.dtype}")
        yield name, tensor
    for _ in named_tensors:  # it checks that nothing is missing or left over at its end
        raise EngineError("weights: more were sent than announced")


def broadcast(named_tensors: Stream, group: Any) -> None:
    """Broadcast weights from rank 0 of ``group``. vLLM's packing stream does not await the optimizer's."""
    torch.cuda.current_stream().synchronize()
    packed_nccl_broadcast_producer(
        named_tensors, group, 0, itemgetter(1), buffer_size_bytes=BUFFER_BYTES, num_buffers=BUFFERS
    )

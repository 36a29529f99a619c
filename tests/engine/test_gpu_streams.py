"""Orders of work that only a GPU can get wrong, on a machine without one.

Copies between device and host: ``Gpu`` delivers an asynchronous copy when the host waits for it. Streams:
torch's own sanitizer for CUDA, which looks for kernels that no event orders. Places of tensors: fake CUDA
tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.cuda._sanitizer import CUDASanitizerDispatchMode, CUDASanitizerErrors, EventHandler
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.distributed.weight_transfer import packed_tensor

from megatron_eqlen.engines.weights import nccl
from megatron_eqlen.models.tree_params import TreeParams
from megatron_eqlen.training.parking import Parked, memory_of
from tests.kit.tree_samples import pack
from tests.kit.tree_samples import stream as tree_of

UNWRITTEN = 119


class Hazard(Exception):
    """An order of work in which a GPU may read or write other numbers."""


class Gpu(TorchFunctionMode):
    """CPU tensors as a GPU's. A copy to the host leaves other bytes there until the host waits; the source of
    a copy to the device must stay as it is until then; both must be pinned. Freed memory must be idle."""

    def __init__(self, patch: pytest.MonkeyPatch, waits: bool = True) -> None:
        super().__init__()
        self.waits = waits
        self.pinned: list[Tensor] = []
        self.arriving: list[tuple[Tensor, Tensor]] = []
        self.reading: list[tuple[Tensor, Tensor]] = []
        """Targets or sources of copies on the host, and their numbers."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: Any, size: int) -> Any:
            if (self.arriving or self.reading) and size == 0:
                raise Hazard("memory is freed before its copies have ended")
            return resize(storage, size)

        patch.setattr(torch.UntypedStorage, "device", torch.device("cuda"))
        patch.setattr(torch.UntypedStorage, "resize_", resized)
        event = SimpleNamespace(record=lambda: None, synchronize=self.wait)
        for name, replacement in {
            "is_available": lambda: True,
            "synchronize": self.wait,
            "empty_cache": lambda: None,
            "Event": lambda: event,
        }.items():
            patch.setattr(torch.cuda, name, replacement)

    def wait(self) -> None:
        if self.waits:
            self.check()
            for target, numbers in self.arriving:
                target.copy_(numbers)
            self.arriving.clear()

    def check(self) -> None:
        if not all(torch.equal(source, numbers) for source, numbers in self.reading):
            raise Hazard("the host writes to what the device still reads")
        self.reading.clear()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs.pop("device", None)
            pinned = kwargs.pop("pin_memory", False)
            made = func(*args, **kwargs)
            self.pinned += [made] if pinned else []
            return made
        if func is torch.Tensor.copy_ and kwargs.get("non_blocking"):
            return self.copy(*args)
        if func is torch.Tensor.to and args[1:] == ("cpu",) and kwargs.get("non_blocking"):
            target = torch.empty_like(args[0])
            self.pinned.append(target)  # as torch does
            return self.copy(target, args[0])
        return func(*args, **kwargs)

    def copy(self, target: Tensor, source: Tensor) -> Tensor:
        to_host, from_host = (
            any(memory_of(tensor) == memory_of(each) for each in self.pinned) for tensor in (target, source)
        )
        if to_host == from_host:
            raise Hazard("an asynchronous copy needs memory on the host that is pinned")
        if to_host:
            self.check()  # the stream orders copies
        numbers = source.clone()
        target.fill_(UNWRITTEN) if to_host else target.copy_(source)

        (self.arriving if to_host else self.reading).append((target if to_host else source, numbers))
        return target


def test_parking_frees_memory_after_its_copies_and_the_host_reads_them_whole(monkeypatch):
    numbers = torch.arange(6.0)
    weight = numbers.clone()
    view = weight[2:]
    parked = Parked(lambda: [weight, view])
    with Gpu(monkeypatch) as gpu:
        for _ in range(2):
            parked.park()
            assert weight.untyped_storage().nbytes() == 0
            assert parked.host(view).tolist() == numbers[2:].tolist()
            parked.unpark()
            assert weight.tolist() == numbers.tolist()
        gpu.wait()


def test_parking_without_the_wait_is_a_hazard(monkeypatch):
    weight = torch.arange(6.0)
    with Gpu(monkeypatch, waits=False), pytest.raises(Hazard, match="freed before its copies have ended"):
        Parked(lambda: [weight]).park()


class Streams(CUDASanitizerDispatchMode):
    """CPU tensors on streams of a GPU: raises CUDASanitizerErrors at a kernel that reads or writes what a
    kernel of another stream writes, unless one waits for the other."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        TorchDispatchMode.__init__(self)
        self.event_handler = EventHandler()
        self.kept: list[Any] = []
        """Memory is not used twice."""
        self.main = self.current = self.stream(0)
        self.streams = (self.stream(1), self.stream(2))
        patch.setattr(torch.Tensor, "is_cuda", True)
        patch.setattr(torch.cuda, "current_stream", lambda: self.current)
        patch.setattr(torch.cuda, "stream", self._entered)
        patch.setattr(torch.accelerator, "current_device_index", lambda: 0)
        patch.setattr(packed_tensor, "_get_streams", lambda device, count: self.streams[:count])

    def stream(self, number: int) -> Any:
        def synchronize() -> None:
            self.event_handler._handle_stream_synchronization(number)

        return SimpleNamespace(cuda_stream=number, synchronize=synchronize)

    @contextlib.contextmanager
    def _entered(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.kept.append(super().__torch_dispatch__(func, types, args, kwargs))
        return self.kept[-1]


def send(streams: Streams) -> list[float]:
    """Send eight weights as soon as the optimizer has written them; return the numbers sent."""
    weights = [torch.full((16,), float(number)) for number in range(8)]
    sent: list[Tensor] = []
    with streams:
        for weight in weights:
            weight.add_(1)
        group = SimpleNamespace(broadcast=lambda packed, src: sent.append(packed.clone()))
        nccl.broadcast((("weight", weight * 2) for weight in weights), group)
        for weight in weights:
            weight.add_(1)  # the next update
    return [float(number) for packed in sent for number in packed.view(torch.float32)[::16]]


def test_vllms_producer_packs_weights_after_they_are_written(monkeypatch):
    monkeypatch.setattr(nccl, "BUFFER_BYTES", 100)
    assert send(Streams(monkeypatch)) == [2.0 * (number + 1) for number in range(8)]


def test_without_our_order_vllms_producer_may_read_weights_that_are_not_written(monkeypatch):
    streams = Streams(monkeypatch)
    streams.main.synchronize = lambda: None
    with pytest.raises(CUDASanitizerErrors):
        send(streams)


class SharedMemory(Streams):
    """Streams that use memory again as PyTorch's allocator does: a block goes back to the stream that it was
    made on once nothing on the host holds it, whatever other streams still read."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__(patch)
        self.blocks: list[tuple[Any, Tensor, int]] = []
        """Stream, memory, and the number of its holders while it is free."""
        self.sent: int | None = None
        self.make = torch.empty
        patch.setattr(torch, "empty", self.empty)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return CUDASanitizerDispatchMode.__torch_dispatch__(self, func, types, args, kwargs)

    def empty(self, size: int, dtype: torch.dtype, device: str) -> Tensor:
        for stream, block, free in self.blocks:
            if stream is self.current and block.numel() >= size and holders(block) == free:
                return block[:size]
        block = self.make(size, dtype=dtype)
        self.blocks.append((self.current, block, holders(block)))
        return block[:size]

    def broadcast(self, packed: Tensor, src: int) -> None:
        """Write as NCCL does: a communicator's kernels wait for each other, whatever their streams."""
        if self.sent is not None:
            self.event_handler._handle_event_wait(self.sent, self.current.cuda_stream)
        packed.fill_(1)
        self.sent = 0 if self.sent is None else self.sent + 1
        self.event_handler._handle_event_record(self.sent, self.current.cuda_stream)


def holders(tensor: Tensor) -> int:
    return torch._C._storage_Use_Count(memory_of(tensor))


def receive(memory: SharedMemory, buffers: int, per_layer: int = 8) -> None:
    """Receive layers of ``per_layer`` weights, two in a message. Like vLLM's layerwise reload, keep views of
    a layer's weights until all are there."""
    targets = iter([torch.zeros(16) for _ in range(6 * per_layer)])
    kept: list[Tensor] = []

    def load(named_tensors: list[tuple[str, Tensor]]) -> None:
        for _, weight in named_tensors:
            kept.append(weight)
            if len(kept) == per_layer:
                for each in kept:
                    next(targets).copy_(each)
                kept.clear()

    with memory:
        packed_tensor.packed_nccl_broadcast_consumer(
            iterator=(("weight", ([16], torch.float32)) for _ in range(6 * per_layer)),
            group=SimpleNamespace(broadcast=memory.broadcast),
            src=0,
            post_unpack_func=load,
            buffer_size_bytes=100,
            num_buffers=buffers,
            device="cpu",
        )
    assert next(targets, None) is None
    assert len(memory.blocks) < 3 * per_layer, "memory is used again"


def test_vllms_consumer_reads_a_layer_before_its_memory_takes_the_next(monkeypatch):
    receive(SharedMemory(monkeypatch), nccl.BUFFERS)


def test_with_two_buffers_vllms_consumer_may_read_another_layers_weights(monkeypatch):
    with pytest.raises(CUDASanitizerErrors):
        receive(SharedMemory(monkeypatch), 2)


def test_all_tensors_of_a_row_lie_on_the_gpu():
    row = pack([tree_of(np.random.default_rng(0), 7, [5, 70, 3])], 300, multiple_of=4)[0][0]
    with FakeTensorMode(allow_non_fake_inputs=True):
        tree = TreeParams.from_row(row, "cuda")
        found = [tree.position_ids, tree.visible_until, *tree.seams(4)]
        for level in tree.run_levels:
            found += [level.positions, level.cu_seqlens, level.chunk_indices, level.parents]
        chunks = tree.chunks(64)
        found += [chunks.positions, chunks.slots, *chunks.parents]
    assert {tensor.device.type for tensor in found} == {"cuda"}

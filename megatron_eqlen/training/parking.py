"""Memory that moves between device and host: the trainer's, parked while the engine is awake, and the
reference model's weights. What is restored is restored bit for bit.

    parked.park()          moves the numbers to host memory and frees the device's memory
    parked.host(tensor)    while parked: a tensor with the same numbers, on the host
    parked.readable()      while parked: the tensors read the copies on the host
    parked.unpark()        restores the numbers

The storage under the tensors is emptied; the tensors stay, and all references to them or to views of them
(Megatron's buckets, the optimizer's shards, autograd's hooks) are valid again after ``unpark``.
Megatron-Core's own ``optimizer.offload_to_cpu`` gives each tensor new memory, so that shards are no longer
views of the model's weights, and moves a host optimizer's state to the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from torch import Tensor, UntypedStorage


class Parked:
    """Storages under some tensors, on the device or parked in host memory. ``tensors``: called at each
    parking, since an optimizer may replace its tensors. ``keep``: False: they are zeros after ``unpark``."""

    def __init__(self, tensors: Callable[[], Iterable[Tensor]], keep: bool = True) -> None:
        self._ask, self._keep = tensors, keep
        self._tensors: list[Tensor] = []
        self._storages: dict[int, UntypedStorage] = {}
        self._sizes: dict[int, int] = {}
        self._copies: dict[int, Tensor] = {}
        """Host memory by storage, kept for the next parking since pinning is slow."""
        self.away = False

    @torch.no_grad()
    def park(self) -> None:
        """Free the device's memory. No effect while parked."""
        if self.away:
            return
        self._tensors = [tensor for tensor in self._ask() if tensor.numel()]
        self._storages = {memory_of(tensor): tensor.untyped_storage() for tensor in self._tensors}
        self._sizes = {key: storage.nbytes() for key, storage in self._storages.items()}
        if self._keep:
            self._copies = {key: self._copy(key) for key in self._storages}
        self._empty()

    @torch.no_grad()
    def unpark(self) -> None:
        """Allocate the memory again and restore the numbers. No effect unless parked."""
        if not self.away:
            return
        for key, storage in self._storages.items():
            # the storage object stays, so all tensors and views of it are valid again
            storage.resize_(self._sizes[key])
            target = _bytes(storage)
            target.copy_(self._copies[key], non_blocking=True) if self._keep else target.zero_()
        self.away = False

    def host(self, tensor: Tensor) -> Tensor:
        """Return the tensor's numbers, for reading: while parked a view of the copy on the host."""
        if not self.away or memory_of(tensor) not in self._copies or not tensor.numel():
            return tensor
        copy = self._copies[memory_of(tensor)].untyped_storage()
        # a view of the host's bytes at the tensor's own place and strides
        like = torch.empty(0, dtype=tensor.dtype)
        return like.set_(copy, tensor.storage_offset(), tensor.size(), tensor.stride())

    @contextlib.contextmanager
    def readable(self, but: Iterable[Tensor] = ()) -> Iterator[None]:
        """Make parked tensors other than ``but`` read their numbers on the host in the block; do not write to
        them. ``but`` must hold the parameters of modules in training (read them by ``host``): when ``data``
        of a parameter moves, torch drops its gradient hooks, and Megatron's gradients stay 0 from then on."""
        # tensors by identity: equal numbers are not the same tensor
        left_out = set(map(id, but))
        own = [(tensor, tensor.data) for tensor in self._tensors if self.away and id(tensor) not in left_out]
        for tensor, on_device in own:
            tensor.data = self.host(on_device)
        try:
            yield
        finally:
            for tensor, on_device in own:
                tensor.data = on_device

    @contextlib.contextmanager
    def resident(self) -> Iterator[None]:
        """Restore the numbers on the device for reading in the block; then park again if they were parked."""
        away = self.away
        self.unpark()
        try:
            yield
        finally:
            if away:
                self._empty()  # the copies on the host are still valid

    def _empty(self) -> None:
        """Free the memory, for other allocators as well, once the device has finished its work."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        for storage in self._storages.values():
            storage.resize_(0)
        torch.cuda.empty_cache()
        self.away = True

    def _copy(self, key: int) -> Tensor:
        """Return the storage's bytes on the host."""
        storage, copy = self._storages[key], self._copies.get(key)
        if copy is None or copy.numel() != storage.nbytes():
            pin = storage.device.type == "cuda"
            copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pin)
        return copy.copy_(_bytes(storage), non_blocking=True)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the memory under these tensors; shared memory counts once."""
    storages = {memory_of(tensor): tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def memory_of(tensor: Tensor) -> int:
    """Return an identifier of the memory under a tensor, the same for tensors that share it."""
    return tensor.untyped_storage()._cdata


def _bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class TrainerMemory:
    """The trainer's memory on the device. ``ddp_chunks``: the model's chunks in Megatron's DDP, whose
    ``buffers`` is not torch's. ``parked``: the parts that ``park`` frees (``rollout.park_trainer``)."""

    def __init__(
        self, ddp_chunks: Sequence[Any], optimizer: ChainedOptimizer, parked: Literal["none", "state", "all"]
    ) -> None:
        self._buffers = [b for chunk in ddp_chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        self._parameters = [parameter for chunk in ddp_chunks for parameter in chunk.parameters()]
        self._optimizer = optimizer
        self.weights = Parked(self._weights)
        # an update begins with gradients of 0: only their memory comes back
        self.gradients = Parked(lambda: [buffer.grad_data for buffer in self._buffers], keep=False)
        self.state = Parked(self._state)
        parts = {"none": [], "state": [self.gradients, self.state]}
        self._parts: list[Parked] = parts.get(parked, [self.gradients, self.state, self.weights])

    def park(self) -> None:
        if self._parts:
            self._optimizer.zero_grad()  # may be a copy of the gradient in another dtype
        for part in self._parts:
            part.park()

    def unpark(self) -> None:
        for part in reversed(self._parts):
            part.unpark()

    @property
    def away(self) -> bool:
        """True while the trainer's memory is parked and nothing can be trained."""
        return self.gradients.away

    @contextlib.contextmanager
    def readable(self) -> Iterator[None]:
        """Make the optimizer state readable in the block; read parameters through ``weights.host``."""
        with self.weights.readable(but=self._parameters), self.state.readable():
            yield

    def on_device(self) -> dict[str, int]:
        """Return the bytes on the device now, by part (``phases.MemoryPart``)."""
        gradients = [buffer.grad_data for buffer in self._buffers]
        parts = {"weights": self._weights(), "gradients": gradients, "optimizer": self._state()}
        return {name: storage_bytes(tensors) for name, tensors in parts.items()}

    def _weights(self) -> list[Tensor]:
        """Return the parameters, and the optimizer's shards that are views of them."""
        return [*self._parameters, *self._optimizers_own(of_weights=True)]

    def _state(self) -> list[Tensor]:
        """Return the main weights and moments that are on the device."""
        return self._optimizers_own(of_weights=False)

    def _optimizers_own(self, of_weights: bool) -> list[Tensor]:
        """Return the optimizer's tensors on the device: those that are views of weights, or all others."""
        tensors: list[Tensor] = []
        for part in self._optimizer.chained_optimizers:
            tensors += [tensor for group in part.param_groups for tensor in group["params"]]
            # a host optimizer's state is on the host, and so is torch's step, which has no dimension
            on_host = isinstance(part.optimizer, HybridDeviceOptimizer)
            states = [] if on_host else part.optimizer.state.values()
            values = [value for state in states for value in state.values() if isinstance(value, Tensor)]
            tensors += [value for value in values if value.dim()]
        weights = {memory_of(parameter) for parameter in self._parameters}
        return [tensor for tensor in tensors if (memory_of(tensor) in weights) == of_weights]


class ReferenceWeights:
    """Frozen copy of a model's current weights, in host memory (pinned with CUDA)."""

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        self._params = [param for chunk in chunks for param in chunk.parameters()]
        self._copies = [_host_copy(param) for param in self._params]

    @contextlib.contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Compute with the reference weights in the block; then restore the policy's bit for bit."""
        policy = [_host_copy(param) for param in self._params]
        _write(self._params, self._copies)
        try:
            yield
        finally:
            _write(self._params, policy)


def _host_copy(param: Tensor) -> Tensor:
    copy = torch.empty(param.shape, dtype=param.dtype, pin_memory=param.is_cuda)
    return copy.copy_(param.detach())


@torch.no_grad()
def _write(params: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for param, value in zip(params, values, strict=True):
        param.copy_(value)

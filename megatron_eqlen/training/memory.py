"""The trainer's part of a GPU's memory: weights, gradients and optimizer state."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from torch import Tensor

from megatron_eqlen.training.parking import Parked, memory_of, storage_bytes


class TrainerMemory:
    """``model``: the chunks in Megatron's DistributedDataParallel, whose ``buffers`` is not torch's method.
    ``parked``: the parts that ``park`` frees, see ``rollout.park_trainer``."""

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        model: Sequence[Any],
        optimizer: ChainedOptimizer,
        parked: Literal["none", "state", "all"],
    ) -> None:
        self._buffers = [
            buffer for chunk in model for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
        ]
        self._parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
        self._optimizer = optimizer
        self.weights = Parked(self._weights)
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
        """Make the optimizer state readable in the block, on the device or on the host; the model's
        parameters are read through ``weights.host``."""
        with self.weights.readable(but=self._parameters), self.state.readable():
            yield

    def on_device(self) -> dict[str, int]:
        """Return the bytes on the device now, by part (``phases.Part``)."""
        parts = {
            "weights": self._weights(),
            "gradients": [buffer.grad_data for buffer in self._buffers],
            "optimizer": self._state(),
        }
        return {name: storage_bytes(tensors) for name, tensors in parts.items()}

    def _weights(self) -> list[Tensor]:
        """Return the parameters, and the optimizer's shards that are views of them."""
        weights = {memory_of(parameter) for parameter in self._parameters}
        shards = [tensor for tensor in self._optimizers_own() if memory_of(tensor) in weights]
        return [*self._parameters, *shards]

    def _state(self) -> list[Tensor]:
        """Yield the main weights and moments that are on the device."""
        weights = {memory_of(parameter) for parameter in self._parameters}
        return [tensor for tensor in self._optimizers_own() if memory_of(tensor) not in weights]

    def _optimizers_own(self) -> Iterator[Tensor]:
        for part in self._optimizer.chained_optimizers:
            for group in part.param_groups:
                yield from group["params"]
            if isinstance(part.optimizer, HybridDeviceOptimizer):
                continue  # the state is on the host
            for state in part.optimizer.state.values():
                tensors = (value for value in state.values() if isinstance(value, Tensor))
                yield from (tensor for tensor in tensors if tensor.dim())  # torch's step is on the host

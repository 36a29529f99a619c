"""Adapters of low rank on Megatron's linear layers, in any parallel layout.

    layer            input x             A                B                between A and B
    column-parallel  whole, or a part    whole            own rows of W    gathered along the sequence, or
                     of the sequence                                       summed over TP in the backward pass
    row-parallel     own columns of W    own columns      whole            summed over TP, and scattered along
                                                                           the sequence with sequence parallel
    expert           as above, but Megatron's token dispatcher communicates before the first layer and after
                     the second: nothing is sent between A and B, and the gradient of the whole matrix is
                     summed over expert-tensor-parallel ranks

The model's own weights are frozen, without gradients and optimizer state. With the adapters switched off the
model is the one that training started from, bit for bit.
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import Tensor

from megatron_eqlen.hf.adapter_map import AdapterWeights, adapter_map
from megatron_eqlen.hf.weight_map import Weight
from megatron_eqlen.models import groups
from megatron_eqlen.models.names import global_name, model_config, unwrapped
from megatron_eqlen.recipe import LoraRecipe


class Adapter(torch.nn.Module):
    """This rank's parts of the adapter of one weight.

    Args:
        weights: names and whole shapes.
        like: the layer's weight on this rank; gives dtype and device.
        sequence: sequence parallelism is on.
        seed: A is drawn from it and from the weight's name, whole, so that it does not depend on the layout.
    """

    def __init__(
        self, weights: AdapterWeights, lora: LoraRecipe, like: Tensor, sequence: bool, seed: int
    ) -> None:
        super().__init__()
        self.weights, self.scale, self.on = weights, lora.alpha / lora.rank, True
        self._expert = weights.base.expert is not None
        self._by_rows, self._sequence = weights.base.dim == 0, sequence and not self._expert
        self._group = groups.tensor_group(weights.base)
        rows, columns = like.shape
        # [rank, in]; a row-parallel layer keeps its columns, [rank, in / TP]
        A = _initial(weights.A, seed)
        if not self._by_rows:
            A = A.chunk(self._group.size(), dim=1)[self._group.rank()]
        assert A.shape[1] == columns
        self.A = torch.nn.Parameter(A.to(like))
        self.B = torch.nn.Parameter(like.new_zeros(rows, lora.rank))
        # Megatron counts a divided matrix on every rank in the gradient's norm, a whole one once
        whole, divided = (self.A, self.B) if self._by_rows else (self.B, self.A)
        set_tensor_model_parallel_attributes(divided, True, 0 if self._by_rows else 1, 1)
        for parameter in (self.A, self.B):
            parameter.allreduce = not self._expert  # pyright: ignore[reportAttributeAccessIssue] (Megatron's mark)
        # each rank has the gradient of its part of the sequence: Megatron sums such parameters over TP
        whole.sequence_parallel = self._sequence  # pyright: ignore[reportAttributeAccessIssue] (Megatron's mark)

    def forward(self, x: Tensor) -> Tensor:
        """Return what the adapter adds to the layer's output: [..., in] -> [..., out], as the layer's."""
        A, B = self.A, self.B
        # the identity; its backward pass sums the whole matrix's gradient over the group
        if self._expert and self._by_rows:
            A = copy_to_tensor_model_parallel_region(A, group=self._group)
        elif self._expert:
            B = copy_to_tensor_model_parallel_region(B, group=self._group)
        narrow = F.linear(x, A)
        if not self._expert:
            narrow = self._exchanged(narrow)
        return F.linear(self.scale * narrow, B)

    def _exchanged(self, narrow: Tensor) -> Tensor:
        if self._by_rows:
            if self._sequence:
                return gather_from_sequence_parallel_region(narrow, group=self._group)
            return copy_to_tensor_model_parallel_region(narrow, group=self._group)
        if self._sequence:
            return reduce_scatter_to_sequence_parallel_region(narrow, group=self._group)
        return reduce_from_tensor_model_parallel_region(narrow, group=self._group)


def add_adapters(chunks: Sequence[torch.nn.Module], lora: LoraRecipe, seed: int) -> None:
    """Freeze the model's weights and add adapters. Raises ValueError if no layer is of a target."""
    mapped = adapter_map(model_config(chunks), lora.rank, lora.targets)
    by_name = {weights.base.megatron: weights for weights in mapped}
    for chunk in map(unwrapped, chunks):
        for name, parameter in [*chunk.named_parameters()]:
            parameter.requires_grad_(False)
            if (weights := by_name.get(global_name(chunk, name))) is not None:
                adapter = Adapter(weights, lora, parameter, chunk.config.sequence_parallel, seed)
                _attach(chunk.get_submodule(name.rpartition(".")[0]), name, adapter)


def adapters(chunks: Iterable[torch.nn.Module]) -> dict[str, Adapter]:
    """Return this rank's adapters, by the names of the weights that they change."""
    found = (module for chunk in chunks for module in chunk.modules() if isinstance(module, Adapter))
    return {adapter.weights.base.megatron: adapter for adapter in found}


def merged(weight: Tensor, A: Tensor, B: Tensor, scale: float) -> Tensor:
    """Return W + scale B A, computed in at least float32, in the weight's dtype."""
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32), copy=True)
    wide.addmm_(B.to(wide), A.to(wide), alpha=scale)
    return wide.to(weight.dtype)


@contextlib.contextmanager
def switched_off(chunks: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Compute with the model's own weights alone in the block."""
    own = [*adapters(chunks).values()]
    for adapter in own:
        adapter.on = False
    try:
        yield
    finally:
        for adapter in own:
            adapter.on = True


def sharded_state_dict(chunk: torch.nn.Module) -> dict[str, ShardedTensorFactory]:
    """Return the adapters of a chunk for Megatron's checkpoints, in tensors that every layout can load."""
    return {weight.megatron: _sharded(weight, parameter) for weight, parameter in _matrices(chunk)}


@torch.no_grad()
def load_state_dict(chunk: torch.nn.Module, state: dict[str, Tensor]) -> None:
    """Load what Megatron has filled of ``sharded_state_dict``."""
    for weight, parameter in _matrices(chunk):
        parameter.copy_(state[weight.megatron])


def _matrices(chunk: torch.nn.Module) -> Iterator[tuple[Weight, Tensor]]:
    for adapter in adapters([chunk]).values():
        yield adapter.weights.A, adapter.A
        yield adapter.weights.B, adapter.B


def _initial(weight: Weight, seed: int) -> Tensor:
    """Return A as PEFT draws it, whole: uniform within 1 / sqrt(in)."""
    number = zlib.crc32(f"{seed} {weight.megatron}".encode())  # torch's CPU generator takes 32 bits
    generator = torch.Generator().manual_seed(number)
    (shape,) = weight.shapes
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def _attach(linear: Any, name: str, adapter: Adapter) -> None:
    """Add ``adapter`` to the output of ``linear``. Grouped experts (weight0, weight1, ...) have a list."""
    if name.endswith(".weight"):
        linear.adapter = adapter
        linear.register_forward_hook(_add)
        return
    if not hasattr(linear, "adapters"):
        linear.adapters = torch.nn.ModuleList()
        linear.register_forward_hook(_add_grouped)
    linear.adapters.append(adapter)


def _add(linear: Any, inputs: tuple, output: tuple[Tensor, Any]) -> tuple[Tensor, Any] | None:
    if not linear.adapter.on:
        return None
    return output[0] + linear.adapter(inputs[0]), output[1]


def _add_grouped(linear: Any, inputs: tuple, output: tuple[Tensor, Any]) -> tuple[Tensor, Any] | None:
    """``inputs``: the tokens, expert by expert, and their numbers."""
    if not linear.adapters[0].on:
        return None
    counts = inputs[1].tolist() if isinstance(inputs[1], Tensor) else inputs[1]
    parts = [adapter(x) for adapter, x in zip(linear.adapters, inputs[0].split(counts), strict=True)]
    return output[0] + torch.cat(parts), output[1]


def _sharded(weight: Weight, parameter: Tensor) -> ShardedTensorFactory:
    """Return the parameter as Hugging Face's tensors, by section: independent of Megatron's order of rows."""
    group, arrangement = groups.tensor_group(weight), weight.arrangement
    if weight.expert is None:
        # which of the equal copies this rank has; Megatron writes copy 0
        copy = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    else:
        copy = parallel_state.get_expert_data_parallel_rank()
    # (dimension, part, parts) of a divided tensor; one copy of each part is written
    place = [] if weight.dim is None else [(weight.dim, group.rank(), group.size())]
    replica = (0, group.rank() if weight.dim is None else 0, copy)

    def sections(part: Tensor) -> list[Tensor]:
        return weight.local_sections(part, group.size())

    def build(key: str, tensor: Tensor, replica_id: Any, flattened_range: Any) -> dict[str, Any]:
        pieces = [piece.contiguous() for part in arrangement.split(tensor) for piece in sections(part)]
        return {
            str(n): ShardedTensor.from_rank_offsets(f"{key}.{n}", piece, *place, replica_id=replica_id)
            for n, piece in enumerate(pieces)
        }

    def merge(pieces: dict[str, Any]) -> Tensor:
        remaining = iter([pieces[str(n)] for n in range(len(pieces))])
        parts = [[next(remaining) for _ in sections(part)] for part in arrangement.split(parameter)]
        return arrangement.merge([torch.cat(part, dim=weight.dim or 0) for part in parts])

    return ShardedTensorFactory(weight.megatron, parameter, build, merge, replica)

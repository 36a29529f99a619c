"""Building blocks of a family's weight map, which assigns Hugging Face tensors to Megatron tensors: a list of
``Weight`` in the model's order. Two properties make it enough to load into any layout, export and sync:

- Tensor parallelism gives rank r of n the r-th n-th of every *Hugging Face* tensor along one dimension
  (heads lie group by group there), so a rank reads only its own part of the file.
- A rank's Megatron tensor is a rearrangement of these parts (``arrangement``), bit for bit, and export
  reverses the rearrangement before it gathers the parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Stacked:
    """Tensors concatenated along the first dimension: ``[gate; up]``; a single one is unchanged."""

    shares: tuple[int, ...] = (1,)
    """Rows of the tensors, relative to each other."""

    def merge(self, parts: list[Tensor]) -> Tensor:
        return _cat(parts) if len(parts) > 1 else parts[0]

    def split(self, tensor: Tensor) -> list[Tensor]:
        # Shares and not rows: a rank's part has fewer rows, in the same proportions.
        rows, whole = tensor.shape[0], sum(self.shares)
        return list(tensor.split([rows * share // whole for share in self.shares]))


@dataclass(frozen=True)
class GroupedHeads:
    """q, k, v rows -> for each key-value group its query heads, (its gate heads,) its key, its value. A gated
    q_proj holds the query and then the gate rows of every head. Biases have rows of one number."""

    head_dim: int
    heads_per_group: int
    gated: bool

    def merge(self, parts: list[Tensor]) -> Tensor:
        # q [groups x heads_per_group x kinds x head_dim, *row], k and v [groups x head_dim, *row]
        query, key, value = parts
        row = query.shape[1:]
        groups = key.shape[0] // self.head_dim
        query = query.view(groups, self.heads_per_group, self._kinds, self.head_dim, *row)
        # [groups, kinds, heads_per_group, head_dim]: all query heads of a group, then all its gates.
        query = query.transpose(1, 2).reshape(groups, -1, *row)
        key, value = (part.view(groups, self.head_dim, *row) for part in (key, value))
        # [groups, (kinds x heads_per_group + 2) x head_dim, *row]
        return _cat((query, key, value), dim=1).view(-1, *row)

    def split(self, tensor: Tensor) -> list[Tensor]:
        row = tensor.shape[1:]
        query_rows = self._kinds * self.heads_per_group * self.head_dim
        groups = tensor.view(-1, query_rows + 2 * self.head_dim, *row)
        query, key, value = groups.split([query_rows, self.head_dim, self.head_dim], dim=1)
        # Back to [groups, heads_per_group, kinds, head_dim]: each head's query, then its gate.
        query = query.reshape(-1, self._kinds, self.heads_per_group, self.head_dim, *row).transpose(1, 2)
        return [part.reshape(-1, *row) for part in (query, key, value)]

    @property
    def _kinds(self) -> int:
        return 2 if self.gated else 1


@dataclass(frozen=True)
class DeltaNetInput:
    """in_proj_qkvz and in_proj_ba, key head by key head -> sections q, k, v, z, beta, alpha of all heads."""

    key_dim: int
    value_dim: int
    values_per_key: int
    """Value heads that share a key head."""

    def merge(self, parts: list[Tensor]) -> Tensor:
        # [key heads x (q + k + v + z), hidden] and [key heads x (beta + alpha), hidden]
        qkvz, ba = parts
        hidden = qkvz.shape[-1]
        sections = [
            *qkvz.view(-1, sum(self._qkvz), hidden).split(self._qkvz, dim=1),
            *ba.view(-1, sum(self._ba), hidden).split(self._ba, dim=1),
        ]
        # [q of all heads; k; v; z; beta; alpha], each [heads x size, hidden]
        return _cat([section.reshape(-1, hidden) for section in sections])

    def split(self, tensor: Tensor) -> list[Tensor]:
        hidden = tensor.shape[-1]
        sizes = self._qkvz + self._ba
        heads = tensor.shape[0] // sum(sizes)
        sections = tensor.split([heads * size for size in sizes])
        # [key heads, size, hidden] of each section.
        by_head = [section.view(heads, -1, hidden) for section in sections]
        return [_cat(by_head[:4], dim=1).view(-1, hidden), _cat(by_head[4:], dim=1).view(-1, hidden)]

    @property
    def _qkvz(self) -> list[int]:
        values = self.values_per_key * self.value_dim
        return [self.key_dim, self.key_dim, values, values]

    @property
    def _ba(self) -> list[int]:
        return [self.values_per_key, self.values_per_key]


Arrangement = Stacked | GroupedHeads | DeltaNetInput
"""Rearrangement of Hugging Face tensors, as parts of one tensor-parallel rank, into one Megatron tensor:
``merge`` makes Megatron's, ``split`` reverses it."""


@dataclass(frozen=True)
class Weight:
    """One Megatron tensor and its Hugging Face tensors, all shapes without parallelism."""

    megatron: str
    """Name in the plain-torch layer spec, with layer and expert numbers of the whole model."""
    hf: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of the Hugging Face tensors."""
    dim: int | None = None
    """Dimension of the Hugging Face tensors that tensor parallelism divides; None: replicated."""
    sections: tuple[int, ...] = ()
    """Sizes along ``dim`` that are divided separately, in tensors of that total size; others are whole."""
    arrangement: Arrangement = Stacked()
    expert: int | None = None
    """Number of the expert, placed by expert, divided by expert-tensor parallelism; None: no expert."""
    trained: bool = True
    """False: a buffer, in float32 whatever the model's dtype."""

    def local_ranges(self, shape: tuple[int, ...], rank: int, size: int) -> list[tuple[int, int]]:
        """Return the [start, stop) ranges along ``dim`` of a tensor on tensor-parallel rank ``rank``."""
        assert self.dim is not None
        ranges, start = [], 0
        for section in self._sections(shape[self.dim]):
            part = section // size
            ranges.append((start + rank * part, start + (rank + 1) * part))
            start += section
        return ranges

    def gather(self, parts: list[Tensor]) -> Tensor:
        """Return the complete Hugging Face tensor from all tensor-parallel ranks' parts, in rank order."""
        if self.dim is None or len(parts) == 1:
            return parts[0]
        by_rank = [self.local_sections(part, len(parts)) for part in parts]
        # Section by section, in each the ranks in order.
        return _cat([piece for pieces in zip(*by_rank, strict=True) for piece in pieces], dim=self.dim)

    def local_sections(self, part: Tensor, ranks: int) -> list[Tensor]:
        """Return one tensor-parallel rank's part of a Hugging Face tensor, section by section."""
        if self.dim is None:
            return [part]
        sections = self._sections(ranks * part.shape[self.dim])
        return list(part.split([section // ranks for section in sections], dim=self.dim))

    def _sections(self, size: int) -> tuple[int, ...]:
        # Sections are of the fused tensor (q, k, v); z, beta and alpha beside it are divided whole.
        return self.sections if sum(self.sections) == size else (size,)


def _cat(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    import torch  # takes seconds; planning needs only shapes

    return torch.cat(tuple(parts), dim)

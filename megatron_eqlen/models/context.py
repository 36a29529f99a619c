"""Context parallelism: distribute a row's positions over ranks, and exchange data between them.

The row is cut into 2 N slices of equal length, as Megatron's layers need equally many positions on all N
ranks. Each rank gets two slices: the slice whose queries see the most keys with the slice whose queries see
the fewest, the second with the last but one, ... All ranks then have equally many tokens and nearly equal
attention. (For one causal sequence these are the zigzag pairs.)

Token-wise layers need only a rank's own positions. Two kinds of layer mix positions:

* Attention: a rank receives the keys and values that its queries see and another rank has (``gather_keys``).
  Trees are sparse, so these are less than half of what an all-gather or a ring would send. (Heads cannot be
  exchanged instead: with tensor parallelism a rank has only one or two key-value heads.)
* Gated DeltaNet: a rank receives some heads of all positions and sends its results back
  (``scatter_heads``, ``gather_heads``; Jacobs et al., DeepSpeed Ulysses, arXiv 2309.14509). No state passes
  between ranks, and the convolution works channel by channel.

Both are exact; gradients of keys are summed in at least float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_eqlen.types import Row

Span = tuple[int, int]
"""Positions of a row: first (inclusive) and last (exclusive)."""
BLOCK = 128
"""Size of FlexAttention's blocks of queries and keys."""


@dataclass(frozen=True, eq=False)
class Share:
    """One rank's share of a row of S positions: s positions and their exchange. Tensors are int64."""

    slices: tuple[Span, Span]
    """Positions of the rank, in row order; the rank computes their keys and values."""
    keys: np.ndarray
    """[K] int64, ascending: the positions whose keys the rank needs, including its own; whole blocks if
    slices are."""
    order: Tensor
    """[S]: index of each position in the concatenation of all ranks' positions."""
    inverse: Tensor
    """[S]: the positions in that order."""
    sent: Tensor
    """[sum of send_counts]: indices into the rank's own s keys to be sent, for rank 0, rank 1, ..."""
    send_counts: list[int]
    receive_counts: list[int]
    arranged: Tensor
    """[K]: index of each of ``keys`` in the rank's own s keys followed by the received keys."""

    @classmethod
    def of(cls, row: Row, rank: int, ranks: int, device: torch.device | str) -> Share:
        """Return the share of ``rank``; a row's length is a multiple of 2 x ``ranks``."""
        # slices and owned: each rank's positions; seen: [ranks, length] bool, the keys that its queries read
        slices = slices_of_ranks(row.position_ids, ranks)
        owned = [_positions(spans) for spans in slices]
        seen = keys_of_ranks(slices, row.visible_until)
        # what this rank sends to each rank (indices of its own positions), and gets from each (positions)
        to, received = [np.flatnonzero(keys[owned[rank]]) for keys in seen], [p[seen[rank][p]] for p in owned]
        to[rank], received[rank] = to[rank][:0], received[rank][:0]
        available = np.concatenate([owned[rank], *received])
        # keys in the row's order, and the order of all ranks' positions one after the other
        arranged = np.argsort(available)
        inverse = np.concatenate(owned)

        def tensor(numbers: np.ndarray) -> Tensor:
            return torch.from_numpy(numbers).to(device)

        return cls(
            slices=slices[rank],
            keys=available[arranged],
            order=tensor(np.argsort(inverse)),
            inverse=tensor(inverse),
            sent=tensor(np.concatenate(to)),
            send_counts=[len(numbers) for numbers in to],
            receive_counts=[len(numbers) for numbers in received],
            arranged=tensor(arranged),
        )

    @property
    def slice_size(self) -> int:
        """Positions per slice, on any rank."""
        start, end = self.slices[0]
        return end - start

    @property
    def positions(self) -> np.ndarray:
        """[s] int64, the rank's positions in row order."""
        return _positions(self.slices)

    def query_span(self, span: Span) -> slice:
        """Return the indices of one slice within the rank's s positions."""
        (first, end), (second, _) = self.slices
        shift = first if span[0] < end else second - (end - first)
        return slice(span[0] - shift, span[1] - shift)

    def key_span(self, span: Span) -> slice:
        """Return the indices within ``keys`` of consecutive positions that the rank's queries see."""
        start = int(np.searchsorted(self.keys, span[0]))
        return slice(start, start + span[1] - span[0])


def slices_of_ranks(position_ids: np.ndarray, ranks: int) -> list[tuple[Span, Span]]:
    """Return each rank's two slices, in row order, of a row of a multiple of 2 x ``ranks`` positions."""
    size, rest = divmod(len(position_ids), 2 * ranks)
    assert not rest, f"a row of {len(position_ids)} positions cannot be cut into {2 * ranks} slices"
    seen = position_ids.reshape(2 * ranks, size).sum(1)  # a query sees its path
    order = np.argsort(-seen, kind="stable").tolist()
    pairs = (sorted(pair) for pair in zip(order[:ranks], order[: -ranks - 1 : -1], strict=True))
    return [((a * size, (a + 1) * size), (b * size, (b + 1) * size)) for a, b in pairs]


def keys_of_ranks(slices: list[tuple[Span, Span]], visible_until: np.ndarray) -> list[np.ndarray]:
    """Return for each rank [S] bool: the keys that its queries see, and all keys in the same blocks (of BLOCK
    positions if slices are whole blocks). ``visible_until``: ``Row.visible_until``."""
    start, end = slices[0][0]
    unit = math.gcd(end - start, BLOCK)
    return [_seen_by(spans, visible_until).reshape(-1, unit).any(1).repeat(unit) for spans in slices]


def _seen_by(slices: tuple[Span, Span], visible_until: np.ndarray) -> np.ndarray:
    at, seen = np.arange(len(visible_until)), np.zeros(len(visible_until), bool)
    for start, end in slices:
        seen |= np.maximum(at, start) < np.minimum(visible_until, end)
    return seen


def _positions(slices: Sequence[Span]) -> np.ndarray:
    return np.concatenate([np.arange(*span) for span in slices])


def gather_keys(x: Tensor, share: Share, group: dist.ProcessGroup) -> Tensor:
    """[s, ...] of this rank's positions -> [K, ...] of ``share.keys``. Collective over ``group``."""
    return _GatheredKeys.apply(x, share, group)


class _GatheredKeys(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, share: Share, group: dist.ProcessGroup) -> Tensor:
        ctx.share, ctx.group = share, group
        received = x.new_empty(sum(share.receive_counts), *x.shape[1:])
        sent = x.index_select(0, share.sent)
        dist.all_to_all_single(received, sent, share.receive_counts, share.send_counts, group)
        return torch.cat((x, received)).index_select(0, share.arranged)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        share = ctx.share
        grad = torch.empty_like(grad).index_copy_(0, share.arranged, grad)
        own, lent = grad.split([len(grad) - sum(share.receive_counts), sum(share.receive_counts)])
        back = grad.new_empty(sum(share.send_counts), *grad.shape[1:])
        dist.all_to_all_single(back, lent.contiguous(), share.send_counts, share.receive_counts, ctx.group)
        wide = torch.promote_types(grad.dtype, torch.float32)
        return own.to(wide, copy=True).index_add_(0, share.sent, back.to(wide)).to(grad.dtype), None, None


def scatter_heads(x: Tensor, share: Share, group: dist.ProcessGroup) -> Tensor:
    """[s, N, ...] of this rank's positions, part r for rank r -> [S, ...], this rank's part. Collective."""
    return _Transposed.apply(x.transpose(0, 1), group).flatten(0, 1).index_select(0, share.order)


def gather_heads(x: Tensor, share: Share, group: dist.ProcessGroup) -> Tensor:
    """Inverse of ``scatter_heads``: [S, ...] -> [s, N, ...]. Collective."""
    parts = x.index_select(0, share.inverse).unflatten(0, (group.size(), -1))
    return _Transposed.apply(parts, group).transpose(0, 1)


class _Transposed(torch.autograd.Function):
    """[N, ...]: send part r to rank r, and replace it by the part that rank r sends."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, x.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _Transposed.forward(ctx, grad, ctx.group), None

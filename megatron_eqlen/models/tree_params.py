"""Metadata of a row's trees for all layers of a model, computed once, on the host, when the first needs it.

``TreeParams`` is a Megatron ``PackedSeqParams``, so that it passes unchanged through recompute and pipeline
stages to attention and Gated DeltaNet. Pieces of a row, from small to large:

* node: as packed (``types.RowNode``); several children may continue it.
* run: consecutive nodes without a fork between them; a recurrent state is needed only at its end, if at all.
* chain: consecutive runs down to a leaf, contiguous in the row; plain causal attention inside, and a prefix
  of earlier positions that every query of the chain sees.

A row's padding is one more node. Its results are not read, but it takes the same code path, so that every
parameter is in the graph even for a row that is only padding.
Everything here is built with numpy from the nodes alone; nothing is of size S x S.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from megatron_eqlen.types import Row, RowNode

Span = tuple[int, int]
"""Positions of a row: first (inclusive) and last (exclusive)."""
KERNEL_CHUNK = 64
"""Positions per chunk in kernels for runs of any length."""


@dataclass(frozen=True)
class Chain:
    """Positions ``start .. end``, causal among themselves, after ``prefix`` (spans of positions)."""

    start: int
    end: int
    prefix: tuple[Span, ...]


@dataclass(frozen=True)
class Call:
    """Pairs of (queries, keys) that attention computes one by one; no query is in two pairs."""

    pairs: tuple[tuple[slice, slice], ...]
    causal: bool
    """True: a pair's queries are its keys, and each sees those up to itself; False: each sees all keys."""


@dataclass(frozen=True)
class Chunks:
    """Runs cut into pieces of equal size for the chunked delta rule, sorted by the number of ancestors."""

    positions: Tensor
    """[n * size] int64, the row position of each slot; S (one past the row) for filling slots."""
    slots: Tensor
    """[S] int64, the slot of each row position."""
    levels: list[int]
    """Number of chunks at each level; a chunk's parent lies at the level before."""
    parents: list[Tensor]
    """For each level, [chunks] int64: the parent's number within the level before (level 0: empty)."""
    with_children: list[int]
    """For each level, the number of its chunks with children; these come first in their level."""


@dataclass(frozen=True)
class RunLevel:
    """All runs with equally many ancestor runs, for one variable-length kernel call."""

    positions: Tensor
    """[t] int64, row positions, run after run."""
    cu_seqlens: Tensor
    """[runs + 1] int64, start of each run in ``positions``."""
    chunk_indices: Tensor
    """[chunks, 2] int64: the runs cut into chunks of KERNEL_CHUNK; each chunk's run, and its index there."""
    parents: Tensor
    """[runs] int64, the parent's number within the level before (level 0: empty)."""


@dataclass(eq=False, kw_only=True)
class TreeParams(PackedSeqParams):
    """Trees of a row. Tensors lie on ``device``."""

    position_ids: Tensor
    """[S] int64, depth on the path; selects the rotary angles."""
    visible_until: Tensor
    """[S] int64: k is visible to q iff k <= q < visible_until[k]."""
    nodes: tuple[RowNode, ...]
    path_columns: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """``Row.path_columns``."""
    block_mask: BlockMask | None = None
    """FlexAttention's mask of the row, filled in by the first layer that needs it."""
    _seams: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict, init=False)
    _chunks: dict[int, Chunks] = field(default_factory=dict, init=False)

    @classmethod
    def from_row(cls, row: Row, device: torch.device | str | None = None) -> TreeParams:
        """Return the trees of ``row``. ``device``: default the current CUDA device, or else the CPU."""
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        # lengths of paths, not of the row
        longest = int(row.position_ids.max()) + 1
        padding = RowNode(row.num_tokens, len(row.input_ids) - row.num_tokens, parent=-1, depth=0, position=0)
        return cls(
            qkv_format="sbhd",
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            position_ids=torch.from_numpy(row.position_ids).to(device),
            visible_until=torch.from_numpy(row.visible_until).to(device),
            nodes=(*row.nodes, padding) if padding.length else tuple(row.nodes),
            path_columns={
                name: torch.from_numpy(values).to(device) for name, values in row.path_columns.items()
            },
        )

    @classmethod
    def causal(cls, length: int, device: torch.device | str) -> TreeParams:
        """Return one plain causal sequence of ``length`` positions."""
        return cls(
            qkv_format="sbhd",
            max_seqlen_q=length,
            max_seqlen_kv=length,
            position_ids=torch.arange(length, device=device),
            visible_until=torch.full((length,), length, device=device),
            nodes=(RowNode(start=0, length=length, parent=-1, depth=0, position=0),),
        )

    @property
    def device(self) -> torch.device:
        return self.position_ids.device

    def __len__(self) -> int:
        """Return S, with padding."""
        return len(self.position_ids)

    @cached_property
    def runs(self) -> list[RowNode]:
        """Nodes with only children joined to their parents; ``depth`` counts runs."""
        parents = [node.parent for node in self.nodes if node.parent >= 0]
        children = np.bincount(parents, minlength=len(self.nodes))
        runs: list[RowNode] = []
        run_of: list[int] = []
        for node in self.nodes:
            # an only child prolongs its parent's run
            above = run_of[node.parent] if node.parent >= 0 else -1
            if above >= 0 and children[node.parent] == 1:
                runs[above].length += node.length
                run_of.append(above)
                continue
            depth = runs[above].depth + 1 if above >= 0 else 0
            run_of.append(len(runs))
            runs.append(RowNode(node.start, node.length, above, depth, node.position))
        return runs

    @cached_property
    def chains(self) -> list[Chain]:
        """Chains in row order; every position is in exactly one chain."""
        chains: list[Chain] = []
        for index, run in enumerate(self.runs):
            # a run right behind its parent prolongs the chain
            if run.parent == index - 1 and run.parent >= 0:
                last = chains[-1]
                chains[-1] = Chain(last.start, run.start + run.length, last.prefix)
            else:
                chains.append(Chain(run.start, run.start + run.length, self._prefix(run)))
        return chains

    def _prefix(self, run: RowNode) -> tuple[Span, ...]:
        """Return the positions of all ancestor runs, as few ascending spans."""
        spans: list[Span] = []
        while run.parent >= 0:
            run = self.runs[run.parent]
            end = run.start + run.length
            # ancestors that touch make one span
            if spans and spans[0][0] == end:
                end = spans.pop(0)[1]
            spans.insert(0, (run.start, end))
        return tuple(spans)

    @cached_property
    def calls(self) -> list[Call]:
        """Attention of every chain to itself, then to its prefix's first span, its second, ..."""
        chains = self.chains
        own = [(chain.start, chain.end) for chain in chains]
        calls = [_call(list(zip(own, own, strict=True)), causal=True)]
        for number in range(max(len(chain.prefix) for chain in chains)):
            prefixes = zip(own, (chain.prefix[number : number + 1] for chain in chains), strict=True)
            pairs = [(queries, keys) for queries, prefix in prefixes for keys in prefix]
            calls.append(_call(pairs, causal=False))
        return calls

    @cached_property
    def _previous(self) -> np.ndarray:
        """[S + 1] int64, the preceding position on the path; S if there is none."""
        none = len(self)
        previous = np.append(np.arange(-1, none - 1), none)
        for run in self.runs:
            above = self.runs[run.parent] if run.parent >= 0 else None
            previous[run.start] = above.start + above.length - 1 if above else none
        return previous

    def seams(self, width: int) -> tuple[Tensor, Tensor]:
        """Return [m] int64, the positions whose window of ``width`` positions on the path is not the row's
        last ``width``, and [m, width] int64 their windows, the position itself last, S where the path has
        none; cached per width. The row's start, where both windows are empty, is left out."""
        if width in self._seams:
            return self._seams[width]
        none = len(self)
        starts = np.array([run.start for run in self.runs], dtype=np.int64)
        # [m] the first width - 1 positions of each run: elsewhere path and row agree
        near = np.unique((starts[:, None] + np.arange(width - 1)).ravel())
        near = near[near < none]
        window = np.empty((len(near), width), dtype=np.int64)  # filled from its end, a step up the path each
        window[:, -1] = near
        for step in range(width - 2, -1, -1):
            window[:, step] = self._previous[window[:, step + 1]]
        flat = near[:, None] + np.arange(1 - width, 1)  # [m, width] the row's last positions
        apart = (np.where(flat < 0, none, flat) != window).any(axis=1)
        self._seams[width] = self._tensor(near[apart]), self._tensor(window[apart])
        return self._seams[width]

    def chunk_size(self, most: int) -> int:
        """Return the largest of ``most``, its half, ... with at most half as many fillers as positions."""
        lengths, size = np.array([run.length for run in self.runs]), most
        while size > 1 and 2 * (-lengths % size).sum() > len(self):
            size //= 2
        return size

    def chunks(self, size: int) -> Chunks:
        """Return the runs cut into chunks of ``size`` positions; cached per size."""
        if size in self._chunks:
            return self._chunks[size]
        # each chunk's number of ancestors, parent (-1: none) and positions; the last chunk of each run
        levels: list[int] = []
        parents: list[int] = []
        spans: list[range] = []
        last: list[int] = []
        for run in self.runs:
            above, end = last[run.parent] if run.parent >= 0 else -1, run.start + run.length
            for start in range(run.start, end, size):
                levels.append(levels[above] + 1 if above >= 0 else 0)
                parents.append(above)
                spans.append(range(start, min(start + size, end)))
                above = len(parents) - 1
            last.append(above)
        # by level, those with children first
        inner = set(parents)
        order = sorted(range(len(parents)), key=lambda chunk: (levels[chunk], chunk not in inner))
        groups = [[*group] for _, group in groupby(order, key=levels.__getitem__)]
        place = {chunk: number for group in groups for number, chunk in enumerate(group)}
        positions = np.full((len(order), size), len(self), np.int64)
        for slot, chunk in enumerate(order):
            positions[slot, : len(spans[chunk])] = spans[chunk]
        slots = np.empty(len(self) + 1, np.int64)  # the last is of filling slots, and dropped
        slots[positions.ravel()] = np.arange(positions.size)
        above_of = [[place[parents[chunk]] for chunk in group] if n else [] for n, group in enumerate(groups)]
        self._chunks[size] = Chunks(
            positions=self._tensor(positions.ravel()),
            slots=self._tensor(slots[:-1]),
            levels=[*map(len, groups)],
            parents=[self._tensor(np.array(numbers, np.int64)) for numbers in above_of],
            with_children=[sum(chunk in inner for chunk in group) for group in groups],
        )
        return self._chunks[size]

    @cached_property
    def run_levels(self) -> list[RunLevel]:
        """Runs grouped by depth."""
        levels: list[list[int]] = []
        number: list[int] = []
        for i, run in enumerate(self.runs):
            # parents come first, so depths grow by one
            if run.depth == len(levels):
                levels.append([])
            number.append(len(levels[run.depth]))
            levels[run.depth].append(i)
        return [self._run_level([self.runs[i] for i in level], number) for level in levels]

    def _run_level(self, runs: list[RowNode], number: list[int]) -> RunLevel:
        spans = [np.arange(run.start, run.start + run.length) for run in runs]
        lengths = np.array([run.length for run in runs], dtype=np.int64)
        # [runs] number of chunks
        counts = -(-lengths // KERNEL_CHUNK)
        owner = np.repeat(np.arange(len(runs)), counts)  # [chunks] each one's run, and its place there
        place = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        parents = np.array([number[run.parent] for run in runs if run.parent >= 0], dtype=np.int64)
        return RunLevel(
            positions=self._tensor(np.concatenate(spans)),
            cu_seqlens=self._tensor(np.append(0, np.cumsum(lengths))),
            chunk_indices=self._tensor(np.stack((owner, place), axis=1)),
            parents=self._tensor(parents),
        )

    def _tensor(self, numbers: np.ndarray) -> Tensor:
        return torch.from_numpy(numbers).to(self.device)


def _call(spans: list[tuple[Span, Span]], causal: bool) -> Call:
    return Call(tuple((slice(*queries), slice(*keys)) for queries, keys in spans), causal)

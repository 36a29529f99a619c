"""Nodes' arrays to the ranks that train them.

Every rank knows the plan of all ranks, so each knows what every other needs and from whom: nothing is asked
for. In two hops, so that a rank sends each array once and the ranks of one data-parallel index share the rest
of the work among themselves:

    home ──each array to one──► the ranks that train a row ──from there to all──► the ranks that train the row

All of them need token ids; rollout log-probs and sampling masks go to the last pipeline stage alone.

Host memory. A token takes 4 bytes of ids and 4 of log-prob, with a mask of 20 another 4 x 20 + 1: 89. A step
of 31M tokens over 4 nodes of 8 ranks (TP 8, DP 4; 7.75M tokens to a data-parallel index, 0.97M graded by
each rank), in bytes a node:

    while a replica of 8 ranks generates     3 GB: one rank records all, the others keep log-probs and masks
                                             of their parts alone (``Replicas.keeps``, ``bench.py host``)
    after grading                            8 x 0.97M x 89    = 0.7 GB
    while the step is trained                8 x 7.75M x 89    = 5.5 GB more, less what is skipped
    on the way                               8 x 2 x 7 x CHUNK = 0.1 GB

With servers rank 0 keeps all 31M tokens, 2.8 GB, in place of the 0.7. Rows are filled one by one
(``training/rows.py``), so they do not count. Without masks it is a tenth.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from megatron_eqlen.packing.pack import Packing
from megatron_eqlen.training.distributed import host
from megatron_eqlen.types import Node, SamplingMask

CHUNK = 1 << 20
"""Bytes that are under way at once from one rank to another."""


class Seat(NamedTuple):
    """What a rank of the world trains."""

    data_parallel: int
    """Rows of this data-parallel rank."""
    for_loss: bool
    """It computes their loss: it is of the last pipeline stage."""


def exchange(planned: Packing, seats: Sequence[Seat]) -> Packing:
    """The plan with the arrays of all nodes that this rank trains; other nodes stay as they are. Collective.

    ``seats``: of each rank of the world. Received arrays live as long as the returned plan.
    """
    forest = planned.forest
    if not (forest.home >= 0).any():
        return planned
    nodes = list(forest.nodes)
    loads = list(_loads(planned, seats))
    _ship(nodes, [load.first_hop() for load in loads])
    _ship(nodes, [leg for load in loads for leg in load.second_hop()])
    return dataclasses.replace(planned, forest=dataclasses.replace(forest, nodes=nodes))


class Leg(NamedTuple):
    """Arrays of some nodes from rank to rank; all three are [n] int64."""

    nodes: np.ndarray
    source: np.ndarray
    target: np.ndarray
    for_loss: bool
    """Log-probs and masks; otherwise token ids."""


@dataclasses.dataclass(frozen=True)
class Load:
    """What the ranks of one data-parallel index need."""

    nodes: np.ndarray
    """[n] int64, forest indices."""
    home: np.ndarray
    """[n] int64"""
    ranks: np.ndarray
    """[k] int64, who needs them."""
    for_loss: bool

    @property
    def via(self) -> np.ndarray:
        """[n] int64, which of ``ranks`` each node reaches first: its home, or each in turn."""
        turn = self.ranks[np.arange(len(self.nodes)) % len(self.ranks)]
        return np.where(np.isin(self.home, self.ranks), self.home, turn)

    def first_hop(self) -> Leg:
        return Leg(self.nodes, self.home, self.via, self.for_loss)

    def second_hop(self) -> list[Leg]:
        via = self.via
        return [Leg(self.nodes, via, np.full_like(via, rank), self.for_loss) for rank in self.ranks]


def _loads(planned: Packing, seats: Sequence[Seat]) -> Iterator[Load]:
    for index in range(len(planned.ranks)):
        for for_loss, needed in zip((False, True), planned.needed(index), strict=True):
            nodes = needed[planned.forest.home[needed] >= 0]
            ranks = [
                rank
                for rank, seat in enumerate(seats)
                if seat.data_parallel == index and seat.for_loss >= for_loss
            ]
            yield Load(nodes, planned.forest.home[nodes], np.array(ranks, np.int64), for_loss)


def _ship(nodes: list[Node], legs: Sequence[Leg]) -> None:
    """Carry the arrays of all ``legs``. Of ``nodes``, those that this rank receives are replaced."""
    rank = dist.get_rank()
    outgoing: dict[int, list[np.ndarray]] = {}
    incoming: dict[int, list[np.ndarray]] = {}
    for leg in legs:
        moves = leg.source != leg.target
        for at in np.flatnonzero(moves & (leg.source == rank)).tolist():
            arrays = _arrays(nodes[leg.nodes[at]], leg.for_loss)
            outgoing.setdefault(int(leg.target[at]), []).extend(arrays)
        for at in np.flatnonzero(moves & (leg.target == rank)).tolist():
            node = nodes[leg.nodes[at]] = _with_room(nodes[leg.nodes[at]], leg.for_loss)
            incoming.setdefault(int(leg.source[at]), []).extend(_arrays(node, leg.for_loss))
    _transfer(
        {to: Parcel(arrays) for to, arrays in outgoing.items()},
        {source: Parcel(arrays) for source, arrays in incoming.items()},
    )


def _arrays(node: Node, for_loss: bool) -> list[np.ndarray]:
    if not for_loss:
        return [node.token_ids]
    assert node.rollout_logprobs is not None
    mask = node.sampling_mask
    return [node.rollout_logprobs, *(() if mask is None else (mask.ids, mask.counts))]


def _with_room(node: Node, for_loss: bool) -> Node:
    """The node with arrays to be filled in place of those that are elsewhere."""
    if not for_loss:
        return dataclasses.replace(node, token_ids=np.empty(len(node), np.int32))
    mask = node.sampling_mask
    return dataclasses.replace(
        node,
        rollout_logprobs=np.empty(len(node), np.float32),
        sampling_mask=None if mask is None else SamplingMask.empty(len(mask.ids), len(mask)),
    )


class Parcel:
    """Arrays that go from one rank to another, as bytes, one after the other."""

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        self._bytes = [array.view(np.uint8) for array in arrays]
        self._ends = np.cumsum([0, *(array.nbytes for array in arrays)])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, start: int) -> np.ndarray:
        """[at most CHUNK] uint8, the bytes from ``start`` on."""
        return np.concatenate(list(self._pieces(start)))

    def write(self, start: int, chunk: np.ndarray) -> None:
        """The inverse of ``read``."""
        at = 0
        for piece in self._pieces(start):
            piece[:] = chunk[at : at + len(piece)]
            at += len(piece)

    def _pieces(self, start: int) -> Iterator[np.ndarray]:
        """A chunk as views of the arrays."""
        first, stop = int(np.searchsorted(self._ends, start, side="right")) - 1, start + CHUNK
        for array, begin in zip(self._bytes[first:], self._ends[first:-1].tolist(), strict=True):
            if begin >= stop:
                return
            yield array[max(start - begin, 0) : stop - begin]


def _transfer(outgoing: dict[int, Parcel], incoming: dict[int, Parcel]) -> None:
    """Send and fill the parcels, by rank, a chunk of each at a time. Both ends know a parcel's length, so
    they agree on its chunks."""
    longest = max(map(len, [*outgoing.values(), *incoming.values()]), default=0)
    for start in range(0, longest, CHUNK):
        sent = {to: parcel.read(start) for to, parcel in outgoing.items() if start < len(parcel)}
        received = {
            source: np.empty(min(CHUNK, len(parcel) - start), np.uint8)
            for source, parcel in incoming.items()
            if start < len(parcel)
        }
        work = [dist.isend(torch.from_numpy(chunk), to, host()) for to, chunk in sent.items()]
        work += [dist.irecv(torch.from_numpy(chunk), source, host()) for source, chunk in received.items()]
        for one in work:
            assert one is not None, "only ranks of the group exchange"
            one.wait()
        for source, chunk in received.items():
            incoming[source].write(start, chunk)

"""Arrays of nodes from rank to rank, over the host.

In two hops, so that a rank sends each array once and the ranks that need it share the rest of the work:

    home ──each array to one──► the ranks that need it ──from there to all──► the ranks that need it
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist

from megatron_eqlen.packing.pack import Packing
from megatron_eqlen.processes.distributed import host
from megatron_eqlen.types import Node

CHUNK = 1 << 20
"""Bytes that are under way at once from one rank to another."""


class Cargo(Protocol):
    """Which arrays of a node are carried."""

    def arrays(self, node: Node) -> list[np.ndarray]:
        """Those of a node that has them."""
        ...

    def with_room(self, node: Node) -> Node:
        """The node with arrays to be filled in place of those that are elsewhere."""
        ...


class Leg(NamedTuple):
    """Arrays of some nodes from rank to rank; all three are [n] int64."""

    nodes: np.ndarray
    source: np.ndarray
    target: np.ndarray
    cargo: Cargo


@dataclasses.dataclass(frozen=True)
class Load:
    """What some ranks of one data-parallel index need."""

    nodes: np.ndarray
    """[n] int64, forest indices."""
    home: np.ndarray
    """[n] int64"""
    ranks: np.ndarray
    """[k] int64, who needs them."""
    cargo: Cargo

    @property
    def via(self) -> np.ndarray:
        """[n] int64, which of ``ranks`` each node reaches first: its home, or each in turn."""
        turn = self.ranks[np.arange(len(self.nodes)) % len(self.ranks)]
        return np.where(np.isin(self.home, self.ranks), self.home, turn)

    def first_hop(self) -> Leg:
        return Leg(self.nodes, self.home, self.via, self.cargo)

    def second_hop(self) -> list[Leg]:
        via = self.via
        return [Leg(self.nodes, via, np.full_like(via, rank), self.cargo) for rank in self.ranks]


def load_of(nodes: np.ndarray, home: np.ndarray, ranks: list[int], cargo: Cargo) -> Load:
    """What ``ranks`` need of ``nodes``: those that have a home."""
    nodes = nodes[home[nodes] >= 0]
    return Load(nodes, home[nodes], np.array(ranks, np.int64), cargo)


def with_nodes(planned: Packing, nodes: list[Node]) -> Packing:
    return dataclasses.replace(planned, forest=dataclasses.replace(planned.forest, nodes=nodes))


def ship(nodes: list[Node], legs: Sequence[Leg]) -> int:
    """Carry the arrays of all ``legs``. Of ``nodes``, those that this rank receives are replaced. Returns the
    bytes received."""
    rank = dist.get_rank()
    outgoing: dict[int, list[np.ndarray]] = {}
    incoming: dict[int, list[np.ndarray]] = {}
    for leg in legs:
        moves = leg.source != leg.target
        for at in np.flatnonzero(moves & (leg.source == rank)).tolist():
            arrays = leg.cargo.arrays(nodes[leg.nodes[at]])
            outgoing.setdefault(int(leg.target[at]), []).extend(arrays)
        for at in np.flatnonzero(moves & (leg.target == rank)).tolist():
            node = nodes[leg.nodes[at]] = leg.cargo.with_room(nodes[leg.nodes[at]])
            incoming.setdefault(int(leg.source[at]), []).extend(leg.cargo.arrays(node))
    parcels = {source: Parcel(arrays) for source, arrays in incoming.items()}
    _transfer({to: Parcel(arrays) for to, arrays in outgoing.items()}, parcels)
    return sum(map(len, parcels.values()))


class Parcel:
    """Arrays that go from one rank to another, as bytes, one after the other."""

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        self._bytes = [array.reshape(-1).view(np.uint8) for array in arrays]
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

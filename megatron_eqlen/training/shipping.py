"""Send tokens of nodes between ranks, over the host.

Each array takes two hops, so that a rank sends it once and the ranks that need it share the rest of the work:

    home ──each array to one──► the ranks that need it ──from there to all──► the ranks that need it
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from megatron_eqlen.processes.distributed import host
from megatron_eqlen.tokens import COLUMNS, Placeholder, Tokens
from megatron_eqlen.types import Node

CHUNK = 1 << 20
"""Maximum bytes in transit at once from one rank to another."""


@dataclasses.dataclass(frozen=True)
class ColumnShare:
    """Columns that some ranks need of a node's tokens."""

    needed_by: str
    """``Column.needed_by``."""
    layers: tuple[int, ...] = ()
    """MoE layers, for the columns of a path."""

    def of(self, tokens: Tokens) -> Tokens:
        """Return the table of these columns alone, whole or bare."""
        needed = tokens.only(name for name in tokens.columns if COLUMNS[name].needed_by == self.needed_by)
        return of_layers(needed, self.layers) if self.layers else needed


def of_layers(tokens: Tokens, layers: tuple[int, ...]) -> Tokens:
    """Return the table with these layers of its columns of a path; columns of as many layers are
    unchanged."""
    chosen = {
        name: _layers(values, layers)
        for name, values in tokens.columns.items()
        if COLUMNS[name].of_path and values.shape[1] != len(layers)
    }
    return Tokens({**tokens.columns, **chosen}, len(tokens)) if chosen else tokens


def _layers(values: Any, layers: tuple[int, ...]) -> Any:
    if isinstance(values, Placeholder):
        return Placeholder((len(values), len(layers), *values.shape[2:]), values.dtype)
    return values[:, np.array(layers, np.int64)]


class Transfer(NamedTuple):
    """Columns of some nodes to be sent between ranks; arrays are [n] int64."""

    nodes: np.ndarray
    source: np.ndarray
    target: np.ndarray
    share: ColumnShare


@dataclasses.dataclass(frozen=True)
class Demand:
    """Nodes that some ranks of one data-parallel index need."""

    nodes: np.ndarray
    """[n] int64, forest indices."""
    home: np.ndarray
    """[n] int64"""
    ranks: np.ndarray
    """[k] int64, the ranks that need them."""
    share: ColumnShare

    @property
    def via(self) -> np.ndarray:
        """[n] int64, the rank in ``ranks`` that each node reaches first: its home, or each rank in turn."""
        turn = self.ranks[np.arange(len(self.nodes)) % len(self.ranks)]
        return np.where(np.isin(self.home, self.ranks), self.home, turn)

    def first_hop(self) -> Transfer:
        return Transfer(self.nodes, self.home, self.via, self.share)

    def second_hop(self) -> list[Transfer]:
        via = self.via
        return [Transfer(self.nodes, via, np.full_like(via, rank), self.share) for rank in self.ranks]


def demand_of(nodes: np.ndarray, home: np.ndarray, ranks: list[int], share: ColumnShare) -> Demand:
    """Return the demand of ``ranks`` for those of ``nodes`` that have a home."""
    nodes = nodes[home[nodes] >= 0]
    return Demand(nodes, home[nodes], np.array(ranks, np.int64), share)


def send_tokens(nodes: list[Node], transfers: Sequence[Transfer]) -> int:
    """Send the columns of all ``transfers`` and replace the entries of ``nodes`` that this rank receives.
    Return the bytes received."""
    rank = dist.get_rank()
    outgoing: dict[int, list[np.ndarray]] = {}
    incoming: dict[int, list[np.ndarray]] = {}
    for transfer in transfers:
        # [nodes] of the transfer
        moves = transfer.source != transfer.target
        for at in np.flatnonzero(moves & (transfer.source == rank)).tolist():
            arrays = transfer.share.of(nodes[transfer.nodes[at]].tokens).arrays()
            outgoing.setdefault(int(transfer.target[at]), []).extend(arrays)
        for at in np.flatnonzero(moves & (transfer.target == rank)).tolist():
            node = nodes[transfer.nodes[at]]
            # empty arrays of the shapes that arrive
            room = transfer.share.of(node.tokens).with_room()
            tokens = Tokens({**node.tokens.columns, **room.columns}, len(node))
            nodes[transfer.nodes[at]] = dataclasses.replace(node, tokens=tokens)
            incoming.setdefault(int(transfer.source[at]), []).extend(room.arrays())
    messages = {source: Message(arrays) for source, arrays in incoming.items()}
    _transfer({to: Message(arrays) for to, arrays in outgoing.items()}, messages)
    return sum(map(len, messages.values()))


class Message:
    """Arrays that one rank sends to another, as concatenated bytes."""

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        self._bytes = [array.reshape(-1).view(np.uint8) for array in arrays]
        self._ends = np.cumsum([0, *(array.nbytes for array in arrays)])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, start: int) -> np.ndarray:
        """Return [at most CHUNK] uint8, the bytes from ``start`` on."""
        return np.concatenate(list(self._pieces(start)))

    def write(self, start: int, chunk: np.ndarray) -> None:
        """Write a chunk that ``read`` returned."""
        at = 0
        for piece in self._pieces(start):
            piece[:] = chunk[at : at + len(piece)]
            at += len(piece)

    def _pieces(self, start: int) -> Iterator[np.ndarray]:
        """Yield the pieces of a chunk as views of the arrays."""
        first, stop = int(np.searchsorted(self._ends, start, side="right")) - 1, start + CHUNK
        for array, begin in zip(self._bytes[first:], self._ends[first:-1].tolist(), strict=True):
            if begin >= stop:
                return
            yield array[max(start - begin, 0) : stop - begin]


def _transfer(outgoing: dict[int, Message], incoming: dict[int, Message]) -> None:
    """Send and fill the messages, by rank, a chunk of each at a time. Both ranks know a message's length, so
    they agree on its chunks."""
    longest = max(map(len, [*outgoing.values(), *incoming.values()]), default=0)
    for start in range(0, longest, CHUNK):
        sent = {to: message.read(start) for to, message in outgoing.items() if start < len(message)}
        received = {
            source: np.empty(min(CHUNK, len(message) - start), np.uint8)
            for source, message in incoming.items()
            if start < len(message)
        }
        # all chunks of a round at once: no rank waits for another's order
        work = [dist.isend(torch.from_numpy(chunk), to, host()) for to, chunk in sent.items()]
        work += [dist.irecv(torch.from_numpy(chunk), source, host()) for source, chunk in received.items()]
        for pending in work:
            assert pending is not None, "only ranks of the group exchange"
            pending.wait()
        for source, chunk in received.items():
            incoming[source].write(start, chunk)

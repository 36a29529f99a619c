"""Send nodes' arrays to the ranks that train them, without requests: every rank knows the plan of all ranks.

All ranks of a data-parallel index need token ids, but every rank has those of prompts. Columns of the loss go
to the last pipeline stage, columns of a path to the stages that compute their MoE layers
(``Column.needed_by``). Arrays travel over the host in two hops: a rank sends each once, receivers pass it on.

    home ──each array to one──► the ranks that need it ──from there to all──► the ranks that need it
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from megatron_eqlen.hf.config import ModelConfig
from megatron_eqlen.metrics import at_once
from megatron_eqlen.packing.checks import check_route_shapes, check_routes
from megatron_eqlen.packing.pack import Packing
from megatron_eqlen.processes.distributed import gather, host
from megatron_eqlen.tokens import COLUMNS, Placeholder, Tokens
from megatron_eqlen.types import Metrics, Node

TOKENS_AT_ONCE = 1 << 13
"""Most tokens in transit from one rank to another, apart from those of the last node."""

SENT, RECEIVED = 0, 1
NO_BYTES = np.zeros(0, np.uint8)
Queues = dict[int, list[tuple[int, "ColumnShare"]]]


class Placement(NamedTuple):
    """Part of the training that a rank of the world performs."""

    data_parallel: int
    """Data-parallel index, whose rows the rank trains."""
    for_loss: bool
    """True on the last pipeline stage, which computes the loss."""
    moe_layers: tuple[int, ...] = ()
    """MoE layers of the model that the rank computes, in the order of its chunks."""


@dataclass(frozen=True)
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
    """Return the table with these layers of its path columns, unless they have as many."""
    chosen: dict[str, Any] = {}
    for name, values in tokens.columns.items():
        if not COLUMNS[name].of_path or values.shape[1] == len(layers):
            continue
        if isinstance(values, Placeholder):
            chosen[name] = Placeholder((len(values), len(layers), *values.shape[2:]), values.dtype)
        else:
            chosen[name] = values[:, np.array(layers, np.int64)]
    return Tokens({**tokens.columns, **chosen}, len(tokens)) if chosen else tokens


class Transfer(NamedTuple):
    """Columns of some nodes to be sent between ranks; arrays are [n] int64."""

    nodes: np.ndarray
    source: np.ndarray
    target: np.ndarray
    share: ColumnShare


Hops = tuple[Transfer, list[Transfer]]
"""Transfers of each node from its home to one rank that needs it, and from there to the others."""


def _hops(nodes: np.ndarray, home: np.ndarray, ranks: list[int], share: ColumnShare) -> Hops:
    """Return the hops to ``ranks`` of those of ``nodes`` that have a home."""
    nodes = nodes[home[nodes] >= 0]
    source = home[nodes]
    # [n] ranks take turns, unless the home itself is one of them and passes its nodes on
    turn = np.array(ranks, np.int64)[np.arange(len(nodes)) % len(ranks)]
    via = np.where(np.isin(source, ranks), source, turn)
    onward = [Transfer(nodes, via, np.full_like(via, rank), share) for rank in ranks]
    return Transfer(nodes, source, via, share), onward


def exchange(
    packing: Packing, placements: Sequence[Placement], model: ModelConfig
) -> tuple[Packing, Metrics]:
    """Return the packing with the tokens of all nodes that this rank trains, and metrics over all ranks.
    ``placements``: one per rank. Collective. Raises TreeError if columns of the path do not fit the model."""
    packing, experts = exchange_tokens(packing, placements), model.experts
    if not packing.forest.has_path_columns.any():
        return packing, {}
    shape = (sum(experts.layers), experts.num_experts_per_tok) if experts else (0, 0)
    # every rank knows all shapes, so all raise or none
    check_route_shapes(packing.forest, shape)
    assert experts is not None
    started = time.perf_counter()
    packing, received = exchange_paths(packing, placements)
    metrics = {
        "exchange/routes_seconds": time.perf_counter() - started,
        "exchange/routes_bytes": float(received),
    }
    # values can be checked where they have arrived
    needed, _ = packing.needed(placements[dist.get_rank()].data_parallel)
    check_routes(packing.forest, needed, experts.num_experts)
    return packing, at_once(gather([metrics]))


def exchange_tokens(packing: Packing, placements: Sequence[Placement]) -> Packing:
    """Return the packing with the columns of this rank's nodes, except those of paths. Collective."""
    if not (packing.forest.home >= 0).any():
        return packing
    nodes, home, hops = [*packing.forest.nodes], packing.forest.home, list[Hops]()
    for index in range(len(packing.ranks)):
        needed, trained = packing.needed(index)
        # roots stay out: every rank has the prompts
        responses = needed[packing.forest.parent[needed] >= 0]
        ranks = [rank for rank, placement in enumerate(placements) if placement.data_parallel == index]
        last_stage = [rank for rank in ranks if placements[rank].for_loss]
        hops.append(_hops(responses, home, ranks, ColumnShare("rows")))
        hops.append(_hops(trained, home, last_stage, ColumnShare("loss")))
    send_tokens(nodes, [first for first, _ in hops])
    send_tokens(nodes, [transfer for _, onward in hops for transfer in onward])
    return replace(packing, forest=replace(packing.forest, nodes=nodes))


def exchange_paths(packing: Packing, placements: Sequence[Placement]) -> tuple[Packing, int]:
    """Return the packing with path columns of this rank's nodes, and the bytes received. Collective."""
    forest, rank = packing.forest, dist.get_rank()
    stages: dict[Placement, list[int]] = {}
    for number, placement in enumerate(placements):
        stages.setdefault(placement, []).append(number)
    nodes, hops = [*forest.nodes], list[Hops]()
    for placement, ranks in stages.items():
        needed, _ = packing.needed(placement.data_parallel)
        if placement.moe_layers:
            routed = needed[forest.has_path_columns[needed]]
            hops.append(_hops(routed, forest.home, ranks, ColumnShare("moe", placement.moe_layers)))
    received = send_tokens(nodes, [first for first, _ in hops])
    # what has been sent whole is kept for this rank's layers alone
    own = forest.has_path_columns & ((forest.home < 0) | (forest.home == rank))
    for number in np.flatnonzero(own).tolist():
        tokens = of_layers(nodes[number].tokens, placements[rank].moe_layers)
        nodes[number] = replace(nodes[number], tokens=tokens)
    received += send_tokens(nodes, [transfer for _, onward in hops for transfer in onward])
    return replace(packing, forest=replace(forest, nodes=nodes)), received


def send_tokens(nodes: list[Node], transfers: Sequence[Transfer]) -> int:
    """Send the columns of all ``transfers``, put those for this rank in ``nodes``, and return their bytes."""
    rank, received = dist.get_rank(), 0
    # round -> [SENT, RECEIVED] -> by the other rank, which counts in the same way: (node, columns)
    rounds = defaultdict[int, tuple[Queues, Queues]](lambda: (defaultdict(list), defaultdict(list)))
    tokens = Counter[tuple[int, int]]()
    for transfer in transfers:
        ways = (SENT, transfer.source, transfer.target), (RECEIVED, transfer.target, transfer.source)
        for way, own, other in ways:
            for at in np.flatnonzero((own == rank) & (other != rank)).tolist():
                node, peer = int(transfer.nodes[at]), int(other[at])
                number = tokens[way, peer] // TOKENS_AT_ONCE
                rounds[number][way][peer].append((node, transfer.share))
                tokens[way, peer] += len(nodes[node])
    for _, (outgoing, incoming) in sorted(rounds.items()):
        # all messages of a round at once, so that no rank waits for the order of another
        work, messages = [], []
        for to, queue in outgoing.items():
            arrays = [array for node, share in queue for array in share.of(nodes[node].tokens).arrays()]
            message = np.concatenate([NO_BYTES, *(array.reshape(-1).view(np.uint8) for array in arrays)])
            if len(message):
                work.append(dist.isend(torch.from_numpy(message), to, host()))
        for source, queue in incoming.items():
            arrays = [array for node, share in queue for array in _make_room(nodes, node, share)]
            message = np.empty(sum(array.nbytes for array in arrays), np.uint8)
            if len(message):
                messages.append((message, arrays))
                work.append(dist.irecv(torch.from_numpy(message), source, host()))
        for pending in work:
            pending.wait()
        for message, arrays in messages:
            received += len(message)
            at = 0
            for array in arrays:
                array.reshape(-1).view(np.uint8)[:] = message[at : at + array.nbytes]
                at += array.nbytes
    return received


def _make_room(nodes: list[Node], number: int, share: ColumnShare) -> list[np.ndarray]:
    """Give a node empty arrays of the shapes that arrive, and return these."""
    node = nodes[number]
    room = share.of(node.tokens).with_room()
    nodes[number] = replace(node, tokens=Tokens({**node.tokens.columns, **room.columns}, len(node)))
    return room.arrays()

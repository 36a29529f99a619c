"""Send nodes' arrays to the ranks that train them.

Every rank knows the plan of all ranks, and therefore what every other rank needs and from which rank: no
requests are sent. Each array takes two hops, so that a rank sends it once and the ranks of one data-parallel
index share the rest of the work:

    home ──each array to one──► the ranks that train a row ──from there to all──► the ranks that train the row

All of them need token ids, but every rank has those of prompts; rollout log-probs and sampling masks go to
the last pipeline stage only. (Routes: ``routes.py``.)

Host memory. A token takes 4 bytes of ids and 4 of log-prob, with a mask of 20 another 4 x 20 + 1: 89. A step
of 31M tokens over 4 nodes of 8 ranks (TP 8, DP 4; 7.75M tokens per data-parallel index, 0.97M graded by each
rank), in bytes per node:

    while a replica of 8 ranks generates     3 GB: one rank records all, the others keep log-probs and masks
                                             of their parts only (``Replicas.keeps``, ``bench.py host``)
    after grading                            8 x 0.97M x 89    = 0.7 GB
    while the step is trained                8 x 7.75M x 89    = 5.5 GB more, less what is skipped
    in transit                               8 x 2 x 7 x CHUNK = 0.1 GB

With servers, rank 0 keeps all 31M tokens, 2.8 GB instead of 0.7. Rows are filled one at a time
(``training/rows.py``), so they do not count. Without masks it is a tenth.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from megatron_eqlen.packing.pack import Packing
from megatron_eqlen.training.shipping import Demand, demand_of, send_arrays, with_nodes
from megatron_eqlen.types import Node, SamplingMask


class Placement(NamedTuple):
    """Part of the training that a rank of the world performs."""

    data_parallel: int
    """Data-parallel index, whose rows the rank trains."""
    for_loss: bool
    """True on the last pipeline stage, which computes the loss."""
    moe_layers: tuple[int, ...] = ()
    """Layers of ``types.Routes`` that the rank computes, in the order of its chunks."""


def exchange(planned: Packing, placements: Sequence[Placement]) -> Packing:
    """Return the plan with the arrays of all nodes that this rank trains; other nodes are unchanged.
    Collective.

    ``placements``: one per rank of the world. Received arrays live as long as the returned plan.
    """
    forest = planned.forest
    if not (forest.home >= 0).any():
        return planned
    nodes = list(forest.nodes)
    demands = list(_demands(planned, placements))
    send_arrays(nodes, [demand.first_hop() for demand in demands])
    send_arrays(nodes, [transfer for demand in demands for transfer in demand.second_hop()])
    return with_nodes(planned, nodes)


@dataclasses.dataclass(frozen=True)
class Tokens:
    def arrays(self, node: Node) -> list[np.ndarray]:
        return [node.token_ids]

    def with_room(self, node: Node) -> Node:
        return dataclasses.replace(node, token_ids=np.empty(len(node), np.int32))


@dataclasses.dataclass(frozen=True)
class ForLoss:
    """Log-probs and sampling masks."""

    def arrays(self, node: Node) -> list[np.ndarray]:
        assert node.rollout_logprobs is not None
        mask = node.sampling_mask
        return [node.rollout_logprobs, *(() if mask is None else (mask.ids, mask.counts))]

    def with_room(self, node: Node) -> Node:
        mask = node.sampling_mask
        return dataclasses.replace(
            node,
            rollout_logprobs=np.empty(len(node), np.float32),
            sampling_mask=None if mask is None else SamplingMask.empty(len(mask.ids), len(mask)),
        )


def _demands(planned: Packing, placements: Sequence[Placement]) -> Iterator[Demand]:
    home = planned.forest.home
    for index in range(len(planned.ranks)):
        nodes, trained = planned.needed(index)
        responses = nodes[planned.forest.parent[nodes] >= 0]
        ranks = [rank for rank, placement in enumerate(placements) if placement.data_parallel == index]
        last_stage = [rank for rank in ranks if placements[rank].for_loss]
        yield demand_of(responses, home, ranks, Tokens())
        yield demand_of(trained, home, last_stage, ForLoss())

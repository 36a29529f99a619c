"""Send nodes' arrays to the ranks that train them.

Every rank knows the plan of all ranks, and therefore what every other rank needs and from which rank: no
requests are sent. Each array takes two hops, so that a rank sends it once and the ranks of one data-parallel
index share the rest of the work:

    home ──each array to one──► the ranks that train a row ──from there to all──► the ranks that train the row

All of them need token ids, but every rank has those of prompts; columns of the loss go to the last pipeline
stage only, and of the columns of a path each stage gets the MoE layers that it computes
(``Column.needed_by``).

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

Routes come on top: Qwen3-Next has 48 layers x 10 experts of 512, which are 960 bytes per token. For the same
step, in bytes per node:

    after grading                              30 GB / 4  = 7.4 GB; with servers 30 GB on rank 0
    while the step is trained           TP 2 x 30 GB / 4  = 15 GB more
    in transit, with pipeline stages                        a stage's part of the 7.4 GB

Every tensor- and context-parallel rank has a copy, though it may read only its slices of a row. Slices would
save half of those 15 GB; at TP 4, the most that the key-value heads of Qwen3-235B allow, three quarters of 23
GB (94 layers x 8 experts of 128, 752 bytes per token). A node has 1,000 GB, and with slices a rank could no
longer fill its rows alone.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch.distributed as dist

from megatron_eqlen.hf.config import ModelConfig
from megatron_eqlen.metrics import EXCHANGE_ROUTES_BYTES, EXCHANGE_ROUTES_SECONDS, at_once
from megatron_eqlen.packing.arrays import check_route_shapes, check_routes
from megatron_eqlen.packing.pack import Packing
from megatron_eqlen.processes.distributed import gather
from megatron_eqlen.training.shipping import Demand, Share, demand_of, of_layers, send_tokens
from megatron_eqlen.types import Metrics, Node


class Placement(NamedTuple):
    """Part of the training that a rank of the world performs."""

    data_parallel: int
    """Data-parallel index, whose rows the rank trains."""
    for_loss: bool
    """True on the last pipeline stage, which computes the loss."""
    moe_layers: tuple[int, ...] = ()
    """MoE layers of the model that the rank computes, in the order of its chunks."""


def exchange(
    planned: Packing, placements: Sequence[Placement], model: ModelConfig
) -> tuple[Packing, Metrics]:
    """Return the plan with the tokens of all nodes that this rank trains, and metrics over all ranks.
    Collective.

    ``placements``: one per rank of the world. Received arrays live as long as the returned plan. Raises
    TreeError if columns of the path do not fit the model.
    """
    planned, experts = exchange_tokens(planned, placements), model.experts
    if not planned.forest.has_path_columns.any():
        return planned, {}
    check_route_shapes(
        planned.forest, (sum(experts.layers), experts.num_experts_per_tok) if experts else (0, 0)
    )
    assert experts is not None
    started = time.perf_counter()
    planned, received = exchange_paths(planned, placements)
    metrics = {EXCHANGE_ROUTES_SECONDS: time.perf_counter() - started, EXCHANGE_ROUTES_BYTES: float(received)}
    needed, _ = planned.needed(placements[dist.get_rank()].data_parallel)
    check_routes(planned.forest, needed, experts.num_experts)
    return planned, at_once(gather([metrics]))


def exchange_tokens(planned: Packing, placements: Sequence[Placement]) -> Packing:
    """Return the plan with all columns but those of paths of the nodes that this rank trains; other nodes are
    unchanged. Collective."""
    if not (planned.forest.home >= 0).any():
        return planned
    nodes, demands = list(planned.forest.nodes), list(_demands(planned, placements))
    send_tokens(nodes, [demand.first_hop() for demand in demands])
    send_tokens(nodes, [transfer for demand in demands for transfer in demand.second_hop()])
    return _with_nodes(planned, nodes)


def _demands(planned: Packing, placements: Sequence[Placement]) -> Iterator[Demand]:
    home = planned.forest.home
    for index in range(len(planned.ranks)):
        nodes, trained = planned.needed(index)
        responses = nodes[planned.forest.parent[nodes] >= 0]
        ranks = [rank for rank, placement in enumerate(placements) if placement.data_parallel == index]
        last_stage = [rank for rank in ranks if placements[rank].for_loss]
        yield demand_of(responses, home, ranks, Share("rows"))
        yield demand_of(trained, home, last_stage, Share("loss"))


def exchange_paths(planned: Packing, placements: Sequence[Placement]) -> tuple[Packing, int]:
    """Return the plan with the columns of paths of all nodes that this rank trains, for the layers that it
    computes, and the bytes received. Collective."""
    forest, rank, received = planned.forest, dist.get_rank(), 0
    nodes, demands = list(forest.nodes), list(_path_demands(planned, placements))
    # one pipeline stage at a time, to limit the memory of copies
    for layers in dict.fromkeys(placement.moe_layers for placement in placements):
        of_stage = [demand.first_hop() for demand in demands if demand.share.layers == layers]
        received += send_tokens(nodes, of_stage)
    own = forest.has_path_columns & ((forest.home < 0) | (forest.home == rank))
    for number in np.flatnonzero(own).tolist():
        tokens = of_layers(nodes[number].tokens, placements[rank].moe_layers)
        nodes[number] = dataclasses.replace(nodes[number], tokens=tokens)
    received += send_tokens(nodes, [transfer for demand in demands for transfer in demand.second_hop()])
    return _with_nodes(planned, nodes), received


def _with_nodes(planned: Packing, nodes: list[Node]) -> Packing:
    return dataclasses.replace(planned, forest=dataclasses.replace(planned.forest, nodes=nodes))


def _path_demands(planned: Packing, placements: Sequence[Placement]) -> Iterator[Demand]:
    stages: dict[Placement, list[int]] = {}
    for rank, placement in enumerate(placements):
        stages.setdefault(placement, []).append(rank)
    for placement, ranks in stages.items():
        nodes, _ = planned.needed(placement.data_parallel)
        if placement.moe_layers:
            routed = nodes[planned.forest.has_path_columns[nodes]]
            yield demand_of(routed, planned.forest.home, ranks, Share("moe", placement.moe_layers))

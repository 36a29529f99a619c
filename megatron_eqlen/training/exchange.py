"""Send nodes' arrays to the ranks that train them.

Every rank knows the plan of all ranks, and therefore what every other rank needs and from which rank: no
requests are sent. All ranks of a data-parallel index need token ids, but every rank has those of prompts;
columns of the loss go to the last pipeline stage only, and of the columns of a path each stage gets the MoE
layers that it computes (``Column.needed_by``). ``shipping`` says how they travel, ``plan/host.py`` counts the
memory.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch.distributed as dist

from megatron_eqlen.hf.config import ModelConfig
from megatron_eqlen.metrics import at_once
from megatron_eqlen.packing.arrays import check_route_shapes, check_routes
from megatron_eqlen.packing.pack import Packing
from megatron_eqlen.processes.distributed import gather
from megatron_eqlen.training.shipping import ColumnShare, Demand, demand_of, of_layers, send_tokens
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
    metrics = {
        "exchange/routes_seconds": time.perf_counter() - started,
        "exchange/routes_bytes": float(received),
    }
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
        yield demand_of(responses, home, ranks, ColumnShare("rows"))
        yield demand_of(trained, home, last_stage, ColumnShare("loss"))


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
            yield demand_of(routed, planned.forest.home, ranks, ColumnShare("moe", placement.moe_layers))

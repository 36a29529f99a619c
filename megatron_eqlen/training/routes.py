"""Send routes to the ranks that train them: each pipeline stage gets the layers that it computes.

Host memory, in addition to that of tokens (``exchange.py``): Qwen3-Next has 48 layers x 10 experts of 512,
which are 960 bytes per token. For a step of 31M tokens over 4 nodes, in bytes per node:

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

import numpy as np
import torch.distributed as dist

from megatron_eqlen.hf.config import ModelConfig
from megatron_eqlen.metrics import EXCHANGE_ROUTES_BYTES, EXCHANGE_ROUTES_SECONDS, at_once
from megatron_eqlen.packing.arrays import check_route_shapes, check_routes
from megatron_eqlen.packing.pack import Packing
from megatron_eqlen.processes.distributed import gather
from megatron_eqlen.training.exchange import Placement
from megatron_eqlen.training.shipping import Demand, demand_of, send_arrays, with_nodes
from megatron_eqlen.types import Metrics, Node, Placeholder


def with_routes(
    planned: Packing, placements: Sequence[Placement], model: ModelConfig
) -> tuple[Packing, Metrics]:
    """Return the plan with its routes (``exchange_routes``), and metrics of the exchange over all ranks; no
    effect if no node has routes. Collective.

    Raises TreeError if routes do not fit the model.
    """
    forest, experts = planned.forest, model.experts
    if not forest.has_routes.any():
        return planned, {}
    check_route_shapes(forest, (sum(experts.layers), experts.num_experts_per_tok) if experts else (0, 0))
    assert experts is not None
    started = time.perf_counter()
    planned, received = exchange_routes(planned, placements)
    metrics = {EXCHANGE_ROUTES_SECONDS: time.perf_counter() - started, EXCHANGE_ROUTES_BYTES: float(received)}
    needed, _ = planned.needed(placements[dist.get_rank()].data_parallel)
    check_routes(planned.forest, needed, experts.num_experts)
    return planned, at_once(gather([metrics]))


def exchange_routes(planned: Packing, placements: Sequence[Placement]) -> tuple[Packing, int]:
    """Return the plan with the routes of all nodes that this rank trains, for the layers that it computes,
    and the bytes received. Collective."""
    forest, received = planned.forest, 0
    nodes = list(forest.nodes)
    demands = list(_route_demands(planned, placements))
    # one pipeline stage at a time, to limit the memory of copies
    for layers in dict.fromkeys(placement.moe_layers for placement in placements):
        received += send_arrays(
            nodes, [demand.first_hop() for demand in demands if demand.payload == StageRoutes(layers)]
        )
    rank = dist.get_rank()
    for number in np.flatnonzero(forest.has_routes & ((forest.home < 0) | (forest.home == rank))).tolist():
        nodes[number] = _with_layers(nodes[number], placements[rank].moe_layers)
    received += send_arrays(nodes, [transfer for demand in demands for transfer in demand.second_hop()])
    return with_nodes(planned, nodes), received


@dataclasses.dataclass(frozen=True)
class StageRoutes:
    """Routes of some layers."""

    layers: tuple[int, ...]

    def arrays(self, node: Node) -> list[np.ndarray]:
        routes = _with_layers(node, self.layers).routes
        assert routes is not None
        return [np.ascontiguousarray(routes)]

    def with_room(self, node: Node) -> Node:
        absent = node.routes
        assert isinstance(absent, Placeholder)
        shape = (len(absent), len(self.layers), absent.shape[2])
        return dataclasses.replace(node, routes=np.empty(shape, absent.dtype))


def _with_layers(node: Node, layers: tuple[int, ...]) -> Node:
    """Return the node with these layers of its routes; a node with as many layers is returned unchanged."""
    assert node.routes is not None
    if node.routes.shape[1] == len(layers):
        return node
    return dataclasses.replace(node, routes=node.routes[:, np.array(layers, np.int64)])


def _route_demands(planned: Packing, placements: Sequence[Placement]) -> Iterator[Demand]:
    stages: dict[Placement, list[int]] = {}
    for rank, placement in enumerate(placements):
        stages.setdefault(placement, []).append(rank)
    for placement, ranks in stages.items():
        nodes, _ = planned.needed(placement.data_parallel)
        if placement.moe_layers:
            routed = nodes[planned.forest.has_routes[nodes]]
            yield demand_of(routed, planned.forest.home, ranks, StageRoutes(placement.moe_layers))

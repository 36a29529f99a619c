"""Routers that compute with the experts which the engine chose (R3, routing replay: arXiv 2510.11370).

A row holds the experts of each of its positions and layers (``tokens.ROUTES``). The router chooses these
experts and weights them by the model's own scores, so the gradient flows through the router as usual.
Positions without routes (padding, and those that predict a token of an environment) are routed freely.

    TreeParams.path_columns ─► ReplayLayer.forward ─► ReplayRouter.given ─► routing asks GivenExperts

Megatron's ``router_replay.RouterReplay`` is one list for the process, which passes, interleaved stages and
recomputation must synchronise by hand. Here a layer takes its part of the row with which it is called.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import checkpoint
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megatron_eqlen.models.policy_model import PolicyModel
from megatron_eqlen.models.tree_params import TreeParams
from megatron_eqlen.tokens import ROUTES
from megatron_eqlen.types import Metrics


class GivenExperts:
    """One layer's experts in a pass, with the interface of ``TopKRouter.router_replay``."""

    def __init__(self, experts: Tensor, replayed: bool) -> None:
        """experts: [t, top_k] int64, -1 for positions without routes. ``replayed``: False: compare only."""
        self.experts = experts
        self.replayed = replayed
        self.preferred: Tensor | None = None
        """[t, top_k] int64, the router's own choice."""

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] = torch.topk,
    ) -> tuple[Tensor, Tensor]:
        """Return scores of the chosen experts, descending like top-k's, and the experts: both [t, top_k]."""
        values, self.preferred = default_compute_topk(scores, topk, num_groups, group_topk)
        if not self.replayed:
            return values, self.preferred
        # [t, top_k]: recorded experts, the router's own where none is known (-1)
        chosen = torch.where(self.experts < 0, self.preferred, self.experts)
        values, order = scores.gather(1, chosen).sort(dim=1, descending=True, stable=True)
        return values, chosen.gather(1, order)


@dataclass
class Agreement:
    """[3] float64 counts over (token, layer, expert) of tokens that are trained and have routes: the engine's
    choices, those that the trainer computed with, and those that its router would choose."""

    counts: Tensor

    def add(self, given: GivenExperts, chosen: Tensor, left_out: Tensor | None) -> None:
        """Add a layer's counts. ``chosen``: [t, experts] bool. ``left_out``: [t] bool, not counted."""
        assert given.preferred is not None, "the router has not run"
        counted = given.experts >= 0
        if left_out is not None:
            counted &= ~left_out[:, None]
        # [t, experts] bool, as `chosen`
        preferred = torch.zeros_like(chosen, dtype=torch.bool).scatter_(1, given.preferred, True)
        # -1 cannot be gathered; `counted` leaves these out
        experts = given.experts.clamp_min(0)
        used, wanted = (counted & choice.bool().gather(1, experts) for choice in (chosen, preferred))
        self.counts += torch.stack([counted.sum(), used.sum(), wanted.sum()])

    def metrics(self) -> Metrics:
        """Return the agreement over all ranks; empty without trained routes. Collective over the world."""
        dist.all_reduce(self.counts)
        given, used, wanted = self.counts.tolist()
        if not given:
            return {}
        return {"mismatch/expert_agreement": used / given, "mismatch/router_agreement": wanted / given}


class ReplayRouter(TopKRouter):
    """Megatron's router, which uses given experts during ``given``."""

    layer_number: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.column = 0
        """This layer's index in a row's routes (``moe_layers``); ``build_model`` sets it."""
        self.replays = True
        """False: given experts are only compared with the router's choice."""
        self.reads_routes = True
        """False in a teacher: the routes of rows are the policy's."""
        self.agreement: Agreement | None = None
        """Counter of agreement during ``measuring_agreement``; None otherwise."""
        if self.score_function == "sigmoid":  # Megatron's own flag would change the bias as well
            del self.expert_bias
            self.register_buffer("expert_bias", self.weight.new_zeros(len(self.weight), dtype=torch.float32))

    @contextlib.contextmanager
    def given(self, routes: Tensor) -> Iterator[None]:
        """Use these routes in the block, whose router input is their row: [S, layers, top_k], -1: none."""
        own_routes = routes[:, self.column]
        if self.config.sequence_parallel:
            own_routes = own_routes.chunk(self.tp_group.size())[self.tp_group.rank()]
        self.router_replay = GivenExperts(own_routes.long(), self.replays)  # pyright: ignore[reportAttributeAccessIssue]
        try:
            yield
        finally:
            self.router_replay = None

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Route as Megatron's router; ``padding_mask`` [s, 1] is True for tokens that are not trained."""
        probs, chosen = super().routing(logits, padding_mask)
        if self.agreement is not None and isinstance(self.router_replay, GivenExperts):
            left_out = None if padding_mask is None else padding_mask.reshape(-1)
            self.agreement.add(self.router_replay, chosen, left_out)
        return probs, chosen


class ReplayLayer(TransformerLayer):
    """Megatron's layer; its router gets the routes of the row with which the layer is called, also when
    activations are recomputed (with ``recompute: mlp`` a layer with an MLP, whole)."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        again = self.config.recompute_granularity == "selective" and not isinstance(self.mlp, IdentityOp)
        if again and self.training:
            run = functools.partial(self._routed, **kwargs)
            return checkpoint(lambda hidden: run(hidden_states=hidden)[0], False, hidden_states), None
        return self._routed(hidden_states=hidden_states, **kwargs)

    def _routed(self, **kwargs: Any) -> Any:
        row = kwargs.get("packed_seq_params")
        columns = row.path_columns if isinstance(row, TreeParams) else {}
        router = self.mlp.router if isinstance(self.mlp, MoELayer) else None
        if ROUTES.name not in columns or not isinstance(router, ReplayRouter) or not router.reads_routes:
            return super().forward(**kwargs)
        with router.given(columns[ROUTES.name]):
            return super().forward(**kwargs)


def routers(chunks: Iterable[torch.nn.Module]) -> list[ReplayRouter]:
    """Return the routers of this rank's layers, in the order of its chunks."""
    return [m for chunk in chunks for m in chunk.modules() if isinstance(m, ReplayRouter)]


def moe_layers(chunks: Iterable[PolicyModel]) -> tuple[int, ...]:
    """Return the layers of ``tokens.ROUTES`` that a rank's rows hold, in the same order."""
    return tuple(
        # Megatron counts from 1, a mixer and an MLP each: the MLP of layer n is number 2 n + 2
        chunk.model_config.moe_layers.index(router.layer_number // 2 - 1)
        for chunk in chunks
        for router in routers([chunk])
    )


@contextlib.contextmanager
def measuring_agreement(chunks: Sequence[torch.nn.Module]) -> Iterator[Agreement]:
    """Count in the block how often the engine's choices and the routers' agree."""
    own_routers = routers(chunks)
    agreement = Agreement(next(chunks[0].parameters()).new_zeros(3, dtype=torch.float64))
    for router in own_routers:
        router.agreement = agreement
    try:
        yield agreement
    finally:
        for router in own_routers:
            router.agreement = None

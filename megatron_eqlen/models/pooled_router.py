"""Experts' router with an auxiliary loss that does not depend on the packing of tokens into rows.

    loss of a layer = E sum_e f_e P_e        f_e = 1 / (k N) x choices of expert e
                                             P_e = 1 / N x sum of the router's probabilities of e

E experts, k of them for each token, N counted tokens. It is the Switch Transformer's loss as in
Megatron-Core: computed for each layer, 1 if the load is even; the training loss adds ``coef`` x its sum over
layers. (Transformers' ``load_balancing_loss_func`` pools all layers before it multiplies, and has no 1 / k.)

N and f cover a whole optimizer step, over all its rows and ranks (the global batch of arXiv:2501.11873).
Megatron multiplies two means for each row instead, and that product changes with the packing. N and f must be
known before the first row's backward pass, so an extra forward pass counts them first. The loss is then a
plain sum over tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from torch import Tensor

from megatron_eqlen.models.router_replay import ReplayRouter


class PooledRouter(ReplayRouter):
    """Router with a pooled loss; without a pool, N counts the tokens of the forward pass itself."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.pool: Tensor | None = None
        """[E] float64, choices of each expert in the whole optimizer step."""
        self.counted: Tensor | None = None
        """[E] float64, this rank's choices during counting; None otherwise."""
        self.aux_loss: Tensor | None = None
        """float64, this rank's part of the layer's loss, since ``pool`` was set."""

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Route as Megatron's router; ``padding_mask`` is True for tokens that are not counted."""
        probs, chosen = super().routing(logits, padding_mask)
        if self.counted is not None:
            self.counted += _choices(chosen if padding_mask is None else chosen & ~padding_mask.view(-1, 1))
        return probs, chosen

    def _apply_aux_loss(
        self, probs: Tensor, scores: Tensor, chosen: Tensor, with_padding_mask: bool = False
    ) -> Tensor:
        """Return ``probs`` with the loss's gradient attached; ``scores`` and ``chosen`` are 0 for uncounted
        tokens."""
        coef = self.get_aux_loss_coeff("aux_loss")
        if coef == 0:
            return probs
        pool = self.pool if self.pool is not None else self._own_pool(chosen)
        tokens = (pool.sum() / self.topk).clamp_min(1)
        loss = len(pool) / self.topk * (pool / tokens * scores.sum(0) / tokens).sum()
        if self.aux_loss is not None:
            self.aux_loss += loss.detach()
        return MoEAuxLossAutoScaler.apply(probs, coef * loss)

    def _own_pool(self, chosen: Tensor) -> Tensor:
        pool = _choices(chosen)
        dist.all_reduce(pool, group=self.tp_cp_group)
        return pool


class RouterPool:
    """Pool of the routers of this rank's layers."""

    def __init__(self, chunks: list) -> None:
        self.routers = [m for chunk in chunks for m in chunk.modules() if isinstance(m, PooledRouter)]

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count the choices of a forward pass over all rows of a step in this block; they become the pool.
        Collective."""
        counts = [_zeros_per_expert(router) for router in self.routers]
        for router, count in zip(self.routers, counts, strict=True):
            router.counted = count
        yield
        if self.routers:
            pools = torch.stack(counts)
            dist.all_reduce(pools, group=self.routers[0].tp_dp_cp_group)
            for router, pool in zip(self.routers, pools, strict=True):
                router.pool, router.counted, router.aux_loss = pool, None, pool.new_zeros(())

    def aux_loss(self) -> float:
        """Return this rank's part of the loss since the pool was counted, averaged over the model's layers
        with experts; the sum over all ranks is 1 for an even load."""
        return sum(_aux_loss(router) for router in self.routers)


def _aux_loss(router: PooledRouter) -> float:
    layers = router.config.moe_layer_freq
    assert isinstance(layers, list)
    assert router.aux_loss is not None, "a pool is counted first"
    return float(router.aux_loss) / sum(layers)


def _zeros_per_expert(router: PooledRouter) -> Tensor:
    return router.weight.new_zeros(len(router.weight), dtype=torch.float64)


def _choices(chosen: Tensor) -> Tensor:
    return chosen.sum(0, dtype=torch.float64)

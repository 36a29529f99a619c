"""Checks of the contents of nodes' arrays, on the rank that holds them, before rows are filled."""

from __future__ import annotations

import numpy as np

from megatron_eqlen.packing.tree import Forest, NonFiniteTreeError, TreeError


def check_loss_arrays(forest: Forest, nodes: np.ndarray) -> None:
    """Raise TreeError for a supervised log-prob that is not finite, and for a token outside its mask."""
    for node in nodes.tolist():
        logprobs = forest.node(node).tokens["logprobs"]
        finite = np.isfinite(logprobs)
        if not finite.all():
            token = int(np.argmin(finite))
            found = f"the rollout_logprob of token {token} is {logprobs[token]}"
            raise NonFiniteTreeError(f"{forest.where(node)}: {found}")
        _check_mask(forest, node)


def _check_mask(forest: Forest, node: int) -> None:
    table = forest.node(node).tokens
    if "kept" not in table:
        return
    kept, tokens = table["kept"], table.token_ids
    sampled = table.columns.get("kept_logprobs")
    if sampled is not None and not (
        np.array_equal(sampled.counts, kept.counts) and np.isfinite(sampled.values).all()
    ):
        expected = "expected a finite log-prob of each token in a sampling mask"
        found = f"{sampled.counts.sum()} of {kept.counts.sum()}, or others"
        raise TreeError(f"{forest.where(node)}: {expected}, found {found}")
    # [numbers of all masks] number of the token whose mask each is in
    owner = np.repeat(np.arange(len(kept)), kept.counts)
    contains = np.bincount(owner[kept.values == tokens[owner]], minlength=len(kept)) > 0
    # an environment's token has no mask
    contains |= ~table.is_generated
    if not contains.all():
        token = int(np.argmin(contains))
        expected = f"expected the token {tokens[token]} in its sampling mask"
        raise TreeError(f"{forest.where(node)}: {expected}, found {list(kept)[token].tolist()}")


def check_route_shapes(forest: Forest, expected: tuple[int, int]) -> None:
    """Raise TreeError for routes of other (MoE layers, experts a token) than the model's; shapes suffice."""
    for node in np.flatnonzero(forest.has_path_columns).tolist():
        routes = forest.node(node).tokens["routes"]
        if routes.shape[1:] != expected:
            model = f"the model's {expected[0]} MoE layers x {expected[1]} experts a token"
            found = " x ".join(map(str, routes.shape[1:]))
            raise TreeError(f"{forest.where(node)}: expected routes of {model}, found {found}")


def check_routes(forest: Forest, nodes: np.ndarray, experts: int) -> None:
    """Raise TreeError if routes of ``nodes`` ([m] int64) name an expert twice, or one that is not there."""
    for node in nodes[forest.has_path_columns[nodes]].tolist():
        tokens, first = forest.node(node).tokens, int(forest.parent[node] < 0)
        # [generated, MoE layers, top_k]; a root's first token is not predicted
        routes = tokens["routes"][first:][tokens.is_generated[first:]]
        highest = routes.max(initial=0)
        if highest >= experts:
            raise TreeError(f"{forest.where(node)}: expected experts 0 to {experts - 1}, found {highest}")
        # the first two experts of a choice are equal in rows that were never filled
        twice = routes[:, :, :1] == routes[:, :, 1:2]
        if twice.any():
            token, layer, _ = np.argwhere(twice)[0].tolist()
            found = f"found {routes[token, layer].tolist()} in row {token} of its routes"
            raise TreeError(f"{forest.where(node)}: expected different experts for a token, {found}")

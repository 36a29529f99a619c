"""What nodes' arrays must hold, looked at where they are, before rows are filled."""

from __future__ import annotations

import numpy as np

from megatron_eqlen.packing.tree import Forest, NonFiniteTreeError, TreeError


def check_tokens(forest: Forest, nodes: np.ndarray) -> None:
    """Raises TreeError where a token id of ``nodes`` ([m] int64, forest indices) is negative."""
    for node in nodes.tolist():
        least = forest.nodes[node].token_ids.min()
        if least < 0:
            raise TreeError(f"{forest.where(node)}: expected token ids >= 0, found {least}")


def check_loss_arrays(forest: Forest, nodes: np.ndarray) -> None:
    """Raises TreeError where a rollout log-prob of ``nodes``, which are supervised, is not finite, or a token
    not in its sampling mask."""
    for node in nodes.tolist():
        _check_logprobs(forest, node)
        _check_mask(forest, node)


def _check_logprobs(forest: Forest, node: int) -> None:
    logprobs = forest.nodes[node].rollout_logprobs
    assert logprobs is not None
    finite = np.isfinite(logprobs)
    if not finite.all():
        token = int(np.argmin(finite))
        raise NonFiniteTreeError(
            f"{forest.where(node)}: the rollout_logprob of token {token} is {logprobs[token]}"
        )


def _check_mask(forest: Forest, node: int) -> None:
    kept, tokens = forest.nodes[node].sampling_mask, forest.nodes[node].token_ids
    if kept is None:
        return
    owner = np.repeat(np.arange(len(kept)), kept.counts)
    found = np.bincount(owner[kept.ids == tokens[owner]], minlength=len(kept)) > 0
    if not found.all():
        token = int(np.argmin(found))
        raise TreeError(
            f"{forest.where(node)}: expected the token {tokens[token]} in its sampling mask, "
            f"found {list(kept)[token].tolist()}"
        )

"""A sampled tree's comparison units: steps that continue the same step (TreeRPO)."""

from __future__ import annotations

from statistics import fmean

from megatron_eqlen.recipe import Recipe
from megatron_eqlen.sampling.comparison import ComparisonUnit, Penalty, no_penalty, node, root
from megatron_eqlen.sampling.independent.compare import reward
from megatron_eqlen.types import SampledTree, TokenTree


def compare(sampled: SampledTree, recipe: Recipe, penalty: Penalty) -> tuple[TokenTree, list[ComparisonUnit]]:
    """The tree as it was sampled. Its steps are compared when it is whole."""
    nodes = [node(parent + 1, step) for parent, step in zip(sampled.parents, sampled.steps, strict=True)]
    rewards = step_rewards(sampled, penalty)
    units = [
        ComparisonUnit(
            sampled.prompt_id,
            [sampled.steps[i] for i in at],
            [nodes[i] for i in at],
            list(at.values()),
            skip_equal=False,
        )
        for at in _siblings(sampled, rewards)
        if not sampled.suspended
    ]
    return TokenTree(sampled.prompt_id, [root(sampled), *nodes]), units


def step_rewards(tree: SampledTree, penalty: Penalty = no_penalty) -> list[float | None]:
    """TreeRPO: a leaf's reward is its response's, an inner step's the mean of the steps that continue it.

    None for a step that the token budget cut off and for one with no other continuation.
    """
    below: list[list[float]] = [[] for _ in tree.steps]
    rewards: list[float | None] = [None] * len(tree.steps)
    for i in reversed(range(len(tree.steps))):
        value = None
        if tree.steps[i].finish_reason is not None:
            value = reward(tree.steps[i], tree.prompt_id)
            value += penalty(sum(map(len, tree.path(i))), tree.steps[i].finish_reason)
        elif below[i]:
            value = fmean(below[i])
        rewards[i] = value
        if tree.parents[i] >= 0 and value is not None:
            below[tree.parents[i]].append(value)
    return rewards


def _siblings(tree: SampledTree, rewards: list[float | None]) -> list[dict[int, float]]:
    """Steps that continue the same step and have a reward, with it, in the order of ``tree.steps``."""
    children: dict[int, dict[int, float]] = {}
    for i, (parent, value) in enumerate(zip(tree.parents, rewards, strict=True)):
        if value is not None:
            children.setdefault(parent, {})[i] = value
    return list(children.values())

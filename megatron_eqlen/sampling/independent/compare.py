"""A group's comparison unit: its completions, all with one another."""

from __future__ import annotations

from megatron_eqlen.recipe import Recipe
from megatron_eqlen.sampling.comparison import ComparisonUnit, Penalty, graded, node, root
from megatron_eqlen.types import Group, Segment, TokenTree


def compare(group: Group, recipe: Recipe, penalty: Penalty) -> tuple[TokenTree, list[ComparisonUnit]]:
    """A star of completions. Those that the token budget cut off have no known reward and are left out. A
    group is compared when it is whole."""
    completions = [one for one in group.completions if one.finish_reason is not None]
    rewards = [reward(one, group.prompt_id) + penalty(len(one), one.finish_reason) for one in completions]
    leaves = [node(0, one) for one in completions]
    unit = ComparisonUnit(group.prompt_id, completions, leaves, rewards, skip_equal=False)
    tree = TokenTree(group.prompt_id, [root(group), *(leaf for leaf in leaves if len(leaf))])
    return tree, [unit] if leaves and not group.suspended else []


def reward(segment: Segment, prompt_id: str) -> float:
    """The verifier's; a truncated response has no answer and gets 0."""
    return graded(segment, prompt_id) if segment.finish_reason == "stop" else 0.0

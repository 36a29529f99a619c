"""A stream's comparison units: the two sides of each of its pairs."""

from __future__ import annotations

from megatron_eqlen.recipe import Recipe
from megatron_eqlen.sampling.comparison import ComparisonUnit, Penalty, no_penalty, node, root
from megatron_eqlen.sampling.equal_length.suffix import due_pairs, pair_rewards
from megatron_eqlen.types import Pair, Stream, TokenTree


def compare(stream: Stream, recipe: Recipe, penalty: Penalty) -> tuple[TokenTree, list[ComparisonUnit]]:
    """A caterpillar, or with ``prefix_in_gradient`` a star whose leaves hold their prefix, too."""
    tree = TokenTree(f"{stream.prompt_id}/{stream.index}", [root(stream)])
    units: list[ComparisonUnit] = []
    trunk = 0
    for i, rewards in enumerate(rewards_of(stream, recipe, penalty)):
        pair = stream.pairs[i]
        _check_equal_length(stream, i, pair)
        if recipe.equal_length.prefix_in_gradient:
            prefix = [earlier.b for earlier in stream.pairs[:i]]
            sides = [node(0, *prefix, pair.a), node(0, *prefix, pair.b)]
        else:
            sides = [node(trunk, pair.a), node(trunk, pair.b)]
        tree.nodes += sides
        trunk = len(tree.nodes) - 1
        if rewards is not None:
            members = [pair.a, pair.b]
            units.append(ComparisonUnit(stream.prompt_id, members, sides, list(rewards), skip_equal=True))
    return tree, units


def rewards_of(stream: Stream, recipe: Recipe, penalty: Penalty) -> list[tuple[float, float] | None]:
    """Of A_i and B_i for each pair that is trained in this step, None for one that is not."""
    settings = recipe.equal_length
    rewards = pair_rewards(stream, settings.suffix_reward, settings.unfinished, penalty)
    due = due_pairs(stream, settings.suffix_reward)
    rewards = [pair if i in due else None for i, pair in enumerate(rewards)]
    return rewards[:1] if settings.single_pair else rewards


def takes_part(stream: Stream, recipe: Recipe) -> bool:
    """Whether pairs are trained, or it ends here without any pair that was due before."""
    if any(pair is not None for pair in rewards_of(stream, recipe, no_penalty)):
        return True
    return not stream.suspended and due_pairs(stream, recipe.equal_length.suffix_reward).start == 0


def _check_equal_length(stream: Stream, number: int, pair: Pair) -> None:
    if len(pair.a) != len(pair.b):
        raise ValueError(
            f"stream {stream.prompt_id}/{stream.index}: pair {number}: expected sides of equal length, "
            f"found {len(pair.a)} and {len(pair.b)} tokens"
        )

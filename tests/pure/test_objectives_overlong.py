"""DAPO's length penalty: each order of signs, with responses that reached the limit, in every sampling kind.

50 tokens at most, a buffer of 10: an ended response of 45 tokens has its verdict less 0.5, one that reached
the limit -1.
"""

from dataclasses import replace

import pytest

import tests.kit.rollouts as kit
from megatron_eqlen.job import Job
from megatron_eqlen.objectives.registry import OBJECTIVES
from megatron_eqlen.tokens import Tokens
from megatron_eqlen.types import Grade, Part
from tests.kit.recipes import small
from tests.kit.rollouts import build_trees
from tests.pure.test_objectives_build import QUESTION, recipe

LIMIT = 50
WINS, LOSES, SKIPPED = (1, -1), (-1, 1), (0, 0)


def segment(length: int, finish_reason: str | None = None, reward: float | None = None) -> Part:
    grade = None if reward is None else Grade(reward, "correct" if reward else "wrong")
    return Part(Tokens.of([5] * length, [-0.5] * length), finish_reason, grade)


def signs(rollout, **keys) -> tuple[int, int]:
    """Return the signs of the advantages of the first unit's two members."""
    (tree,), _ = build_trees([rollout], recipe(loss__overlong_buffer=10, **keys))
    first, second = tree.nodes[1:3]
    return tuple((node.advantage > 0) - (node.advantage < 0) for node in (first, second))


AGAINST_TRUNCATED = pytest.mark.parametrize(("length", "reward", "expected"), [
    (10, 0.0, WINS), (45, 0.0, WINS), (LIMIT, 0.0, SKIPPED),
    (10, 1.0, WINS), (45, 1.0, WINS), (LIMIT, 1.0, WINS),
])  # fmt: skip
"""Wrong and right responses that end before the buffer, in it, and at the limit."""


@AGAINST_TRUNCATED
@pytest.mark.parametrize("reduce", ["max", "mean"])
def test_a_side_against_one_that_only_a_truncated_response_extends(length, reward, expected, reduce):
    tail = segment(LIMIT - length, "length") if length < LIMIT else None
    b = segment(length, None if tail else "length")
    stream = kit.stream(QUESTION, 0, 0, [(segment(length, "stop", reward), b)], "truncated", tail)
    assert signs(stream, objective="dapo", equal_length__suffix_reward=reduce) == expected
    dropping = recipe(objective="dapo", loss__overlong_buffer=10, equal_length__unfinished="drop")
    (tree,), _ = build_trees([stream], dropping)
    assert not any(node.weight for node in tree.nodes), "no ended response extends B: the pair is left out"


@AGAINST_TRUNCATED
@pytest.mark.parametrize("truncated_at", [LIMIT, 30])
def test_a_completion_against_a_truncated_one(length, reward, expected, truncated_at):
    group = kit.group(QUESTION, 0, [segment(length, "stop", reward), segment(truncated_at, "length")])
    assert signs(group, objective="dapo", sampling="independent") == expected


@AGAINST_TRUNCATED
def test_a_leaf_of_a_sampled_tree_against_a_truncated_one(length, reward, expected):
    """The leaves continue one step each: lengths and limits are those of whole responses."""
    steps = [segment(4), segment(4), segment(length - 4, "stop", reward), segment(LIMIT - 4, "length")]
    tree = kit.tree(QUESTION, 0, steps, [-1, -1, 0, 1])
    assert signs(tree, objective="treerpo", sampling="tree") == expected


@pytest.mark.parametrize("outcome", ["truncated", "max_pairs"])
@pytest.mark.parametrize(("reward", "later", "later_reward", "by_max", "by_mean"), [
    (0.0, 48, 1.0, LOSES, LOSES),  # -0.5 against 0.2, and (0.2 - 1) / 2
    (0.0, 48, 0.0, WINS, WINS),  # -0.5 against -0.8, and -0.9
    (0.0, 49, 0.8, LOSES, WINS),  # -0.5 against -0.1, and -0.55
    (1.0, 46, 1.0, WINS, WINS),  # 0.5 against 0.4, and -0.3
])  # fmt: skip
def test_a_truncated_response_beside_an_ended_one_counts_in_the_mean_alone(
    reward, later, later_reward, by_max, by_mean, outcome
):
    pairs = [(segment(n, "stop", r), segment(n)) for n, r in ((45, reward), (later - 45, later_reward))]
    stream = kit.stream(QUESTION, 0, 0, pairs, outcome, segment(LIMIT - later, "length"))
    assert signs(stream, objective="dapo") == by_max
    assert signs(stream, objective="dapo", equal_length__suffix_reward="mean") == by_mean


@pytest.mark.parametrize(("reached", "expected"), [(45, SKIPPED), (47, WINS), (49, WINS)])
def test_a_side_that_the_token_budget_cut_escapes_no_penalty_of_the_shorter_one(reached, expected):
    tail = segment(reached - 45) if reached > 45 else None
    stream = kit.stream(QUESTION, 0, 0, [(segment(45, "stop", 0.0), segment(45))], "budget", tail)
    assert signs(stream, objective="dapo") == expected


def test_without_a_penalty_a_truncated_trunk_is_no_response():
    pairs = [(segment(5, "stop", 0.0), segment(5)), (segment(5, "stop", 1.0), segment(5))]
    stream = kit.stream(QUESTION, 0, 0, pairs, "truncated", segment(40, "length"))
    (tree,), _ = build_trees([stream], recipe(objective="dr_grpo", equal_length__suffix_reward="mean"))
    assert [node.advantage for node in tree.nodes[1:3]] == [-0.5, 0.5]


def test_a_trunk_that_ended_is_no_truncated_response_in_the_mean():
    """The mean over B's ended extensions is 1, above 0.8; with a third of 0 it would be below."""
    pairs = [(segment(5, "stop", 0.8), segment(5)), (segment(5, "stop", 1.0), segment(5, "stop", 1.0))]
    stream = kit.stream(QUESTION, 0, 0, pairs, "both_ended")
    assert signs(stream, objective="dapo", equal_length__suffix_reward="mean") == LOSES


MINE = replace(OBJECTIVES["dapo"], name="mine", overlong_buffer=64)


@pytest.mark.parametrize(("name", "limit", "buffer"), [
    (f"{__name__}:MINE", 8192, 64), (f"{__name__}:MINE", 100, 20), ("dapo", 8192, 1638),
    ("dapo", 32768, 4096),
])  # fmt: skip
def test_the_buffer_is_the_objectives_own_and_at_most_a_fifth_of_the_limit(name, limit, buffer):
    settings = small(objective=name, rollout={"max_response_length": limit})
    assert Job(settings).objective.overlong_buffer == buffer

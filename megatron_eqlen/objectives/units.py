"""Scored rollouts -> token trees and their comparison units.

A comparison unit is the set of members whose rewards are measured against each other: the two sides of an
equal-length pair, the G completions of a group, the children of a node of a sampled tree. Each member is
one node of a token tree, so that an advantage and a weight written on the node reach its tokens.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from statistics import fmean

from megatron_eqlen.objectives.registry import Objective
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.rewards.suffix import pair_rewards
from megatron_eqlen.types import (
    Grade,
    Group,
    Node,
    Pair,
    Prompt,
    Rollout,
    SampledTree,
    Segment,
    Stream,
    TokenTree,
)

KINDS = {"equal_length": Stream, "independent": Group, "tree": SampledTree}


@dataclass
class ComparisonUnit:
    """Members that are compared with each other; the lists are aligned."""

    prompt_id: str
    rollout: int
    """Number of the rollout in its minibatch: units of one rollout share its weight."""
    nodes: list[Node]
    rewards: list[float]
    skip_equal: bool
    """The paper's skip rule: with equal rewards nothing of it is trained, not even the KL penalty."""
    advantages: list[float] = field(default_factory=list)
    trained: bool = True
    counted: bool = True
    """Whether it is one of the N_k (and its tokens are among those that token means divide by)."""

    @property
    def lengths(self) -> list[int]:
        return [len(node.token_ids) for node in self.nodes]


def comparison_units(
    rollout: Rollout, number: int, recipe: Recipe, objective: Objective
) -> tuple[TokenTree, list[ComparisonUnit]]:
    """The token tree of a rollout and the units over its nodes, not yet weighted.

    Raises ValueError for a rollout of another ``sampling`` than the recipe's (a replayed dump, say).
    """
    if not isinstance(rollout, KINDS[recipe.sampling]):
        raise ValueError(
            f"prompt {rollout.prompt_id}: sampling: {recipe.sampling} trains on "
            f"{KINDS[recipe.sampling].__name__} rollouts, found a {type(rollout).__name__}"
        )
    _check_masks(rollout, recipe)
    if isinstance(rollout, Stream):
        return _of_stream(rollout, number, recipe, objective)
    if isinstance(rollout, Group):
        return _of_group(rollout, number, recipe, objective)
    return _of_sampled_tree(rollout, number)


def overlong_penalty(length: int, objective: Objective, max_response_length: int) -> float:
    """DAPO's soft length penalty, from 0 where the buffer starts to -factor at the limit."""
    if not objective.overlong_buffer:
        return 0.0
    excess = length - (max_response_length - objective.overlong_buffer)
    return min(-excess / objective.overlong_buffer * objective.overlong_factor, 0.0)


def verifier_rewards(rollout: Rollout, recipe: Recipe) -> list[list[float]]:
    """The members' rewards of each comparison unit, before any length penalty."""
    if isinstance(rollout, Stream):
        return [list(rewards) for rewards in _pair_rewards(rollout, recipe) if rewards is not None]
    if isinstance(rollout, Group):
        return [[_reward(completion, rollout.prompt_id) for completion in _finished(rollout)]]
    rewards = step_rewards(rollout)
    return [[rewards[i] for i in siblings] for siblings in _siblings(rollout, rewards)]


def step_rewards(tree: SampledTree) -> list[float | None]:
    """TreeRPO: a leaf's reward is the verifier's, an inner step's the mean of the steps that continue it.

    None for a step that the token budget cut off and for one with no other continuation.
    """
    below: list[list[float]] = [[] for _ in tree.steps]
    rewards: list[float | None] = [None] * len(tree.steps)
    for i in reversed(range(len(tree.steps))):
        if tree.steps[i].finish_reason is not None:
            rewards[i] = _reward(tree.steps[i], tree.prompt_id)
        elif below[i]:
            rewards[i] = fmean(below[i])
        if tree.parents[i] >= 0 and rewards[i] is not None:
            below[tree.parents[i]].append(rewards[i])
    return rewards


def _reward(segment: Segment, prompt_id: str) -> float:
    """The verifier's; a truncated response has no answer and gets 0."""
    return _graded(segment, prompt_id) if segment.finish_reason == "stop" else 0.0


def _finished(group: Group) -> list[Segment]:
    """Without what the token budget cut off: nobody knows what those would have been worth."""
    return [completion for completion in group.completions if completion.finish_reason is not None]


def _pair_rewards(stream: Stream, recipe: Recipe) -> list[tuple[float, float] | None]:
    rewards = pair_rewards(stream, recipe.equal_length.suffix_reward, recipe.equal_length.unfinished)
    return rewards[:1] if recipe.equal_length.single_pair else rewards


def _siblings(tree: SampledTree, rewards: list[float | None]) -> list[list[int]]:
    """Steps that continue the same step and have a reward, in the order of ``tree.steps``."""
    children: dict[int, list[int]] = {}
    for i, parent in enumerate(tree.parents):
        if rewards[i] is not None:
            children.setdefault(parent, []).append(i)
    return list(children.values())


def _of_sampled_tree(sampled: SampledTree, number: int) -> tuple[TokenTree, list[ComparisonUnit]]:
    nodes = [_node(parent + 1, step) for parent, step in zip(sampled.parents, sampled.steps, strict=True)]
    rewards = step_rewards(sampled)
    units = [
        ComparisonUnit(
            sampled.prompt_id, number, [nodes[i] for i in at], [rewards[i] for i in at], skip_equal=False
        )
        for at in _siblings(sampled, rewards)
    ]
    return TokenTree(sampled.prompt_id, [_root(sampled.prompt), *nodes]), units


def _of_group(
    group: Group, number: int, recipe: Recipe, objective: Objective
) -> tuple[TokenTree, list[ComparisonUnit]]:
    completions, longest = _finished(group), recipe.rollout.max_response_length
    rewards = [
        _reward(completion, group.prompt_id) + overlong_penalty(len(completion), objective, longest)
        for completion in completions
    ]
    leaves = [_node(0, completion) for completion in completions]
    unit = ComparisonUnit(group.prompt_id, number, leaves, rewards, skip_equal=False)
    tree = TokenTree(group.prompt_id, [_root(group.prompt), *(leaf for leaf in leaves if leaf.token_ids)])
    return tree, [unit] if leaves else []


def _of_stream(
    stream: Stream, number: int, recipe: Recipe, objective: Objective
) -> tuple[TokenTree, list[ComparisonUnit]]:
    if objective.overlong_buffer:
        stream = _shaped(stream, objective, recipe.rollout.max_response_length)
    tree = TokenTree(f"{stream.prompt_id}/{stream.index}", [_root(stream.prompt)])
    units: list[ComparisonUnit] = []
    trunk = 0
    for i, rewards in enumerate(_pair_rewards(stream, recipe)):
        pair = stream.pairs[i]
        _check_equal_length(stream, i, pair)
        if recipe.equal_length.prefix_in_gradient:
            prefix = [earlier.b for earlier in stream.pairs[:i]]
            sides = [_node(0, *prefix, pair.a), _node(0, *prefix, pair.b)]
        else:
            sides = [_node(trunk, pair.a), _node(trunk, pair.b)]
        tree.nodes += sides
        trunk = len(tree.nodes) - 1
        if rewards is not None:
            units.append(ComparisonUnit(stream.prompt_id, number, sides, list(rewards), skip_equal=True))
    return tree, units


def _check_equal_length(stream: Stream, number: int, pair: Pair) -> None:
    if len(pair.a) != len(pair.b):
        raise ValueError(
            f"stream {stream.prompt_id}/{stream.index}: pair {number}: expected sides of equal length, "
            f"found {len(pair.a)} and {len(pair.b)} tokens"
        )


def _check_masks(rollout: Rollout, recipe: Recipe) -> None:
    """What is trained is normalised as the recipe says: over the recorded masks or over the vocabulary."""
    wanted = recipe.rollout.keep_sampling_mask
    for segment in rollout.segments():
        if wanted != (segment.sampling_mask is not None):
            raise ValueError(
                f"prompt {rollout.prompt_id}: rollout.keep_sampling_mask: {str(wanted).lower()}, found a "
                f"rollout recorded {'without' if wanted else 'with'} sampling masks"
            )


def _root(prompt: Prompt) -> Node:
    return Node(-1, prompt.token_ids)


def _node(parent: int, *segments: Segment) -> Node:
    """One node over the tokens of consecutive segments of a path."""
    masked = segments[0].sampling_mask is not None
    return Node(
        parent,
        [token for segment in segments for token in segment.token_ids],
        rollout_logprobs=[value for segment in segments for value in segment.logprobs],
        sampling_mask=[kept for segment in segments for kept in segment.sampling_mask] if masked else None,
    )


def _graded(segment: Segment, prompt_id: str) -> float:
    if segment.grade is None:
        raise ValueError(
            f"prompt {prompt_id}: an ended response has no grade; score rollouts before training"
        )
    return segment.grade.reward


def _shaped(stream: Stream, objective: Objective, max_response_length: int) -> Stream:
    """The stream with the length penalty of each whole response added to its grade."""
    penalised: dict[int, Segment] = {}
    for segment, response in stream.ended():
        reward = _graded(segment, stream.prompt_id)
        reward += overlong_penalty(len(response), objective, max_response_length)
        grade = dataclasses.replace(segment.grade or Grade(0.0, ""), reward=reward)
        penalised[id(segment)] = dataclasses.replace(segment, grade=grade)

    def swap(segment: Segment) -> Segment:
        return penalised.get(id(segment), segment)

    pairs = [Pair(swap(pair.a), swap(pair.b)) for pair in stream.pairs]
    return dataclasses.replace(stream, pairs=pairs, tail=stream.tail and swap(stream.tail))

"""Equal-length sampling: streams of pairs, whose two sides are compared.

A_i ended, so its reward is its own grade. B_i joined the trunk; its reward is taken from every ended response
that extends it: A_{i+1}, A_{i+2}, ..., a last B_N that ended together with A_N, and an ended tail. The paper
takes their maximum; the mean is its ablation. A both-ended B_N is a response itself, with its own grade. With
``on_policy`` it is the value of the part: an unbiased estimate of the mean reward of responses that extend
it, where an end that the budget left open counts as a failure.

A length penalty is added to each response before they are reduced. A trunk that reached the limit then is a
response as well, with reward 0 and the full penalty, and counts in the mean (no maximum needs it): otherwise
B_i would escape a penalty that the shorter A_i pays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import fmean

from megatron_eqlen.recipe import Recipe
from megatron_eqlen.sampling.comparison import (
    ComparisonUnit,
    Penalty,
    all_equal,
    no_penalty,
    part_rewards,
    token_tree,
    verifier_reward,
)
from megatron_eqlen.sampling.equal_length.dual_track import DualTrack, pairs_of, tail_of
from megatron_eqlen.sampling.harvester import Setting
from megatron_eqlen.sampling.kind import SamplingKind, plural
from megatron_eqlen.tokens import Tokens
from megatron_eqlen.types import Metrics, Node, Outcome, Part, Prompt, Rollout, TokenTree

OUTCOMES: tuple[Outcome, ...] = ("both_ended", "truncated", "max_pairs", "budget")
"""Outcomes of complete streams."""


class EqualLength(SamplingKind):
    """Streams of equal-length pairs. A stream's parts are the sides of each pair in turn, then the tail."""

    name = "equal_length"

    def harvester(self, prompt: Prompt, index: int, setting: Setting) -> DualTrack:
        return DualTrack(prompt, index, setting)

    def compare(
        self, rollout: Rollout, recipe: Recipe, penalty: Penalty
    ) -> tuple[TokenTree, list[ComparisonUnit]]:
        """Return a caterpillar, or with ``prefix_in_gradient`` a star; and a unit for each pair."""
        on_policy = recipe.equal_length.pair_weight == "on_policy"
        rewards = _rewards(rollout, recipe, penalty)
        pairs = pairs_of(rollout)
        sides = [side for pair in pairs for side in pair]
        tree, nodes = token_tree(rollout, f"{rollout.prompt_id}/{rollout.index}", sides)
        if recipe.equal_length.prefix_in_gradient:
            for side in sides:
                # a star: each side a child of the prompt, with its whole prefix as tokens
                prefix = rollout.line(side.number)
                nodes[side.number].parent = 0
                nodes[side.number].tokens = Tokens.joined([part.tokens for part in prefix])
        units: list[ComparisonUnit] = []
        for i, pair in enumerate(pairs):
            if len(pair.a) != len(pair.b):
                where = f"stream {rollout.prompt_id}/{rollout.index}: pair {i}"
                found = f"found {len(pair.a)} and {len(pair.b)} tokens"
                raise ValueError(f"{where}: expected sides of equal length, {found}")
            if (of_pair := rewards[i]) is not None:
                of_sides, skips = [nodes[side.number] for side in pair], not on_policy
                unit = ComparisonUnit(rollout.prompt_id, [*pair], of_sides, [*of_pair], skip_equal=skips)
                if on_policy:
                    # weight of the part that the pair continues: each B side has half of its pair's
                    unit.share = 2.0**-i
                units.append(unit)
        # a tail is in no pair, but may have a gradient (`_tail_units`)
        tail = tail_of(rollout)
        if tail is not None and tail.parent in nodes and rollout.outcome != "budget":
            units += _tail_units(tail, rollout, tree, units, recipe, penalty)
        return tree, units

    def labels(self, rollout: Rollout) -> tuple[str, list[str]]:
        """Return labels ``A1``, ``B1``, ``A2``, ... and ``tail``."""
        pairs, outcome = len(pairs_of(rollout)), rollout.outcome.replace("_", " ")
        labels = [f"{side}{number + 1}" for number in range(pairs) for side in "AB"]
        labels += ["tail"] if tail_of(rollout) is not None else []
        return f"stream {rollout.index}, {plural(pairs, 'pair')}, {outcome}", labels

    def harvest_metrics(self, rollouts: Sequence[Rollout]) -> Metrics:
        """Return numbers of pairs, their lengths, and the shares of the streams' outcomes."""
        pairs = [pairs_of(stream) for stream in rollouts]
        # [pairs of all streams]
        lengths = [len(pair.a) for of_stream in pairs for pair in of_stream]
        outcomes = Counter(stream.outcome for stream in rollouts)
        metrics: Metrics = {
            "harvest/streams": len(rollouts),
            "harvest/pairs": len(lengths),
            "harvest/pairs_per_stream": len(lengths) / len(rollouts),
            "harvest/supervised_tokens": 2 * sum(lengths),
            "harvest/tail_tokens": sum(len(tail) for tail in map(tail_of, rollouts) if tail is not None),
        }
        for outcome in OUTCOMES:
            metrics[f"harvest/{outcome}_fraction"] = outcomes[outcome] / len(rollouts)
        if lengths:
            metrics["harvest/segment_length"] = fmean(lengths)
            metrics["harvest/segment_length_max"] = max(lengths)
        return metrics

    def objective_metrics(
        self, units: Sequence[ComparisonUnit], rollouts: Sequence[Rollout], recipe: Recipe
    ) -> Metrics:
        """Return numbers and lengths of pairs, and the share with equal rewards; empty for no streams."""
        if not rollouts:
            return {}
        units = [unit for unit in units if len(unit.members) == 2]  # without tails
        lengths = [unit.lengths[0] for unit in units]
        return {
            "objective/pairs": float(len(units)),
            "objective/pairs_per_stream": len(units) / len(rollouts),
            "objective/skip_rate": fmean(all_equal(unit.rewards) for unit in units) if units else 0.0,
            "objective/reward_gap_max_mean": _reward_gap(rollouts, recipe),
            "objective/segment_length_mean": fmean(lengths) if lengths else 0.0,
            "objective/segment_length_max": float(max(lengths, default=0)),
        }


KIND = EqualLength()


def _rewards(stream: Rollout, recipe: Recipe, penalty: Penalty) -> list[tuple[float, float] | None]:
    """Return the rewards of A_i and B_i for each pair of a scored, complete stream. A B_i that no ended
    response extends has reward 0 plus the trunk's penalty; with ``unfinished: drop`` its pair is None."""
    settings = recipe.equal_length
    if settings.pair_weight == "on_policy":
        value = part_rewards(stream, penalty, open_reward=0.0)
        return [(value[pair.a.number], value[pair.b.number]) for pair in pairs_of(stream)]
    trunk_penalty, truncated = _open_end(stream, penalty)
    known = [trunk_penalty] if truncated and penalty is not no_penalty else []
    rewards: list[tuple[float, float] | None] = []
    for a, ended in _from_last(stream, penalty):
        if ended:
            # with a penalty the truncated trunk is a response, too, of reward 0
            values = ended + known
            rewards.append((a, max(values) if settings.suffix_reward == "max" else sum(values) / len(values)))
        else:
            rewards.append(None if settings.unfinished == "drop" else (a, trunk_penalty))
    return rewards[::-1]


def _from_last(stream: Rollout, penalty: Penalty) -> Iterator[tuple[float, list[float]]]:
    """Yield from the last pair on: the reward of A_i, and those of all responses that extend B_i."""
    # without a penalty, lengths do not matter
    ends = Counter[int]() if penalty is no_penalty else stream.ends()
    # the reward of each response, by the number of the part that ends it
    own = {
        part.number: verifier_reward(part, stream.prompt_id) + penalty(ends[part.number], "stop")
        for part in stream.parts
        if part.finish_reason == "stop"
    }
    tail = tail_of(stream)
    ended = [own[tail.number]] if tail is not None and tail.number in own else []
    # from the end, `ended` gathers what extends each B side: each response is read once
    for pair in reversed(pairs_of(stream)):
        if pair.b.number in own:
            ended.append(own[pair.b.number])
        yield own[pair.a.number], ended
        ended.append(own[pair.a.number])


def _open_end(stream: Rollout, penalty: Penalty) -> tuple[float, bool]:
    """Return the penalty of the whole trunk, and True if it reached the limit; (0, False) where it ended."""
    # B sides and tail
    trunk = [part for part in stream.parts if part.role != "a"]
    if not trunk or trunk[-1].finish_reason == "stop":
        return 0.0, False
    truncated = stream.outcome == "truncated" or trunk[-1].finish_reason == "length"
    return penalty(sum(map(len, trunk)), "length" if truncated else None), truncated


def _tail_units(
    tail: Part,
    stream: Rollout,
    tree: TokenTree,
    units: Sequence[ComparisonUnit],
    recipe: Recipe,
    penalty: Penalty,
) -> list[ComparisonUnit]:
    """Append the tail to ``tree`` and return its unit, or nothing where it has no gradient.

    The tail continues the B side of the last of ``units``, with its weight. After ``max_pairs`` it is
    compared with the A side of the same pair. Otherwise it stands for the last two tracks, truncated and
    equal: only other streams, a teacher and the KL penalty give it a gradient.
    """
    on_policy, others = recipe.equal_length.pair_weight == "on_policy", recipe.equal_length.baseline
    last = units[-1] if units and stream.outcome == "max_pairs" else None
    compared = on_policy and (others == "streams" or last is not None)
    if not (compared or recipe.teacher or (on_policy and recipe.loss.kl_coef > 0)):
        return []
    # a child of the last B side, which it continues
    node = Node(len(tree.nodes) - 1, tail.tokens, home=tail.home)
    tree.nodes.append(node)
    reward = part_rewards(stream, penalty, open_reward=0.0)[tail.number]
    unit = ComparisonUnit(stream.prompt_id, [tail], [node], [reward], skip_equal=False)
    if on_policy:
        unit.share = 2.0 ** -len(units)
    if compared and last is not None:
        unit.baseline = last.rewards[0]
    return [unit]


def _reward_gap(streams: Sequence[Rollout], recipe: Recipe) -> float:
    """Return by how much the suffix reward ``max`` exceeds ``mean``, on average over all B sides."""
    of_all = [
        (max(ended), sum(ended) / len(ended)) if ended else (0.0, 0.0)
        for stream in streams
        for _, ended in _from_last(stream, no_penalty)
        if ended or recipe.equal_length.unfinished == "zero"
    ]
    return fmean(most for most, _ in of_all) - fmean(mean for _, mean in of_all) if of_all else 0.0

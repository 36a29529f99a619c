"""Equal-length sampling: streams of pairs, whose two sides are compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Literal, get_args

from megatron_eqlen.metrics import (
    HARVEST_PAIRS_PER_STREAM,
    HARVEST_SEGMENT_LENGTH,
    HARVEST_SUPERVISED_TOKENS,
    OBJECTIVE_PAIRS_PER_STREAM,
    OBJECTIVE_REWARD_GAP,
    OBJECTIVE_SEGMENT_LENGTH_MEAN,
    OBJECTIVE_SKIP_RATE,
)
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.sampling.comparison import (
    ComparisonUnit,
    Penalty,
    all_equal,
    no_penalty,
    node,
    response_reward,
    root,
)
from megatron_eqlen.sampling.equal_length.dual_track import DualTrack, stream_of
from megatron_eqlen.sampling.equal_length.suffix import due_pairs, pair_rewards, policy_rewards, trunk_reward
from megatron_eqlen.sampling.harvester import RolloutHeader, RolloutPart
from megatron_eqlen.sampling.kind import (
    LabeledSegment,
    Picture,
    PolicySample,
    SamplingKind,
    context_metrics,
    plural,
)
from megatron_eqlen.types import Metrics, Outcome, Pair, Prompt, Segment, Stream, TokenTree


class EqualLength(SamplingKind[Stream]):
    """Streams of equal-length pairs. A stream's parts are the sides of each pair in turn, then the tail."""

    name = "equal_length"
    rollout_type = Stream

    def harvesters(
        self, prompts: Sequence[Prompt], recipe: Recipe, eos_token_ids: frozenset[int], seed: int
    ) -> list[DualTrack]:
        """Return one harvester for each of the G / 2 subgroups of every prompt."""
        limit = recipe.rollout.max_response_length
        max_pairs = 1 if recipe.equal_length.single_pair else recipe.equal_length.max_pairs
        return [
            DualTrack(prompt, index, limit, eos_token_ids, seed, max_pairs)
            for prompt in prompts
            for index in range(recipe.streams_per_prompt)
        ]

    def parts(self, rollout: Stream) -> list[RolloutPart]:
        segments = [side for pair in rollout.pairs for side in (("a", pair.a), ("b", pair.b))]
        segments += [("tail", rollout.tail)] if rollout.tail is not None else []
        return [RolloutPart(role, number, segment) for number, (role, segment) in enumerate(segments)]

    def join(self, header: RolloutHeader, parts: Sequence[RolloutPart]) -> Stream:
        return stream_of(header, parts)

    def compare(
        self, rollout: Stream, recipe: Recipe, penalty: Penalty
    ) -> tuple[TokenTree, list[ComparisonUnit]]:
        """Return a caterpillar, or with ``prefix_in_gradient`` a star whose leaves hold their prefix, too;
        and a unit for each pair."""
        on_policy = recipe.equal_length.pair_weight == "on_policy"
        tree = TokenTree(f"{rollout.prompt_id}/{rollout.index}", [root(rollout)])
        units: list[ComparisonUnit] = []
        trunk = 0
        for i, rewards in enumerate(due_rewards(rollout, recipe, penalty)):
            pair = rollout.pairs[i]
            _check_equal_length(rollout, i, pair)
            if recipe.equal_length.prefix_in_gradient:
                prefix = [earlier.b for earlier in rollout.pairs[:i]]
                sides = [node(0, *prefix, pair.a), node(0, *prefix, pair.b)]
            else:
                sides = [node(trunk, pair.a), node(trunk, pair.b)]
            tree.nodes += sides
            trunk = len(tree.nodes) - 1
            if rewards is not None:
                members = [pair.a, pair.b]
                unit = ComparisonUnit(rollout.prompt_id, members, sides, list(rewards), skip_equal=True)
                if on_policy:
                    unit.skip_equal, unit.share = False, 2.0**-i
                units.append(unit)
        if on_policy and not rollout.suspended and rollout.tail is not None:
            units += _tail_units(rollout, tree, units, recipe, penalty)
        return tree, units

    def is_due(self, rollout: Stream, recipe: Recipe) -> bool:
        """Return True if pairs are trained, or the stream ends here without any pair that was due before."""
        if any(rewards is not None for rewards in due_rewards(rollout, recipe, no_penalty)):
            return True
        return not rollout.suspended and due_pairs(rollout, _reduction(recipe)).start == 0

    def picture(self, rollout: Stream) -> Picture:
        pairs: list[tuple[LabeledSegment, LabeledSegment]] = []
        for number, pair in enumerate(rollout.pairs):
            prefix = rollout.trunk_token_ids(number)
            a = LabeledSegment(f"A{number + 1}", pair.a, prefix)
            b = LabeledSegment(f"B{number + 1}", pair.b, prefix)
            pairs.append((a, b))
        tail = []
        if rollout.tail is not None:
            tail = [LabeledSegment("tail", rollout.tail, rollout.trunk_token_ids(len(pairs)))]
        outcome = rollout.outcome.replace("_", " ")
        return Picture(f"stream {rollout.index}, {plural(len(pairs), 'pair')}, {outcome}", pairs, tail)

    def harvest_metrics(self, rollouts: Sequence[Stream]) -> Metrics:
        """Return numbers of pairs, their lengths, and the shares of the streams' outcomes."""
        lengths = [len(pair.a) for stream in rollouts for pair in stream.pairs]
        outcomes = Counter(stream.outcome for stream in rollouts)
        metrics: Metrics = {
            "harvest/streams": len(rollouts),
            "harvest/pairs": len(lengths),
            HARVEST_PAIRS_PER_STREAM: len(lengths) / len(rollouts),
            HARVEST_SUPERVISED_TOKENS: 2 * sum(lengths),
            "harvest/tail_tokens": sum(len(stream.tail) for stream in rollouts if stream.tail is not None),
        }
        for outcome in get_args(Outcome):
            metrics[f"harvest/{outcome}_fraction"] = outcomes[outcome] / len(rollouts)
        if lengths:
            metrics[HARVEST_SEGMENT_LENGTH] = fmean(lengths)
            metrics["harvest/segment_length_max"] = max(lengths)
        branches = sum(max(len(stream.pairs) - 1, 0) for stream in rollouts)
        return metrics | context_metrics(rollouts, map(_starts, rollouts), branches)

    def objective_metrics(
        self, units: Sequence[ComparisonUnit], rollouts: Sequence[Stream], recipe: Recipe
    ) -> Metrics:
        """Return numbers and lengths of pairs with rewards, and the share of pairs with equal rewards, which
        are not trained; empty for no streams."""
        if not rollouts:
            return {}
        units = [unit for unit in units if len(unit.members) == 2]  # without tails
        lengths = [unit.lengths[0] for unit in units]
        return {
            "objective/pairs": float(len(units)),
            OBJECTIVE_PAIRS_PER_STREAM: len(units) / len(rollouts),
            OBJECTIVE_SKIP_RATE: fmean(all_equal(unit.rewards) for unit in units) if units else 0.0,
            OBJECTIVE_REWARD_GAP: _reward_gap(rollouts, recipe),
            OBJECTIVE_SEGMENT_LENGTH_MEAN: fmean(lengths) if lengths else 0.0,
            "objective/segment_length_max": float(max(lengths, default=0)),
        }

    def policy_samples(self, rollout: Stream) -> Iterator[PolicySample]:
        """Yield every A side, and the response that the trunk ends with.

        At each fork two tracks continue the same trunk, independently. The continuation of the longer one is
        estimated by all that follows its B, so A_i has half of the weight that there is from its fork on:
        1 / 2^i. The plain mean over the responses of a stream is biased to longer ones: each B side was
        chosen because its track had not ended.
        """
        weight, start = 1.0, 0
        for pair in rollout.pairs:
            weight /= 2
            yield _policy_sample(rollout, weight, start, pair.a)
            start += len(pair.b)
        if rollout.tail is not None:
            yield _policy_sample(rollout, weight, start, rollout.tail)
        elif rollout.pairs:
            last = rollout.pairs[-1].b
            yield _policy_sample(rollout, weight, start - len(last), last)


KIND = EqualLength()


def due_rewards(stream: Stream, recipe: Recipe, penalty: Penalty) -> list[tuple[float, float] | None]:
    """Return the rewards of A_i and B_i for each pair that is trained in this step, None for the others."""
    settings = recipe.equal_length
    if settings.pair_weight == "on_policy":
        rewards: Sequence[tuple[float, float] | None] = policy_rewards(stream, penalty)
    else:
        rewards = pair_rewards(stream, settings.suffix_reward, settings.unfinished, penalty)
    due = due_pairs(stream, _reduction(recipe))
    rewards = [pair if i in due else None for i, pair in enumerate(rewards)]
    return rewards[:1] if settings.single_pair else rewards


def _reduction(recipe: Recipe) -> Literal["max", "mean"]:
    """Return how rewards of B sides are reduced, as far as it says when they are final: a value, which is a
    weighted mean, is final when a mean is."""
    settings = recipe.equal_length
    return "mean" if settings.pair_weight == "on_policy" else settings.suffix_reward


def _tail_units(
    stream: Stream, tree: TokenTree, units: Sequence[ComparisonUnit], recipe: Recipe, penalty: Penalty
) -> list[ComparisonUnit]:
    """Append the tail to ``tree`` and return its unit, or nothing where it has no gradient.

    The tail continues the B side of the last of ``units``, and has its weight. After ``max_pairs`` no later
    pair trains what extends that B, and the tail is compared with the A side of the same pair. Both of the
    stream's last tracks are truncated otherwise, and equal; compared with other streams they differ.
    """
    assert stream.tail is not None
    streams = recipe.equal_length.baseline == "streams"
    if stream.outcome == "budget" or not (streams or (units and stream.outcome == "max_pairs")):
        return []
    tail = node(len(tree.nodes) - 1, stream.tail)
    tree.nodes.append(tail)
    unit = ComparisonUnit(
        stream.prompt_id, [stream.tail], [tail], [trunk_reward(stream, penalty)], skip_equal=False
    )
    unit.share = 2.0 ** -len(units)
    unit.baseline = units[-1].rewards[0] if units else None
    return [unit]


def _check_equal_length(stream: Stream, number: int, pair: Pair) -> None:
    if len(pair.a) != len(pair.b):
        raise ValueError(
            f"stream {stream.prompt_id}/{stream.index}: pair {number}: expected sides of equal length, "
            f"found {len(pair.a)} and {len(pair.b)} tokens"
        )


def _policy_sample(stream: Stream, weight: float, start: int, segment: Segment) -> PolicySample:
    return PolicySample(weight, start + len(segment), response_reward(segment, stream.prompt_id))


def _starts(stream: Stream) -> Iterator[int]:
    """Yield the number of tokens between the prompt and each segment."""
    trunk = 0
    for pair in stream.pairs:
        yield from (trunk, trunk)
        trunk += len(pair.b)
    if stream.tail is not None:
        yield trunk


def _reward_gap(streams: Sequence[Stream], recipe: Recipe) -> float:
    """Return by how much the suffix reward ``max`` exceeds ``mean``, on average over the B sides of streams
    that are complete."""
    streams = [stream for stream in streams if not stream.suspended]
    best, mean = (_b_rewards(streams, reduce, recipe) for reduce in ("max", "mean"))
    return fmean(best) - fmean(mean) if best else 0.0


def _b_rewards(streams: Sequence[Stream], reduce: Literal["max", "mean"], recipe: Recipe) -> list[float]:
    rewards = [pair_rewards(stream, reduce, recipe.equal_length.unfinished) for stream in streams]
    return [pair[1] for pairs in rewards for pair in pairs if pair]

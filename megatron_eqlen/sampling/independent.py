"""Independent completions of each prompt: the baselines' sampling."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import fmean

from megatron_eqlen.metrics import (
    HARVEST_RESPONSE_LENGTH,
    HARVEST_SUPERVISED_TOKENS,
    HARVEST_TRUNCATED_FRACTION,
)
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.sampling.comparison import ComparisonUnit, Penalty, node, response_reward, root
from megatron_eqlen.sampling.harvester import RolloutHeader, RolloutPart, in_order
from megatron_eqlen.sampling.kind import (
    LabeledSegment,
    Picture,
    PolicySample,
    SamplingKind,
    context_metrics,
    plural,
)
from megatron_eqlen.sampling.track import Track
from megatron_eqlen.tokens import TokenIds, Tokens
from megatron_eqlen.types import NO_TOKENS, Group, Metrics, Prompt, Segment, TokenTree


class Independent(SamplingKind[Group]):
    """Groups of G completions, all compared with one another. A group's parts are its completions."""

    name = "independent"
    rollout_type = Group

    def harvesters(
        self, prompts: Sequence[Prompt], recipe: Recipe, eos_token_ids: frozenset[int], seed: int
    ) -> list[IndependentGroup]:
        """Return one harvester for each prompt."""
        limit = recipe.rollout.max_response_length
        return [IndependentGroup(prompt, recipe.group_size, limit, eos_token_ids, seed) for prompt in prompts]

    def parts(self, rollout: Group) -> list[RolloutPart]:
        return [
            RolloutPart("completion", number, completion)
            for number, completion in zip(rollout.numbers, rollout.completions, strict=True)
        ]

    def join(self, header: RolloutHeader, parts: Sequence[RolloutPart]) -> Group:
        parts = in_order(parts)
        return Group(
            prompt=header.prompt,
            policy_version=header.policy_version,
            completions=[part.segment for part in parts],
            index=header.index,
            prompt_columns=header.prompt_columns,
            numbers=[part.number for part in parts],
            suspended=header.outcome == "suspended",
        )

    def compare(
        self, rollout: Group, recipe: Recipe, penalty: Penalty
    ) -> tuple[TokenTree, list[ComparisonUnit]]:
        """Return a star of completions and their unit, once the group is complete. Completions that the token
        budget cut off have no known reward and are left out."""
        ended = [segment for segment in rollout.completions if segment.finish_reason is not None]
        rewards = [
            response_reward(segment, rollout.prompt_id) + penalty(len(segment), segment.finish_reason)
            for segment in ended
        ]
        leaves = [node(0, segment) for segment in ended]
        unit = ComparisonUnit(rollout.prompt_id, ended, leaves, rewards, skip_equal=False)
        tree = TokenTree(rollout.prompt_id, [root(rollout), *(leaf for leaf in leaves if len(leaf))])
        return tree, [unit] if leaves and not rollout.suspended else []

    def picture(self, rollout: Group) -> Picture:
        segments = [
            LabeledSegment(f"completion {number}", segment, NO_TOKENS)
            for number, segment in enumerate(rollout.completions)
        ]
        return Picture(plural(len(segments), "completion"), segments=segments)

    def harvest_metrics(self, rollouts: Sequence[Group]) -> Metrics:
        completions = [segment for group in rollouts for segment in group.completions]
        starts = ([0] * len(group.completions) for group in rollouts)
        return completion_metrics(completions) | context_metrics(rollouts, starts)

    def policy_samples(self, rollout: Group) -> Iterator[PolicySample]:
        """Yield every completion with the same weight."""
        for segment in rollout.completions:
            weight = 1 / len(rollout.completions)
            yield PolicySample(weight, len(segment), response_reward(segment, rollout.prompt_id))

    def open_share(self, rollout: Group, recipe: Recipe) -> float:
        """Return the share of the completions that have not ended."""
        return 1 - len(rollout.completions) / recipe.group_size


KIND = Independent()


def completion_metrics(segments: Sequence[Segment]) -> Metrics:
    """Return the number of completions (steps, of sampled trees), their lengths, and why they ended."""
    lengths = [len(segment) for segment in segments]
    reasons = Counter(segment.finish_reason for segment in segments)
    return {
        "harvest/completions": len(segments),
        HARVEST_SUPERVISED_TOKENS: sum(lengths),
        HARVEST_RESPONSE_LENGTH: fmean(lengths),
        "harvest/response_length_max": max(lengths),
        HARVEST_TRUNCATED_FRACTION: reasons["length"] / len(segments),
        "harvest/budget_fraction": reasons[None] / len(segments),
    }


class IndependentGroup:
    """Harvests the completions of one prompt."""

    index = 0

    def __init__(
        self, prompt: Prompt, group_size: int, limit: int, eos_token_ids: frozenset[int], seed: int
    ) -> None:
        self.prompt = prompt
        self.open = {
            number: Track(prompt, 0, number, [], limit, eos_token_ids, seed) for number in range(group_size)
        }
        self.parts: list[RolloutPart] = []
        self.prompt_columns: Tokens | None = None

    @property
    def complete(self) -> bool:
        return not self.open

    def start(self) -> list[Track]:
        return list(self.open.values())

    def advance(self) -> list[Track]:
        self._end([number for number, track in self.open.items() if track.finish_reason is not None])
        return []

    def cut(self) -> None:
        self._end(list(self.open))

    def response(self, part: RolloutPart) -> TokenIds:
        return part.segment.token_ids

    def parts_along(self, track: Track) -> Iterator[tuple[int, RolloutPart, int]]:
        return ((0, part, 1) for part in self.parts)

    def rollout(self, policy_version: int) -> Group:
        outcome = "suspended" if self.open else None
        header = RolloutHeader(self.prompt, self.index, policy_version, outcome, self.prompt_columns)
        return KIND.join(header, self.parts)

    def _end(self, numbers: list[int]) -> None:
        for number in numbers:
            self.parts.append(RolloutPart("completion", number, self.open.pop(number).segment(0)))

"""Sampling kinds: how rollouts are generated, compared and counted.

    tokens ─Harvester─► rollout ─compare─► token tree and comparison units (objectives weigh them)
                           ├────picture──► its segments as people see them
                           └─────────────► harvest/..., objective/... and policy/... metrics

Each value of the recipe's ``sampling`` is a subclass of ``SamplingKind`` beside this file.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from megatron_eqlen.metrics import HARVEST_BRANCHES, HARVEST_CONTEXT, HARVEST_PROMPT_TOKENS
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.sampling.comparison import ComparisonUnit, Penalty
from megatron_eqlen.sampling.harvester import Harvester, RolloutHeader, RolloutPart, header_of
from megatron_eqlen.tokens import TokenIds
from megatron_eqlen.types import Metrics, Prompt, Rollout, Segment, TokenTree


class PolicySample(NamedTuple):
    """A whole response of a rollout with its weight as a sample of the policy: responses that share a
    beginning are not sampled independently, and their lengths may decide which of them there are."""

    weight: float
    """The weights of a rollout add up to 1; a mean over its responses with these weights is unbiased."""
    length: int
    """Tokens."""
    reward: float
    """Reward of the verifier; 0 where the response did not end by itself."""


@dataclass(frozen=True)
class LabeledSegment:
    """A segment with its label in a picture."""

    label: str
    """``A1``, ``B1``, ``tail``, ``completion 3``, ``step 2 after step 0``."""
    segment: Segment
    inherited: TokenIds
    """Token ids between the prompt and the segment."""


@dataclass(frozen=True)
class Picture:
    """A rollout as people see it: its segments, their prefixes, and which of them stand side by side."""

    title: str
    pairs: list[tuple[LabeledSegment, LabeledSegment]] = field(default_factory=list)
    """(A, B): A is a leaf that forks off where B, a part of the trunk, begins."""
    segments: list[LabeledSegment] = field(default_factory=list)
    """Segments outside pairs."""


class SamplingKind[AnyRollout: Any](ABC):
    """One value of the recipe's ``sampling``. Objects have no state."""

    name: ClassVar[str]
    """Value of the recipe's key."""
    rollout_type: ClassVar[type[Any]]
    """Type of its rollouts, a dataclass (``types.Rollout``)."""

    @abstractmethod
    def harvesters(
        self, prompts: Sequence[Prompt], recipe: Recipe, eos_token_ids: frozenset[int], seed: int
    ) -> Sequence[Harvester]:
        """Return a harvester for each rollout of ``prompts``, those of a prompt next to each other."""

    @abstractmethod
    def parts(self, rollout: AnyRollout) -> list[RolloutPart]:
        """Return the segments of a rollout as a flat list; rollouts are recorded in this form."""

    @abstractmethod
    def join(self, header: RolloutHeader, parts: Sequence[RolloutPart]) -> AnyRollout:
        """Return the rollout made of ``parts``, which may come in any order: the inverse of ``parts``."""

    @abstractmethod
    def compare(
        self, rollout: AnyRollout, recipe: Recipe, penalty: Penalty
    ) -> tuple[TokenTree, list[ComparisonUnit]]:
        """Return the token tree of a scored rollout, and the comparison units over its nodes whose rewards
        became final in this step: each unit is in one step. ``penalty`` depends on the response's length."""

    @abstractmethod
    def picture(self, rollout: AnyRollout) -> Picture:
        """Return the picture of a rollout for the report and ``eqlen inspect``."""

    @abstractmethod
    def harvest_metrics(self, rollouts: Sequence[AnyRollout]) -> Metrics:
        """Return ``harvest/...`` metrics of at least one rollout: numbers, lengths, outcomes."""

    def objective_metrics(
        self, units: Sequence[ComparisonUnit], rollouts: Sequence[AnyRollout], recipe: Recipe
    ) -> Metrics:
        """Return the ``objective/...`` metrics of a step that only this kind has; none by default."""
        return {}

    def policy_samples(self, rollout: AnyRollout) -> Iterable[PolicySample]:
        """Return the responses of a scored rollout as samples of the policy, for the ``policy/...`` metrics,
        which all kinds share; none by default."""
        return ()

    def is_due(self, rollout: AnyRollout, recipe: Recipe) -> bool:
        """Return True if the step trains the scored rollout and averages over it.

        By default a rollout is trained when it is complete. Every rollout is due in at least one step; one
        that is trained in parts (see ``compare``) in several.
        """
        return not rollout.suspended

    def open_share(self, rollout: AnyRollout, recipe: Recipe) -> float:
        """Return the share of a suspended rollout's first tracks that are open, in [0, 1]; 1 by default."""
        return 1.0

    def skeleton(self, rollout: AnyRollout) -> AnyRollout:
        """Return the rollout with bare tables: lengths, grades and finish reasons, a few hundred bytes a
        segment. Ranks that do not hold the tokens decide with skeletons. The prompt keeps its id alone."""
        header = dataclasses.replace(
            header_of(rollout),
            prompt=Prompt(rollout.prompt_id, [], "", "", ""),
            prompt_columns=None if rollout.prompt_columns is None else rollout.prompt_columns.bare(),
        )
        parts = self.parts(rollout)
        return self.join(header, [dataclasses.replace(part, segment=_bare(part.segment)) for part in parts])


def _bare(segment: Segment) -> Segment:
    return dataclasses.replace(segment, tokens=segment.tokens.bare())


# ---- helpers for kinds -----------------------------------------------------------------------------------


def plural(number: int, noun: str) -> str:
    """Return ``1 pair``, ``2 pairs``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def context_metrics(
    rollouts: Sequence[Rollout], starts: Iterable[Iterable[int]], branches: int = 0
) -> Metrics:
    """Return the mean number of tokens that a generated token sees, which its cost depends on, the tokens of
    the prompts, and the number of forks.

    ``starts``: for each rollout, the tokens between the prompt and each of ``rollout.segments()``.
    """
    prompts = {rollout.prompt_id: len(rollout.prompt.token_ids) for rollout in rollouts}
    tokens = seen = 0
    for rollout, segment_starts in zip(rollouts, starts, strict=True):
        prompt = prompts[rollout.prompt_id]
        for start, segment in zip(segment_starts, rollout.segments(), strict=True):
            length = len(segment)
            tokens += length
            seen += length * (prompt + start) + length * (length - 1) // 2
    return {
        HARVEST_CONTEXT: seen / max(tokens, 1),
        HARVEST_PROMPT_TOKENS: sum(prompts.values()),
        HARVEST_BRANCHES: branches,
    }

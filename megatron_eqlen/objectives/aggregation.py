"""Averages over the tokens of a batch: the weight of each token, by verl's ``loss_agg_mode`` names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean


@dataclass(frozen=True)
class BatchSize:
    """Size of the batch that one optimizer step averages over."""

    tokens: int
    """Tokens of all members of all counted units."""
    tokens_of_prompt: dict[str, float]
    """Tokens of each prompt. With ``rollout.carry_over`` those of complete rollouts stand for all."""
    prompts: float
    max_response_length: int


@dataclass(frozen=True)
class Member:
    """A sequence of a comparison unit."""

    weight: float
    """Weight of the whole sequence."""
    length: int
    prompt_id: str
    alike: int
    """Members of its unit whose advantages have the same sign (+, 0, -), itself included."""
    alike_tokens: int
    """Tokens of these members."""
    lengths: Sequence[int]
    """Lengths of all members of its unit."""


Aggregation = Callable[[Member, BatchSize], float]
"""(member, size of the batch) -> weight of each token of the member."""


def seq_mean_token_mean(member: Member, batch: BatchSize) -> float:
    return member.weight / member.length


def seq_mean_token_sum(member: Member, batch: BatchSize) -> float:
    return member.weight


def seq_mean_token_sum_norm(member: Member, batch: BatchSize) -> float:
    return member.weight / batch.max_response_length


def token_mean(member: Member, batch: BatchSize) -> float:
    return 1 / batch.tokens


def prompt_mean_token_mean(member: Member, batch: BatchSize) -> float:
    """Average over the tokens of each prompt, then over prompts: DAPO's equation as printed."""
    return 1 / (batch.prompts * batch.tokens_of_prompt[member.prompt_id])


def balanced_token_mean(member: Member, batch: BatchSize) -> float:
    """Token means of positive and of negative members, weighted by their numbers (arXiv 2605.04077)."""
    return member.weight * member.alike / member.alike_tokens


def delta_l(member: Member, batch: BatchSize) -> float:
    """Delta L normalization (arXiv 2509.07558, alpha = 1): members of a unit are weighed by 1 / L. Their mean
    has the least variance if a gradient's grows with L, and no bias if its mean does not depend on L."""
    share = 1 / (member.length * fmean(1 / length for length in member.lengths))
    return member.weight * share / batch.max_response_length


AGGREGATIONS: dict[str, Aggregation] = {
    "seq-mean-token-mean": seq_mean_token_mean,
    "seq-mean-token-sum": seq_mean_token_sum,
    "seq-mean-token-sum-norm": seq_mean_token_sum_norm,
    "token-mean": token_mean,
    "prompt-mean-token-mean": prompt_mean_token_mean,
    "balanced-token-mean": balanced_token_mean,
    "delta-l": delta_l,
}

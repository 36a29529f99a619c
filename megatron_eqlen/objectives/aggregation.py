"""Averages over the tokens of a batch: the weight of each token, by verl's ``loss_agg_mode`` names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class BatchSize:
    """Size of the batch that one optimizer step averages over."""

    tokens: int
    """Tokens of all members of all counted units."""
    tokens_of_prompt: dict[str, int]
    prompts: int
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


Aggregation = Callable[[Member, BatchSize], float]
"""(member, size of the batch) -> weight of each token of the member."""

AGGREGATIONS: dict[str, Aggregation] = {
    "seq-mean-token-mean": lambda member, batch: member.weight / member.length,
    "seq-mean-token-sum": lambda member, batch: member.weight,
    "seq-mean-token-sum-norm": lambda member, batch: member.weight / batch.max_response_length,
    "token-mean": lambda member, batch: 1 / batch.tokens,
    "prompt-mean-token-mean": lambda member, batch: (
        1 / (batch.prompts * batch.tokens_of_prompt[member.prompt_id])
    ),
    "balanced-token-mean": lambda member, batch: member.weight * member.alike / member.alike_tokens,
}
"""``prompt-mean-token-mean`` is DAPO's equation as printed. ``balanced-token-mean`` is Balanced Aggregation
(arXiv 2605.04077): token means of the positive and of the negative members, weighted by how many they are."""

"""How the tokens of a batch are averaged: the weight of each token, by verl's ``loss_agg_mode`` names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class BatchSize:
    """What one optimizer step averages over."""

    tokens: int
    """Of all members of all counted units."""
    tokens_of_prompt: dict[str, int]
    prompts: int
    max_response_length: int


@dataclass(frozen=True)
class Member:
    """A sequence of a comparison unit."""

    weight: float
    """Of the whole sequence."""
    length: int
    prompt_id: str
    alike: int
    """Members of its unit whose advantages have the same sign (+, 0, -), itself included."""
    alike_tokens: int
    """Tokens of those."""


Aggregation = Callable[[Member, BatchSize], float]
"""The weight of each of the member's tokens."""

AGGREGATIONS: dict[str, Aggregation] = {
    "seq-mean-token-mean": lambda one, batch: one.weight / one.length,
    "seq-mean-token-sum": lambda one, batch: one.weight,
    "seq-mean-token-sum-norm": lambda one, batch: one.weight / batch.max_response_length,
    "token-mean": lambda one, batch: 1 / batch.tokens,
    "prompt-mean-token-mean": lambda one, batch: 1 / (batch.prompts * batch.tokens_of_prompt[one.prompt_id]),
    "balanced-token-mean": lambda one, batch: one.weight * one.alike / one.alike_tokens,
}
"""``prompt-mean-token-mean`` is DAPO's equation as printed. ``balanced-token-mean`` is Balanced Aggregation
(arXiv 2605.04077): token means of the positive and of the negative members, weighted by how many they are."""

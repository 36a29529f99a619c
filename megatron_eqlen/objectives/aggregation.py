"""Averages over the tokens of a batch: the weight of each token, by verl's ``loss_agg_mode`` names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


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


AGGREGATIONS: dict[str, Aggregation] = {
    "seq-mean-token-mean": seq_mean_token_mean,
    "seq-mean-token-sum": seq_mean_token_sum,
    "seq-mean-token-sum-norm": seq_mean_token_sum_norm,
    "token-mean": token_mean,
    "prompt-mean-token-mean": prompt_mean_token_mean,
}

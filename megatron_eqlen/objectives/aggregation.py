"""How the tokens of a batch are averaged, by verl's ``loss_agg_mode`` names: the weight of each token."""

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


Aggregation = Callable[[float, int, str, BatchSize], float]
"""(weight of the whole sequence, its length, its prompt's id, the batch) -> weight of each of its tokens."""

AGGREGATIONS: dict[str, Aggregation] = {
    "seq-mean-token-mean": lambda sequence, length, prompt, batch: sequence / length,
    "seq-mean-token-sum": lambda sequence, length, prompt, batch: sequence,
    "seq-mean-token-sum-norm": lambda sequence, length, prompt, batch: sequence / batch.max_response_length,
    "token-mean": lambda sequence, length, prompt, batch: 1 / batch.tokens,
    "prompt-mean-token-mean": lambda sequence, length, prompt, batch: (
        1 / (batch.prompts * batch.tokens_of_prompt[prompt])
    ),
}
"""``prompt-mean-token-mean`` is DAPO's equation as printed."""

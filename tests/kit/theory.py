"""The paper's theory as executable facts: the effect of one step on the prefix of a correct solution.

Everything here runs the objectives that training runs (``build_minibatches``) on policies small enough to be
exact: a table of logits, a policy of one parameter, a transformer with random weights.
docs/objectives_appendix.md explains the numbers.

The paper's construction (its appendix), with 9 as the end of a response and segments of two tokens:

    A_1 = 3 9 (correct)      B_1 A_2 = 1 2 4 9 (wrong)      B_1 B_2 A_3 = 1 2 5 6 7 9 (correct)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

import tests.kit.rollouts as kit
from megatron_eqlen.objectives.build import build_minibatches
from megatron_eqlen.objectives.registry import lookup
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.sampling.equal_length.suffix import pair_rewards
from megatron_eqlen.tokens import Tokens
from megatron_eqlen.types import Grade, Part, Prompt, Rollout, TokenTree

QUESTION = Prompt("q", [0], "?", "math", "1")
VOCABULARY = 12
A_1, B_1, A_2, B_2, A_3 = [3, 9], [1, 2], [4, 9], [5, 6], [7, 9]


class TabularPolicy(nn.Module):
    """A softmax over free logits for each context: no parameter is shared between two positions."""

    def __init__(self, responses: Iterable[Sequence[int]], seed: int = 0) -> None:
        super().__init__()
        contexts = {tuple(response[:t]) for response in responses for t in range(len(response))}
        self.row = {context: i for i, context in enumerate(sorted(contexts))}
        random = torch.Generator().manual_seed(seed)
        self.logits = nn.Parameter(
            torch.randn(len(self.row), VOCABULARY, generator=random, dtype=torch.float64)
        )

    def forward(self, response: Sequence[int]) -> torch.Tensor:
        """Return [L] log-probs of a response's tokens."""
        rows = [self.row[tuple(response[:t])] for t in range(len(response))]
        return _picked(self.logits[rows], response)


class OneParameterPolicy(nn.Module):
    """Logits are theta x fixed slopes: every position shares the one parameter."""

    def __init__(self, slopes: dict[tuple[int, ...], dict[int, float]]) -> None:
        super().__init__()
        self.slopes = slopes
        self.theta = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, response: Sequence[int]) -> torch.Tensor:
        tables = [self.slopes[tuple(response[:t])] for t in range(len(response))]
        columns = [
            (self.theta * torch.tensor(list(table.values()), dtype=torch.float64)).log_softmax(-1)
            for table in tables
        ]
        places = [list(table).index(token) for table, token in zip(tables, response, strict=True)]
        return torch.stack([column[place] for column, place in zip(columns, places, strict=True)])


class TransformerPolicy(nn.Module):
    """A two-layer Qwen3 with random weights, in float64: the smallest instance of the theory's subject."""

    def __init__(self, seed: int = 0) -> None:
        from transformers import Qwen3Config, Qwen3ForCausalLM  # seconds to import, needed here alone

        super().__init__()
        torch.manual_seed(seed)
        config = Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            initializer_range=0.3,
            tie_word_embeddings=False,
        )
        self.model = Qwen3ForCausalLM(config).double()

    def forward(self, response: Sequence[int]) -> torch.Tensor:
        inputs = torch.tensor([QUESTION.token_ids + list(response)])
        return _picked(self.model(inputs).logits[0, :-1], response)


def _picked(logits: torch.Tensor, response: Sequence[int]) -> torch.Tensor:
    return logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0]


# ---- rollouts of the construction ------------------------------------------------------------------------


def graded(token_ids: Sequence[int], reward: float | None = None) -> Part:
    """Return a part that ended with this reward, or that had not ended (None)."""
    tokens, logprobs = np.array(token_ids, np.int32), np.zeros(len(token_ids), np.float32)
    if reward is None:
        return Part(Tokens.of(tokens, logprobs))
    return Part(Tokens.of(tokens, logprobs), "stop", Grade(reward, ""))


def grpo_group(*responses: tuple[Sequence[int], float]) -> Rollout:
    return kit.group(QUESTION, 0, [graded(tokens, reward) for tokens, reward in responses])


def unlucky_group() -> Rollout:
    """Return the sample of Proposition 1: A_1 is right, B_1 A_2 is wrong."""
    return grpo_group((A_1, 1.0), (B_1 + A_2, 0.0))


def eqlen_stream(third: float = 1.0) -> Rollout:
    """Return the same responses as a stream. ``third``: the reward of B_1 B_2 A_3, which ends the trunk."""
    pairs = [(graded(A_1, 1.0), graded(B_1)), (graded(A_2, 0.0), graded(B_2))]
    return kit.stream(QUESTION, 0, 0, pairs, "max_pairs", graded(A_3, third))


def recipe(sampling: str, objective: str = "grpo", **equal_length: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "theory",
            "steps": 1,
            "sampling": sampling,
            "objective": objective,
            "group_size": 2,
            "model": {"path": "-"},
            "data": {"sources": [{"name": "-", "path": "-"}], "max_prompt_length": 1},
            "rollout": {"max_response_length": 8},
            "packing": {"max_tokens_per_row": 16, "layout": "expanded"},
            "equal_length": equal_length,
            "loss": {"kl_coef": 0.0},
        }
    )


def trees_of(rollout: Rollout, prefix_in_gradient: bool = False) -> list[TokenTree]:
    """Return the trees that GRPO (for a group) or EqLen-GRPO (for a stream) trains."""
    return build_minibatches([rollout], recipe(rollout.kind, prefix_in_gradient=prefix_in_gradient))[0][0]


# ---- what a step does ------------------------------------------------------------------------------------


def surrogate(policy: nn.Module, trees: Iterable[TokenTree]) -> torch.Tensor:
    """Return -sum of weight x advantage x log pi: the on-policy loss, whose gradient is the objective's."""
    total = torch.zeros((), dtype=torch.float64)
    for tree in trees:
        paths: list[list[int]] = [[]]
        for node in tree.nodes[1:]:
            paths.append(paths[node.parent] + node.token_ids.tolist())
            if node.weight:
                logprobs = policy(paths[-1])[-len(node.token_ids) :]
                total = total - node.weight * node.advantage * logprobs.sum()
    return total


def gradient(policy: nn.Module, value: torch.Tensor) -> torch.Tensor:
    """Return d value / d parameters, flat."""
    parameters = list(policy.parameters())
    found = torch.autograd.grad(value, parameters, allow_unused=True)
    flat = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]
    return torch.cat([g.flatten() for g in flat])


def slope(policy: nn.Module, rollout: Rollout, prefix: Sequence[int]) -> float:
    """Return d log pi(prefix) / d step size of one gradient step on the rollout; negative: the prefix becomes
    less likely."""
    trees = trees_of(rollout)
    if not any(node.weight for tree in trees for node in tree.nodes):
        return 0.0
    step = -gradient(policy, surrogate(policy, trees))
    return float(gradient(policy, policy(prefix).sum()) @ step)


def direct_coefficient(rollout: Rollout, prefix: Sequence[int], prefix_in_gradient: bool = False) -> float:
    """Return the factor of the gradient of log pi of each of the prefix's tokens in an ascent step on the
    rollout: the sum of weight x advantage over supervised copies of the prefix."""
    total = 0.0
    for tree in trees_of(rollout, prefix_in_gradient):
        paths: list[list[int]] = [[]]
        for node in tree.nodes[1:]:
            start = len(paths[node.parent])
            paths.append(paths[node.parent] + node.token_ids.tolist())
            if start < len(prefix) and paths[-1][: len(prefix)] == list(prefix):
                total += node.weight * node.advantage
    return total


# ---- Proposition 1 ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FisherStep:
    """The proof's inequality <grad log pi(b), g_2> >= |grad log pi(b)|^2 / |o_2|, b first in B_1."""

    left: float
    right: float

    @property
    def holds(self) -> bool:
        return self.left >= self.right > 0


def fisher_step(policy: nn.Module) -> FisherStep:
    wrong = B_1 + A_2
    first = gradient(policy, policy(wrong)[0])
    mean = gradient(policy, policy(wrong).mean())
    return FisherStep(float(first @ mean), float(first @ first) / len(wrong))


def unfair_policy(strength: float = 8.0) -> OneParameterPolicy:
    """Return a policy in which raising B_1 lowers A_2 ``strength`` times as much: one gradient step away from
    B_1 A_2 raises B_1."""
    return OneParameterPolicy(
        {
            (): {1: 1.0, 3: 0.0},
            (1,): {2: 1.0, 8: 0.0},
            (3,): {9: 0.0},
            (1, 2): {4: -strength, 5: 0.0},
            (1, 2, 4): {9: 0.0},
        }
    )


# ---- Proposition 2 ---------------------------------------------------------------------------------------

PAPERS_RESPONSES = [(A_1, 1.0), (B_1 + A_2, 0.0), (B_1 + B_2 + A_3, 1.0)]
UNINFORMATIVE = [([*B_1, 4, 9], 1.0), ([*B_1, 5, 9], 0.0), ([3, 6, 4, 9], 1.0), ([3, 6, 5, 9], 0.0)]
"""Responses of equal length that are right with probability 1/2, with the prefix B_1 and without it."""


@dataclass(frozen=True)
class Moments:
    mean: float
    variance: float


def prefix_term(responses: Sequence[tuple[Sequence[int], float]], probabilities: Sequence[float]) -> Moments:
    """Return exact moments of GRPO's (G = 2) coefficient on B_1 when both responses are drawn
    independently."""
    draws = itertools.product(zip(responses, probabilities, strict=True), repeat=2)
    outcomes = [
        (direct_coefficient(grpo_group(first, second), B_1), p * q) for (first, p), (second, q) in draws
    ]
    return moments(outcomes)


def moments(outcomes: Sequence[tuple[float, float]]) -> Moments:
    """Return the moments of (value, probability) pairs."""
    mean = sum(value * p for value, p in outcomes)
    return Moments(mean, sum((value - mean) ** 2 * p for value, p in outcomes))


def survivor_advantage(
    extensions: int, success: float, objective: str = "grpo", suffix_reward: Literal["max", "mean"] = "max"
) -> Moments:
    """Return exact moments of the advantage of B_1 in its own pair when length and prefix say nothing.

    A_1 and each of the ``extensions`` ended responses that extend B_1 are right with probability ``success``,
    independently; no side deserves anything.
    """
    outcomes = []
    for first, *rest in itertools.product([0.0, 1.0], repeat=extensions + 1):
        pairs = [(graded([9], reward), graded([1])) for reward in (first, *rest[:-1])]
        stream = kit.stream(QUESTION, 0, 0, pairs, "max_pairs", graded([9], rest[-1]))
        rewards = pair_rewards(stream, suffix_reward)[0]
        assert rewards is not None
        right = first + sum(rest)
        probability = success**right * (1 - success) ** (extensions + 1 - right)
        outcomes.append((lookup(objective).advantage(rewards, [1, 1])[1], probability))
    return moments(outcomes)

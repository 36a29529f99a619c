"""Expected gradients of EqLen, exactly: every stream of a small process, with its probability.

A ``Process`` is a policy with free logits for each context over V tokens, the first of which end a response,
a response limit, and a reward of each response that ended. Its streams are few enough to be enumerated
through the harvester and ``build_trees`` of training. Expectations are sums in float64. The gradient of any
other policy is linear in the one of free logits, so that equality here is equality for every policy.
``docs/length_bias.md`` has the derivation.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from megatron_eqlen.objectives.build import build_trees
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.sampling import KINDS
from megatron_eqlen.sampling.harvester import Harvester, Marker
from megatron_eqlen.types import Delta, Grade, Prompt, Rollout, TokenTree

Path = tuple[int, ...]
"""Token ids of a response, or of the beginning of one."""
Reward = Callable[[Path], float]

QUESTION = Prompt("q", [9], "?", "math", "1")


@dataclass(frozen=True)
class Process:
    """A stochastic process that generates responses, and their rewards."""

    logits: np.ndarray
    """[contexts, V]: logits of the next token."""
    limit: int
    reward: Reward
    ends: int = 1
    """Tokens 0 to ``ends - 1`` end a response."""
    truncated: float = 0.0
    """Reward of a response that the limit cut."""
    marker: int = -1
    """Token that ``tree_sampling.fork: marker`` forks after."""

    @classmethod
    def random(cls, vocabulary: int, limit: int, reward: Reward, ends: int = 1, seed: int = 0) -> Process:
        contexts = sum((vocabulary - ends) ** length for length in range(limit))
        logits = np.random.default_rng(seed).normal(size=(contexts, vocabulary))
        return cls(logits, limit, reward, ends)

    @cached_property
    def contexts(self) -> dict[Path, int]:
        """Number of each context, which is a path without an end."""
        tokens = range(self.ends, self.logits.shape[1])
        paths = (path for length in range(self.limit) for path in itertools.product(tokens, repeat=length))
        return {path: number for number, path in enumerate(paths)}

    @cached_property
    def probabilities(self) -> np.ndarray:
        """[contexts, V]"""
        exponentials = np.exp(self.logits)
        return exponentials / exponentials.sum(1, keepdims=True)

    @classmethod
    def coin_flips(cls, go_on: float, limit: int, last: float | None = None) -> Process:
        """Return a process whose tokens 0 and 1 end a response, 0 wrong and 1 right, equally likely: length
        says nothing. ``go_on``: logit of token 2, which does not end it; ``last``: that logit at the last
        position."""
        logits = np.zeros((limit, 3))
        logits[:, 2] = go_on
        logits[-1, 2] = go_on if last is None else last
        return cls(logits, limit, lambda path: float(path[-1] == 1), ends=2)

    def continuations(self, trunk: Path) -> list[tuple[Path, float]]:
        """Return every response that continues ``trunk``, without the trunk, with its probability."""
        if len(trunk) == self.limit or self.ended(trunk):
            return [((), 1.0)]
        row = self.probabilities[self.contexts[trunk]]
        return [
            ((token, *rest), float(row[token]) * probability)
            for token in range(len(row))
            for rest, probability in self.continuations((*trunk, token))
        ]

    def ended(self, path: Path) -> bool:
        return bool(path) and path[-1] < self.ends

    def value(self, path: Path) -> float:
        """Return the reward of a whole response."""
        return self.reward(path) if self.ended(path) else self.truncated

    def score(self, trunk: Path, tokens: Sequence[int]) -> np.ndarray:
        """Return d log pi(tokens | trunk) / d logits."""
        total = np.zeros_like(self.logits)
        for token in tokens:
            row = self.contexts[trunk]
            total[row] -= self.probabilities[row]
            total[row, token] += 1
            trunk = (*trunk, token)
        return total

    def gradient(self) -> np.ndarray:
        """Return the policy gradient: d E[reward] / d logits."""
        terms = [p * self.value(path) * self.score((), path) for path, p in self.continuations(())]
        return np.sum(terms, axis=0)

    def streams(self, recipe: Recipe) -> Iterator[tuple[Rollout, float]]:
        """Yield every stream that the recipe's harvester can make of this process, with its probability."""
        choices: list[int] = []
        while True:
            stream, probability, sizes = self._stream(recipe, choices)
            yield stream, probability
            choices += [0] * (len(sizes) - len(choices))
            while choices and choices[-1] + 1 == sizes[len(choices) - 1]:
                choices.pop()
            if not choices:
                return
            choices[-1] += 1

    def harvester(self, recipe: Recipe) -> Harvester:
        """Return the harvester of the first rollout."""
        ends, rollout = frozenset(range(self.ends)), recipe.rollout
        rollout = rollout.model_copy(update={"max_response_length": self.limit})
        recipe = recipe.model_copy(update={"rollout": rollout})
        marker = Marker(lambda ids: self.marker in ids, 1)
        return KINDS[recipe.sampling].harvesters([QUESTION], recipe, ends, 0, marker)[0]

    def _stream(self, recipe: Recipe, choices: Sequence[int]) -> tuple[Rollout, float, list[int]]:
        """Return the stream whose track n is number ``choices[n]`` (default: 0) of the continuations of its
        trunk, its probability, and the numbers of continuations."""
        harvester = self.harvester(recipe)
        probability, sizes = 1.0, []
        launched = harvester.start()
        while not harvester.complete:
            for track in launched:
                possible = self.continuations(tuple(track.context[len(QUESTION.token_ids) :]))
                choice = choices[len(sizes)] if len(sizes) < len(choices) else 0
                sizes.append(len(possible))
                tokens, share = possible[choice]
                probability *= share
                track.extend(Delta(track.name, list(tokens), {"logprobs": [0.0] * len(tokens)}), 0)
            launched = harvester.advance()
        stream = harvester.rollout(0)
        for part, response in stream.ended():
            part.grade = Grade(self.reward(tuple(response.tolist())), "")
        return stream, probability, sizes

    def estimate(self, trees: Sequence[TokenTree]) -> np.ndarray:
        """Return what an on-policy step on ``trees`` ascends: sum of weight x advantage x score."""
        total = np.zeros_like(self.logits)
        for tree in trees:
            paths: list[Path] = [()]
            for node in tree.nodes[1:]:
                trunk, tokens = paths[node.parent], node.token_ids.tolist()
                paths.append((*trunk, *tokens))
                if not node.weight or not np.any(node.advantage):
                    continue
                if isinstance(node.advantage, float):
                    total += node.weight * node.advantage * self.score(trunk, tokens)
                    continue
                for t, advantage in enumerate(node.advantage):
                    total += node.weight * advantage * self.score((*trunk, *tokens[:t]), [tokens[t]])
        return total

    def expected_estimate(self, recipe: Recipe) -> np.ndarray:
        """Return the expectation of ``estimate`` over all streams of a prompt."""
        total = np.zeros_like(self.logits)
        for drawn in itertools.product(list(self.streams(recipe)), repeat=recipe.rollouts_per_prompt):
            rollouts = [replace(stream, index=i) for i, (stream, _) in enumerate(drawn)]
            probability = math.prod(share for _, share in drawn)
            total += probability * self.estimate(build_trees(rollouts, recipe)[0])
        return total

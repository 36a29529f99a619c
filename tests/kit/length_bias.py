"""Expected gradients of EqLen, exactly: every stream of a small process, with its probability.

A ``Process`` is a policy with free logits for each context over V tokens, the first of which end a response,
a response limit, and a reward of each response that ended. Its streams are few enough to be enumerated
through the harvester and ``build_minibatches`` of training. Expectations are sums in float64. The gradient of
any other policy is linear in the one of free logits, so that equality here is equality for every policy.
``docs/length_bias.md`` has the derivation.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from megatron_eqlen.engines.protocol import Request
from megatron_eqlen.harvest.harvest import harvest
from megatron_eqlen.harvest.harvest_plan import HarvestPlan
from megatron_eqlen.job import Job
from megatron_eqlen.objectives.build import build_minibatches
from megatron_eqlen.objectives.dynamic_sampling import trained
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.record.partial import HarvestProgress, PartialRollout, RolloutOrigin
from megatron_eqlen.sampling import KINDS
from megatron_eqlen.sampling.harvester import Harvester, HarvestObserver, Marker, Setting
from megatron_eqlen.sampling.track import Track
from megatron_eqlen.types import Delta, Grade, Metrics, Prompt, Rollout, TokenTree

Path = tuple[int, ...]
"""Token ids of a response, or of the beginning of one."""
Reward = Callable[[Path], float]
Choose = Callable[[Hashable, Sequence[float]], int]
"""(name of a choice, shares of its possibilities) -> number of the one that is chosen; in any order."""

QUESTION = Prompt("q", [9], "?", "math", "1")


def every_outcome[T](run: Callable[[Choose], T]) -> Iterator[tuple[T, float]]:
    """Yield what ``run`` returns, and its probability, for everything that it can choose."""
    chosen: dict[Hashable, tuple[int, Sequence[float]]] = {}
    while True:
        now = dict(chosen)  # of this run: a call that it gave up may still choose
        result = run(lambda name, shares, now=now: now.setdefault(name, (0, shares))[0])
        chosen = dict(now)
        yield result, math.prod(shares[number] for number, shares in chosen.values())
        while chosen:
            name, (number, shares) = chosen.popitem()
            if number + 1 < len(shares):
                chosen[name] = number + 1, shares
                break
        else:
            return


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
        if trunk not in self._continuations:
            self._continuations[trunk] = self._continue(trunk)
        return self._continuations[trunk]

    @cached_property
    def _continuations(self) -> dict[Path, list[tuple[Path, float]]]:
        return {}

    def _continue(self, trunk: Path) -> list[tuple[Path, float]]:
        if len(trunk) == self.limit or self.ended(trunk):
            return [((), 1.0)]
        row = self.probabilities[self.contexts[trunk]]
        return [
            ((token, *rest), float(row[token]) * probability)
            for token in np.flatnonzero(row).tolist()
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
        return every_outcome(lambda choose: self._stream(recipe, choose))

    def harvester(self, recipe: Recipe) -> Harvester:
        """Return the harvester of the first rollout."""
        ends, rollout = frozenset(range(self.ends)), recipe.rollout
        rollout = rollout.model_copy(update={"max_response_length": self.limit})
        recipe = recipe.model_copy(update={"rollout": rollout})
        marker = Marker(lambda ids: self.marker in ids, 1)
        return KINDS[recipe.sampling].harvesters([QUESTION], Setting(recipe, ends, 0, marker))[0]

    def _stream(self, recipe: Recipe, choose: Choose) -> Rollout:
        """Return the stream whose tracks are the chosen continuations of its trunk."""
        harvester = self.harvester(recipe)
        launched = harvester.start()
        while not harvester.complete:
            for track in launched:
                trunk = tuple(track.context[len(QUESTION.token_ids) :])
                possible = self.continuations(trunk)
                number = choose((track.name, trunk), [share for _, share in possible])
                tokens, _ = possible[number]
                track.extend(Delta(track.name, list(tokens), {"logprobs": [0.0] * len(tokens)}), 0)
            launched = harvester.advance()
        stream = harvester.rollout(0)
        self.grade(stream)
        return stream

    def grade(self, rollout: Rollout) -> None:
        for part, response in rollout.ended():
            part.grade = Grade(self.reward(tuple(response.tolist())), "")

    def steps(self, recipe: Recipe, prompts: int) -> Iterator[tuple[list[list[Rollout]], float]]:
        """Yield every sequence of steps that train the first step's prompts, with its probability. They are
        harvested as in training, with the recipe's budget and ``carry_over``, but for the draws."""
        return every_outcome(lambda choose: self._steps(recipe, prompts, choose))

    def _steps(self, recipe: Recipe, prompts: int, choose: Choose) -> list[list[Rollout]]:
        engine = Drawing(choose, lambda path: self.probabilities[self.contexts[path]])
        carried = Suspended([replace(QUESTION, prompt_id=f"q{n}") for n in range(prompts)])
        steps: list[list[Rollout]] = []
        while carried.prompts:
            asked, progress = carried.prompts, HarvestProgress(partial=carried.partial)
            plan = HarvestPlan(asked, recipe, range(self.ends), seed=0, progress=progress)
            carried = Suspended([], len(steps) + 1, recipe.rollout.max_staleness)
            steps.append(harvest(engine, plan, [carried])[0])
            for rollout in steps[-1]:
                self.grade(rollout)
        return steps

    def expected_steps(self, recipe: Recipe, prompts: int = 1) -> np.ndarray:
        """Return the expectation of the sum of ``estimate`` over all updates of ``steps``."""
        job, total = Job(recipe), np.zeros_like(self.logits)
        for steps, probability in self.steps(recipe, prompts):
            for rollouts in steps:
                for trees in build_minibatches(trained(rollouts, job), job)[0]:
                    total += probability * self.estimate(trees)
        return total

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
        """Return the expectation of ``estimate`` over all streams of a prompt that the recipe trains."""
        job, total = Job(recipe), np.zeros_like(self.logits)
        for drawn in itertools.product(list(self.streams(recipe)), repeat=recipe.rollouts_per_prompt):
            rollouts = [replace(stream, index=i) for i, (stream, _) in enumerate(drawn)]
            probability = math.prod(share for _, share in drawn)
            for trees in build_minibatches(trained(rollouts, job), job)[0]:
                total += probability * self.estimate(trees)
        return total


class Drawing:
    """An engine that gives each request one token a step, chosen among all.

    ``row``: a path's probabilities of the next token.
    """

    policy_version, max_model_len, max_num_seqs, vocab_size = 0, 99, 99, 99

    def __init__(self, choose: Choose, row: Callable[[Path], Sequence[float]]) -> None:
        self.choose, self.row = choose, row
        self.paths: dict[str, Path] = {}

    def submit(self, request: Request) -> None:
        assert request.request_id not in self.paths
        assert request.max_tokens > 0
        self.paths[request.request_id] = tuple(request.token_ids[len(QUESTION.token_ids) :])

    def step(self) -> list[Delta]:
        return [self.next(name) for name in list(self.paths)]

    def next(self, name: str) -> Delta:
        token = self.choose((name, self.paths[name]), self.row(self.paths[name]))
        self.paths[name] += (token,)
        return Delta(name, [token], {"logprobs": [0.0]})

    def abort(self, request_ids: Iterable[str]) -> None:
        for name in request_ids:
            self.paths.pop(name, None)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.paths)

    def metrics(self) -> Metrics:
        return {}


@dataclass
class Suspended(HarvestObserver):
    """Rollouts that a step leaves to step ``number``."""

    prompts: list[Prompt]
    number: int = 0
    max_staleness: int = 0
    partial: list[PartialRollout] = field(default_factory=list)

    def rollout_suspended(self, rollout: Rollout, generated_tokens: int, tracks: Sequence[Track]) -> None:
        if rollout.prompt not in self.prompts:
            self.prompts.append(rollout.prompt)
        tokens = {track.number: track.tokens[:] for track in tracks}
        self.partial.append(
            PartialRollout(
                rollout.prompt, rollout.index, tokens, origin=RolloutOrigin(0), age=self.number,
                last_step=self.number >= self.max_staleness, final={p.number: p for p in rollout.parts},
                earlier={number: known.generated for number, known in tokens.items()},
            )
        )  # fmt: skip

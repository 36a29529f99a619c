"""Scoring: every response that ended gets its verifier's grade, once.

a response ends ──begin──► background: decode, grade ──┐
the harvest ends ─► score: what is not begun yet ──────┴──► Part.grade
"""

from __future__ import annotations

import inspect
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import NamedTuple, Protocol

from megatron_eqlen.graders.code.grader import CodeGrader
from megatron_eqlen.graders.grader import Background, Grader, Key, PoolGrader, naming, response_key
from megatron_eqlen.graders.math.grader import MathGrader
from megatron_eqlen.graders.sandbox.client import SandboxError
from megatron_eqlen.processes.cores import cores_per_rank
from megatron_eqlen.processes.failures import ExpectedError
from megatron_eqlen.processes.watchdog import beat
from megatron_eqlen.recipe import RewardRecipe
from megatron_eqlen.recipe.plugins import is_import_path, load_object
from megatron_eqlen.rewards.functions import NUMBER_KEYS, RewardFunction, is_reward_function, own_code
from megatron_eqlen.sampling.harvester import Harvester, HarvestObserver, every_rollout
from megatron_eqlen.types import UNSCORED, Grade, Metrics, Part, Prompt, Rollout, TokenIds

log = logging.getLogger(__name__)


class UnscoredError(ExpectedError):
    """More responses have no reward than the recipe allows."""


FAILURES = (ValueError, SandboxError, UnscoredError)
"""Errors of a grader about a response (of one's own code: ``functions.own_code``)."""


class TokenDecoder(Protocol):
    """The part of a tokenizer that scoring needs."""

    def decode(self, token_ids: TokenIds) -> str: ...


class _Ended(NamedTuple):
    """A part that ends a response, and the response."""

    key: Key
    prompt: Prompt
    response: TokenIds
    part: Part


class Scorer:
    """Sends each response to its prompt's grader: when it ends (``begin``), or with all others (``score``).
    Only a ``PoolGrader`` works beside generation. Other graders run in this process and would slow down the
    thread that drives the engine: they wait for ``score``, whose thread calls them."""

    def __init__(
        self, reward: RewardRecipe, tokenizer: TokenDecoder, graders_on_node: int = 1, seed: int = 0
    ) -> None:
        self.workers = reward.workers or cores_per_rank(graders_on_node)
        """Processes of each grader of this rank; ``graders_on_node`` ranks share the node's cores."""
        self._reward = reward.model_copy(update={"workers": self.workers})
        self._tokenizer, self._seed = tokenizer, seed
        self._graders: dict[str, Grader] = {}
        self._functions: dict[str, RewardFunction | None] = {}
        """By grader: the reward function that it names; None for a grader."""
        self._background = Background(tokenizer.decode)

    def begin(self, prompt: Prompt, response: TokenIds) -> None:
        """Start grading a response that has just ended, if its grader works beside generation."""
        grader = None if self._function(prompt.grader) else self._grader(prompt.grader)
        if isinstance(grader, PoolGrader):
            self._background.begin(response_key(prompt, response), grader, prompt, response)

    def begin_ended(self, rollouts: Iterable[Rollout]) -> None:
        """Call ``begin`` for every response of ``rollouts`` without a grade."""
        for entry in _ended(rollouts):
            if entry.part.grade is None:
                self.begin(entry.prompt, entry.response)

    def score(self, rollouts: Sequence[Rollout], seconds: float = math.inf) -> Metrics:
        """Fill ``grade`` of each part that ends a response without one. Return the calls and their time.

        Waits at most ``seconds`` for graders in the background; responses without a grade then, and those
        whose grader failed, are unscored; with ``reward.on_error: end``, raises UnscoredError or the grader's
        error with a note that names the prompt. Grading of responses not among ``rollouts`` is cancelled.
        """
        started, ended = time.monotonic(), list(_ended(rollouts))
        deadline = started + seconds
        # equal responses to a prompt share a key and are graded once
        ungraded = {entry.key: entry for entry in ended if entry.part.grade is None}
        try:
            # grading that cost no time of its own: ready before anybody waits
            hidden = sum(grade.seconds for grade in self._background.ready(ungraded))
            # pools work on what they have not begun yet, while this thread calls the other graders
            for entry in ungraded.values():
                self.begin(entry.prompt, entry.response)
            now = {key: entry for key, entry in ungraded.items() if key not in self._background}
            responses = [entry.response for entry in now.values()]
            texts, prompts = map(self._tokenizer.decode, responses), [entry.prompt for entry in now.values()]
            grades = dict(zip(now, self.grade_texts([*texts], prompts, responses, deadline), strict=True))
            # last come the pools' grades, which may be late
            waiting = time.monotonic()
            due = {key: entry.prompt for key, entry in ungraded.items() if key not in grades}
            grades |= self._collect(due, deadline)
            waited = time.monotonic() - waiting
        finally:
            self._background.give_up()
        for entry in ended:
            # an environment's named rewards have not been weighed yet
            entry.part.grade = weighed(entry.part.grade or grades[entry.key], self._reward.weights)
        if causes := unscored_causes(rollouts):
            log.warning("%d of %d responses have no reward: %s", len(causes), len(ended), causes[0])
        return {
            "reward/calls": len(ungraded),
            "reward/seconds": time.monotonic() - started,
            "reward/wait_seconds": waited,
            "reward/hidden_seconds": hidden,
        }

    def grade_texts(
        self,
        texts: Sequence[str],
        prompts: Sequence[Prompt],
        token_ids: Sequence[Sequence[int] | TokenIds] | None = None,
        deadline: float = math.inf,
    ) -> list[Grade]:
        """Grade response texts in this thread. ``token_ids``: for reward functions that ask for them, of
        which none is called after ``deadline``, in seconds of ``time.monotonic``."""
        grades: dict[int, Grade] = {}
        by_grader: dict[str, list[int]] = defaultdict(list)
        ids = token_ids or [()] * len(texts)
        for number, prompt in enumerate(prompts):
            by_grader[prompt.grader].append(number)
        for name, numbers in by_grader.items():
            if function := self._function(name):
                calls = {n: partial(function.grade, prompts[n], texts[n], ids[n]) for n in numbers}
                grades |= {n: self._attempt(calls[n], prompts[n], deadline) for n in numbers}
            else:
                batch = partial(_grade_batch, self._grader(name), name, texts, prompts)
                try:
                    grades |= zip(numbers, batch(numbers), strict=True)
                except FAILURES:  # each alone says which
                    for n in numbers:
                        grades[n] = self._attempt(lambda n=n, batch=batch: batch([n])[0], prompts[n])
        return [weighed(grades[number], self._reward.weights) for number in range(len(texts))]

    def close(self) -> None:
        """Cancel pending grading; end the graders' processes."""
        self._background.close()
        for grader in self._graders.values():
            grader.close()
        self._graders.clear()

    def _collect(self, begun: Mapping[Key, Prompt], deadline: float) -> dict[Key, Grade]:
        """Wait until ``deadline`` for grades that were begun."""

        def grade(key: Key, prompt: Prompt) -> Grade | None:
            with _own(prompt.grader):
                return self._background.grade(key, deadline)

        return {key: self._attempt(partial(grade, key, prompt), prompt) for key, prompt in begun.items()}

    def _attempt(self, work: Callable[[], Grade | None], prompt: Prompt, deadline: float = math.inf) -> Grade:
        """Return a response's grade; unscored if its grader fails or is late, unless ``on_error: end``."""
        try:
            beat()
            with naming(prompt.prompt_id):
                if time.monotonic() > deadline or (grade := work()) is None:
                    limit = f"{self._reward.step_timeout:g} s after the harvest (reward.step_timeout)"
                    raise UnscoredError(f"no verdict {limit}")
            return weighed(grade, self._reward.weights)
        except FAILURES as error:
            if self._reward.on_error == "end":
                raise
            return Grade.unscored(error)

    def _grader(self, name: str) -> Grader:
        if name not in self._graders:
            self._graders[name] = make_grader(name, self._reward, self._seed)
        return self._graders[name]

    def _function(self, name: str) -> RewardFunction | None:
        if name not in self._functions:
            named = is_import_path(name) and is_reward_function(name)
            if named and (taken := [key for key in NUMBER_KEYS if key in self._reward.weights]):
                expected = f"names other than {', '.join(NUMBER_KEYS)}, of a function's only reward"
                raise ValueError(f"reward.weights: expected {expected}, found {taken[0]!r}")
            self._functions[name] = RewardFunction(name, "grader") if named else None
        return self._functions[name]


def weighed(grade: Grade, weights: Mapping[str, float]) -> Grade:
    """Return the grade with the weighted sum of its named rewards: of zeros if there was nothing to grade.
    One reward without names stays as it is. Raises ValueError unless the weights have the names."""
    if not grade.rewards and grade.verdict in ("timeout", "not_applicable", UNSCORED):
        grade = replace(grade, rewards=dict.fromkeys(weights, 0.0))
    if not grade.rewards:
        return grade
    if grade.rewards.keys() != weights.keys():
        expected = f"expected rewards of the names in reward.weights, {', '.join(weights) or 'none'}"
        raise ValueError(f"{grade.grader}: {expected}; found {', '.join(grade.rewards)}")
    return replace(grade, reward=sum(weight * grade.rewards[name] for name, weight in weights.items()))


def _grade_batch(
    grader: Grader, name: str, texts: Sequence[str], prompts: Sequence[Prompt], numbers: Sequence[int]
) -> list[Grade]:
    with _own(name):
        answers = grader.grade([texts[n] for n in numbers], [prompts[n].gold for n in numbers])
    if len(answers) != len(numbers) or not all(isinstance(one, Grade) for one in answers):
        raise ValueError(f"{name}: grade(texts, golds): expected {len(numbers)} Grade, got {answers!r:.200}")
    return answers


def _own(name: str) -> AbstractContextManager[None]:
    """Return ``own_code`` for a grader of the user's own."""
    return own_code(name) if is_import_path(name) else nullcontext()


class EarlyGrading(HarvestObserver):
    """Starts grading responses as they end, for rollouts that this rank grades."""

    def __init__(self, scorer: Scorer, grades: Callable[[Prompt, int], bool] = every_rollout) -> None:
        self.scorer, self.grades = scorer, grades

    def part_finished(self, harvester: Harvester, part: Part) -> None:
        ungraded = part.finish_reason == "stop" and part.grade is None
        if ungraded and self.grades(harvester.prompt, harvester.index):
            self.scorer.begin(harvester.prompt, harvester.response(part))


def _ended(rollouts: Iterable[Rollout]) -> Iterator[_Ended]:
    for rollout in rollouts:
        for part, response in rollout.ended():
            yield _Ended(response_key(rollout.prompt, response), rollout.prompt, response, part)


def make_grader(name: str, reward: RewardRecipe, seed: int = 0) -> Grader:
    """Make the grader called ``name``, for a run with ``seed``. Raises ValueError if there is none."""
    assert reward.workers is not None, "the scorer has asked the machine"
    if name == "math":
        return MathGrader(reward.workers, reward.timeout)
    if name == "code":
        return CodeGrader(reward)
    # a factory: reward functions never come here (`Scorer._function`)
    if is_import_path(name):
        factory = load_object(name, "grader")
        draws = "seed" in inspect.signature(factory).parameters
        with own_code(name):
            grader = factory(reward, seed=seed) if draws else factory(reward)
        if not (callable(getattr(grader, "grade", None)) and callable(getattr(grader, "close", None))):
            factory_of = "a factory whose result has grade(texts, golds) and close()"
            expected = f"a reward function (docs/extending.md), or {factory_of}"
            raise ValueError(f"grader: {name}: expected {expected}, found {grader!r:.80}")
        return grader
    raise ValueError(f"grader: expected math, code or package.module:name, found {name!r}")


def unscored_causes(rollouts: Iterable[Rollout]) -> list[str]:
    """Return why each response without a reward has none, with its prompt."""
    unscored = ((part.grade, rollout.prompt_id) for rollout in rollouts for part in rollout.unscored())
    return [f"{grade.detail} ({prompt_id})" for grade, prompt_id in unscored if grade]

"""Scoring: every response that ended gets its verifier's grade, once.

rollouts ──► ended responses ──decode──► grader of the prompt ──► Segment.grade
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from typing import Protocol

import numpy as np

from megatron_eqlen.metrics import REWARD_MEAN
from megatron_eqlen.plugins import is_import_path, load_object
from megatron_eqlen.recipe import RewardRecipe
from megatron_eqlen.rewards.code import CodeGrader
from megatron_eqlen.rewards.math import MathGrader
from megatron_eqlen.tokenizer import Tokenizer
from megatron_eqlen.types import Grade, Metrics, Prompt, Rollout, Segment

Rubric = Callable[[str, str, str], float]
"""``rubric(question, response, gold)`` gives a reward in [0, 1]."""


class Grader(Protocol):
    """What a factory named by import path returns, called with the recipe's ``reward`` section."""

    def grade(self, texts: Sequence[str], golds: Sequence[str]) -> list[Grade]:
        """A grade for each response text against its gold, in order."""
        ...

    def close(self) -> None:
        """End processes, if it has any."""
        ...


class Scorer:
    """Sends each response to its prompt's grader."""

    def __init__(self, reward: RewardRecipe, tokenizer: Tokenizer) -> None:
        self._reward = reward
        self._tokenizer = tokenizer
        self._graders: dict[str, Grader] = {}
        self._rubric = load_object(reward.rubric, "reward.rubric") if reward.rubric else None

    def score(self, rollouts: Iterable[Rollout]) -> Metrics:
        """Fill ``grade`` of every segment that ends a response; a grade that is already there is kept."""
        started = time.monotonic()
        ended: dict[tuple[str, bytes], list[Segment]] = defaultdict(list)
        prompts: dict[str, Prompt] = {}
        texts: dict[tuple[str, bytes], str] = {}
        for rollout in rollouts:
            prompts[rollout.prompt_id] = rollout.prompt
            for segment, response in rollout.ended():
                key = rollout.prompt_id, blake2b(response.tobytes()).digest()
                ended[key].append(segment)
                if segment.grade is None and key not in texts:
                    texts[key] = self._tokenizer.decode(response)
        grades = self.grade_texts(list(texts.values()), [prompts[prompt_id] for prompt_id, _ in texts])
        for key, grade in zip(texts, grades, strict=True):
            for segment in ended[key]:
                segment.grade = segment.grade or grade
        metrics = reward_metrics(
            [(prompts[key[0]], segment.grade) for key, segments in ended.items() for segment in segments]
        )
        return metrics | {"reward/calls": len(texts), "reward/seconds": time.monotonic() - started}

    def grade_texts(self, texts: Sequence[str], prompts: Sequence[Prompt]) -> list[Grade]:
        """A grade for each response text to its prompt."""
        grades: dict[int, Grade] = {}
        by_grader: dict[str, list[int]] = defaultdict(list)
        for number, prompt in enumerate(prompts):
            by_grader[prompt.grader].append(number)
        for name, numbers in by_grader.items():
            if name == "rubric":
                answers = [self._grade_by_rubric(texts[n], prompts[n]) for n in numbers]
            else:
                answers = self._grader(name).grade(
                    [texts[n] for n in numbers], [prompts[n].gold for n in numbers]
                )
            grades |= zip(numbers, answers, strict=True)
        return [grades[number] for number in range(len(texts))]

    def close(self) -> None:
        """End the graders' processes."""
        for grader in self._graders.values():
            grader.close()
        self._graders.clear()

    def _grader(self, name: str) -> Grader:
        if name not in self._graders:
            self._graders[name] = make_grader(name, self._reward)
        return self._graders[name]

    def _grade_by_rubric(self, text: str, prompt: Prompt) -> Grade:
        rubric = self._reward.rubric
        if self._rubric is None or rubric is None:
            raise ValueError(
                f"reward.rubric: expected module:function for prompt {prompt.prompt_id}, found none"
            )
        started = time.monotonic()
        reward = float(self._rubric(prompt.question, text, prompt.gold))
        if not 0.0 <= reward <= 1.0:
            raise ValueError(f"{rubric}: expected a reward in [0, 1], got {reward}")
        return Grade(reward, "scored", None, rubric, time.monotonic() - started)


def make_grader(name: str, reward: RewardRecipe) -> Grader:
    """Make the grader called ``name``. Raises ValueError if there is none."""
    if name == "math":
        return MathGrader(reward.math_rule, reward.workers, reward.timeout)
    if name == "code":
        return CodeGrader(
            reward.workers,
            reward.code_timeout,
            reward.code_memory_mb,
            reward.code_sandbox,
            reward.sandbox_url,
            reward.lcb_strict,
        )
    if is_import_path(name):
        return load_object(name, "grader")(reward)
    raise ValueError(f"grader: expected math, code, rubric or package.module:factory, found {name!r}")


def reward_metrics(ended: Sequence[tuple[Prompt, Grade | None]]) -> Metrics:
    """Mean and spread of the rewards, per source too, and the share of each verdict, of responses that ended;
    all have been graded."""
    graded = [(prompt, grade) for prompt, grade in ended if grade is not None]
    assert len(graded) == len(ended), "a response that ended has no grade"
    metrics: Metrics = {"reward/ended": len(graded)}
    if not graded:
        return metrics
    rewards = np.array([grade.reward for _, grade in graded])
    metrics |= {REWARD_MEAN: float(rewards.mean()), "reward/std": float(rewards.std())}
    metrics["reward/grader_seconds"] = sum(grade.seconds for _, grade in graded)
    verdicts = Counter(grade.verdict for _, grade in graded)
    metrics |= {
        f"reward/verdict/{verdict}": count / len(graded) for verdict, count in sorted(verdicts.items())
    }
    sources = sorted({prompt.source for prompt, _ in graded if prompt.source})
    for source in sources:
        of_source = [grade.reward for prompt, grade in graded if prompt.source == source]
        metrics[f"reward/source/{source}/ended"] = len(of_source)
        metrics[f"reward/source/{source}/mean"] = sum(of_source) / len(of_source)
    return metrics

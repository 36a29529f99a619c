r"""First rewards: a right, a wrong and a missing answer to a real row, graded before model and engine load.

The right answer is the gold in the form that the prompt asks for: ``\boxed{}``, ``####``, ``<answer>`` or
``Answer:``, or a program that looks up what its tests expect. If that earns nothing, no response will.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO

from megatron_eqlen.data.layouts import final_answer
from megatron_eqlen.data.prompts import PromptSource
from megatron_eqlen.data.rows import DEMONSTRATION
from megatron_eqlen.hf.tokenizer import Tokenizer
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.recipe.plugins import is_import_path
from megatron_eqlen.rewards.functions import referred
from megatron_eqlen.rewards.scoring import Scorer
from megatron_eqlen.types import UNSCORED, Prompt

FORMS = {
    "\\boxed": "\\boxed{%s}",
    "####": "#### %s",
    "<answer>": "<answer>%s</answer>",
    "Answer:": "Answer: %s",
}
"""Text of a prompt that asks for a form -> the form; the last one in the prompt counts."""
LONG_GOLD = 20
"""Words beyond which a gold is no answer but an explanation."""
LARGEST_TESTS = 200_000
"""Characters of a problem's tests beyond which no program looks them up."""
STDIN = """```python
import sys
tests = {tests!r}
print(tests.get(sys.stdin.read().strip(), ""))
```"""
FUNCTION = """```python
tests = {tests!r}
def {name}(*arguments):
    return next((output for inputs, output in tests if inputs == [*arguments]), None)
```"""
TRIED, SECONDS = 100, 5.0
"""Rows whose answers a user's own grader grades, and the time after which no further row is begun."""
SLOW = 1.0
"""Seconds for an answer beyond which a user's own reward function is called slow."""
READ = {"math": "\\boxed{%s}"}
"""Form that a grader of ours reads."""


@dataclass(frozen=True)
class FirstReward:
    """Rewards of four answers to the first usable row of a source or benchmark."""

    name: str
    grader: str
    rewards: dict[str, float]
    cause: str = ""
    """Why no response will earn a reward, if that can be seen; or which has none."""
    failure: str = ""
    is_unnamed: bool = False
    of_benchmark: bool = False
    seconds: float = 0.0
    """Longest time that a reward function of the user's own took for one of the answers."""

    def __str__(self) -> str:
        rewards = ", ".join(f"{answer} {reward:g}" for answer, reward in self.rewards.items())
        return (
            f"{'benchmark ' * self.of_benchmark}{self.name} ({self.grader}): {rewards}"
            + f", {self.seconds:.1f} s each, one after another" * self.is_slow
            + f": {self.cause}" * bool(self.cause)
        )

    @property
    def is_slow(self) -> bool:
        return self.seconds > SLOW

    @property
    def lowest(self) -> float:
        return min(self.rewards.values())


def first_rewards(
    recipe: Recipe, source: PromptSource, scorer: Scorer, tokenizer: Tokenizer
) -> list[FirstReward]:
    """Return the first reward of each source and benchmark. A user's own grader grades further rows, too.
    Raises ValueError, naming source and row, for an error of a grader, and as ``read_benchmark``."""
    benchmarks = [source.benchmark(benchmark) for benchmark in recipe.evaluation.benchmarks]
    found = [
        replace(_graded_rows(prompts, scorer, tokenizer), of_benchmark=of_benchmark)
        for of_benchmark, samples in ((False, source.samples(TRIED)), (True, benchmarks))
        for prompts in samples
        # Demonstrations have no reward; a program that holds megabytes of tests is not written.
        if prompts and prompts[0].grader != DEMONSTRATION
        if prompts[0].grader != "code" or len(prompts[0].gold) <= LARGEST_TESTS
    ]
    names = ", ".join(() if recipe.environment.name else recipe.reward.weights)  # it may name its own
    if unnamed := [first for first in found if first.is_unnamed and not first.of_benchmark and names]:
        where = f"{unnamed[0].name}: {unnamed[0].grader}"
        raise ValueError(f"{where}: expected rewards named {names} (reward.weights), found one unnamed")
    return found


def _graded_rows(prompts: Sequence[Prompt], scorer: Scorer, tokenizer: Tokenizer) -> FirstReward:
    """Return the first reward of some rows of a source: the first row's, with a failure of any other."""
    first, ends = first_reward(prompts[0], scorer, tokenizer), time.monotonic() + SECONDS
    # Only a user's own grader may fail at a later row; ours are tested.
    for prompt in prompts[1:TRIED]:
        if is_import_path(prompt.grader) and time.monotonic() < ends:
            with redirect_stdout(StringIO()):  # what a function prints was seen at the first row
                later = first_reward(prompt, scorer, tokenizer)
            failure = first.failure or later.failure
            # A row that could be graded is shown, a failure of any row is the cause.
            shown = first if first.rewards else later
            first = replace(shown, failure=failure, cause=failure or shown.cause)
    if not first.rewards:
        raise ValueError(first.failure)
    return first


def first_reward(prompt: Prompt, scorer: Scorer, tokenizer: Tokenizer) -> FirstReward:
    """Grade four answers to ``prompt``."""
    text, read = tokenizer.decode(prompt.token_ids), READ.get(prompt.grader)
    # The last form that the prompt mentions is the one that it asks for.
    places = {text.rfind(mark): form for mark, form in FORMS.items() if mark in text}
    asked = places[max(places)] if places else None
    # how an answer is written: as the prompt asks, else as the grader reads
    form, given = asked or read or "%s", referred(prompt.gold)[0]
    gold = final_answer(given) if isinstance(given, str) else str(given)
    # a number that shares no digit with the gold, where there is one: ``777``, or ``000`` for all ten digits
    wrong = 3 * next((digit for digit in "7310246589" if digit not in gold), "0")
    texts = {"right": form % gold, "wrong": form % wrong, "empty": "", "without its form": f"It is {gold}."}
    if prompt.grader == "code":
        form, gold = "%s", "its tests"
        texts = {"right": _program(prompt.gold), "wrong": "```python\n```", "empty": ""}
    elif form == "%s":
        del texts["without its form"]
    try:
        grades = scorer.grade_texts(
            [*texts.values()], [prompt] * len(texts), [tokenizer.encode(text) for text in texts.values()]
        )
    except ValueError as error:
        raise ValueError(f"{prompt.prompt_id}: {error}") from error
    answers = [*zip(texts, grades, strict=True)]
    rewards = {answer: grade.reward for answer, grade in answers if grade.verdict != UNSCORED}
    failed = [grade.detail for grade in grades if grade.verdict == UNSCORED]
    cause = failure = "".join(f"{prompt.prompt_id}: {detail}" for detail in failed[:1])
    # a later cause replaces an earlier one: it is the likelier
    if prompt.grader == "math" and len(gold.split()) > LONG_GOLD:
        cause = f"its gold has {len(gold.split())} words, which no response will repeat: {gold!r:.80}"
    if not failure and rewards["right"] <= rewards["wrong"]:
        kind = "" if isinstance(given, str) else f", which the function gets as {type(given).__name__}"
        cause = f"its gold{kind}, written {texts['right']!r:.60}, earns no more than a wrong answer"
        if read and asked and asked != read:
            cause = (
                f"the prompt asks for {asked % '...'}, the grader reads {read % '...'}: change the prompt "
                "(data.instruction; a chat keeps its own), or name a grader that reads it"
            )
    seconds = max(grade.seconds for grade in grades) * is_import_path(prompt.grader)
    unnamed = not any(grade.rewards for grade in grades)
    return FirstReward(prompt.source, prompt.grader, rewards, cause, failure, unnamed, seconds=seconds)


def refuse_unfit(rewards: Iterable[FirstReward]) -> None:
    """Raise ValueError for a reward of a benchmark that is no accuracy."""
    for first in rewards:
        for answer, reward in first.rewards.items():
            if first.of_benchmark and not 0 <= reward <= 1:
                raise ValueError(
                    f"evaluation.benchmarks: {first.name}: avg@k and pass@k are of rewards in [0, 1], found "
                    f"{reward:g} for a {answer} answer: give the benchmark a grader of its own"
                )


def _program(gold: str) -> str:
    """Return a program that looks up what the tests of a code problem expect."""
    tests = json.loads(gold)
    if name := tests.get("function"):
        return FUNCTION.format(tests=[*zip(tests["inputs"], tests["outputs"], strict=True)], name=name)
    return STDIN.format(
        tests={text.strip(): output for text, output in zip(tests["inputs"], tests["outputs"], strict=True)}
    )

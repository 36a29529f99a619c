"""Diagnosis: why a run does not learn, or stops to, from the newest steps in its folder.

metrics.jsonl ──► trends; no gradient? ──► streams/step-N ──► counts of the responses' ends, and an example
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import NamedTuple

from megatron_eqlen import metrics as m
from megatron_eqlen.files import step_name
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.record.reader import fill_numbers, read_skeletons, step_files
from megatron_eqlen.report.format import MISMATCH, RESPONSE_LENGTH, compact, first_of
from megatron_eqlen.report.metrics import Records
from megatron_eqlen.report.recorded import find_decoder
from megatron_eqlen.sampling.comparison import EQUAL_REWARDS
from megatron_eqlen.types import UNSCORED, Part, Rollout, last_turn

MOST = 0.9
"""Share of a step's responses from which one kind of end is the cause."""
LOOKED_AT, TEXT = 32, 160
"""Most truncated responses that are searched for an answer, and characters of the example's end."""
FORMS = {"math": "\\boxed{", "reasoning_gym": "<answer>", "code": "```"}
"""Text that an answer begins with, by grader."""
TRENDS = (
    ("entropy", (m.LOSS_ENTROPY,), 0.1, 0.02, "the policy samples hardly anything new: raise "
     "rollout.temperature or loss.clip_ratio_high, or lower optimizer.lr"),
    ("length", RESPONSE_LENGTH, 0.25, 0.0, "responses have become short: look at them, and at what "
     "rewards or penalises length"),
    ("gradient norm", (m.TRAIN_GRAD_NORM,), 1e-3, 1e-9, "nothing is learned any more"),
    ("mismatch KL", MISMATCH, 10.0, 1e-3, "engine and trainer drift apart: loss.rollout_is, and "
     "docs/troubleshooting.md"),
)  # fmt: skip
"""Name, metrics, ratio of the newest steps to the oldest that is a collapse (below 1) or a growth, the value
below which it is one anyway (from which, for a growth), and what follows."""
ENDS = 3
"""Steps at each end of the newest records that are compared."""


class Diagnosis(NamedTuple):
    kind: str
    text: str
    """Cause, with counts and an example."""


class _Response(NamedTuple):
    rollout: Rollout
    last: Part
    end: str
    """Verdict, or ``truncated`` or ``cut off``."""
    reward: float


def diagnose(run: Path, recipe: Recipe, records: Records) -> list[Diagnosis]:
    """Return what is wrong in the newest steps; nothing for a run that learns. ``records``: the newest ones,
    oldest first. Raises ValueError naming a file that is damaged."""
    if not records:
        return []
    last = records[-1]
    units = last.get(m.OBJECTIVE_UNITS) or 0
    idle = not last.get(m.UPDATES) or last.get(m.OBJECTIVE_ZERO_ADVANTAGE_FRACTION) == 1 or not units
    many = max(last.get("reward/verdict/no_answer") or 0, last.get(m.HARVEST_TRUNCATED_FRACTION) or 0) > MOST
    found = [] if recipe.supervised else list(_trends(records))
    files = step_files(run / "streams" / step_name(last["step"] - 1))
    if (idle or many) and files and not last.get(m.TRAIN_SKIPPED_UPDATES):
        responses = list(_responses(read_skeletons(files)))
        found += _ends(responses, files, recipe) if responses else []
        if units and last.get(m.OBJECTIVE_MEMBERS) == units:
            found += [Diagnosis("single", "equal rewards by construction: comparison units have one member")]
    if failed := (last.get(m.REWARD_UNSCORED) or 0) + (last.get(m.ENVIRONMENT_DROPPED) or 0):
        length = first_of(last, (m.REWARD_DROPPED_LENGTH, m.ENVIRONMENT_DROPPED_LENGTH))
        kept = first_of(last, RESPONSE_LENGTH)
        found += [
            Diagnosis(
                UNSCORED,
                f"{failed:.0f} responses have no reward (reward.on_error: {recipe.reward.on_error})"
                + f"; left out were {compact(length)} tokens long, kept {compact(kept)}"
                * (length is not None),
            )
        ]
    return found


def _trends(records: Records) -> Iterator[Diagnosis]:
    for name, names, ratio, bound, so in TRENDS:
        values = [value for record in records if (value := first_of(record, names)) is not None]
        if len(values) < 2 * ENDS:
            continue
        first, now = median(values[:ENDS]), median(values[-ENDS:])
        grows = ratio > 1
        if (now > bound and now > ratio * first) if grows else (now < bound or now < ratio * first):
            yield Diagnosis(
                name, f"{name} {'grew' if grows else 'fell'} from {compact(first)} to {compact(now)}: {so}"
            )


def _responses(rollouts: Sequence[Rollout]) -> Iterator[_Response]:
    for rollout in rollouts:
        for line in rollout.lines():
            grade = line.last.grade
            if grade is not None and line.last.finish_reason == "stop":
                yield _Response(rollout, line.last, grade.verdict, grade.reward)
            else:
                end = "truncated" if line.last.finish_reason == "length" else "cut off"
                yield _Response(rollout, line.last, end, 0.0)


def _ends(responses: list[_Response], files: Sequence[Path], recipe: Recipe) -> Iterator[Diagnosis]:
    """Yield the cause that nearly all responses share, or why they cannot be told apart."""
    ends = Counter(response.end for response in responses).most_common()
    rewards = [response.reward for response in responses if response.end != UNSCORED] or [0.0]
    (end, count), total = ends[0], len(responses)
    counts = f"{total} responses: " + ", ".join(f"{number} {name}" for name, number in ends)
    example = next(response for response in responses if response.end == end)
    form = FORMS.get(example.rollout.prompt.grader, "")
    equal = max(rewards) - min(rewards) <= EQUAL_REWARDS
    if end == UNSCORED:
        return
    if end == "truncated" and (equal or count > MOST * total):
        cut = [response for response in responses if response.end == end][:LOOKED_AT]
        texts = _texts(cut, files, recipe)
        answered = sum(bool(form) and form in text for text in texts)
        shown = _shown(cut[0], texts[0])
        limit = f"cut at rollout.max_response_length: {recipe.rollout.max_response_length}"
        if 2 * answered > len(cut):
            cause = f"responses go on after their answer and are {limit} (`eqlen check`: how a turn ends)"
        else:
            cause = f"responses are {limit}, their answers would come after it"
        yield Diagnosis(end, f"{cause} ({counts}; {answered} of {len(cut)} hold an answer); e.g. {shown}")
        return
    if end == "no_answer" and (equal or count > MOST * total):
        cause = f"the form is not met: no {form or 'answer'} in {count} responses (data.instruction)"
    elif not equal:
        groups = groupby(responses, key=lambda response: response.rollout.prompt_id)
        within = [{round(response.reward, 9) for response in group} for _, group in groups]
        if any(len(values) > 1 for values in within):
            return  # other parts are compared: the metrics say how many
        cause = (
            f"rewards differ between prompts only: {sum(max(v) > 0 for v in within)} of {len(within)} right"
        )
        end = "by prompt"
    elif end in ("correct", "passed"):
        cause = "all are right: the prompts are too easy"
    elif end == "cut off":
        cause = "responses are cut off by rollout.tokens_per_step"
    elif end == "scored":
        cause = f"equal rewards: the reward function gives {compact(rewards[0])} to all"
    else:
        cause = "all are wrong: the prompts are too hard, or the golds have another form"
    yield Diagnosis(end, f"{cause} ({counts}); e.g. {_shown(example, _texts([example], files, recipe)[0])}")


def _texts(responses: Sequence[_Response], files: Sequence[Path], recipe: Recipe) -> list[str]:
    fill_numbers([response.rollout for response in responses], files)
    decode, _ = find_decoder(recipe.model)
    lines = [each.rollout.line(each.last.number) for each in responses]
    return [decode(tuple(last_turn(line).tolist())) for line in lines]


def _shown(response: _Response, text: str) -> str:
    """Return a response's prompt, the end of its text, and the gold where there is one answer."""
    prompt, end = response.rollout.prompt, f"…{text[-TEXT:]}" if len(text) > TEXT else text
    return f"{prompt.prompt_id}: {end!r}" + f", gold {prompt.gold[:40]!r}" * (prompt.grader == "math")

"""Recorded steps: what is missing of them, their verdicts, and their rollouts as pages have them."""

from __future__ import annotations

import base64
import json
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from megatron_eqlen.evaluation.result import RESPONSES
from megatron_eqlen.files import streams_of
from megatron_eqlen.hf.tokenizer import load_decoder
from megatron_eqlen.job import Job
from megatron_eqlen.objectives.advice import advice
from megatron_eqlen.recipe import ModelRecipe, Recipe
from megatron_eqlen.recipe.inputs import local_path
from megatron_eqlen.record.reader import check_file, fill_numbers, read_skeletons, scored_steps, step_files
from megatron_eqlen.report.rollouts import Decode, PartView, RolloutView, Training, by_token, view
from megatron_eqlen.rewards.measured import leave_out
from megatron_eqlen.sampling.probe import PROBE
from megatron_eqlen.sampling.profile import Profile
from megatron_eqlen.types import Part, Rollout

PROFILED = 8
"""Number of newest steps whose rollouts give advice."""
DIGITS = 3
"""Decimal places of log-probs; advantages and weights have as many significant digits."""


def find_decoder(model: ModelRecipe) -> tuple[Decode, str]:
    """Return the model's decoder for tokens inside a text, and ""; without one, a decoder to ids, and why."""
    try:
        return by_token(load_decoder(local_path(model))), ""
    except ValueError as error:
        return lambda ids: "".join(f"{token} " for token in ids), f"Token ids instead of text: {error}"


def recorded_advice(run: Path, recipe: Recipe) -> tuple[Profile | None, str]:
    """Return what the newest steps in the folder of a run or harvest advise (``objectives/advice.py``)."""
    newest = islice(scored_steps(streams_of(run), newest_first=True), PROFILED)
    rollouts = [rollout for _, folder in newest for rollout in read_skeletons(step_files(folder))]
    # the newest step may still be without some of its grades
    scored = [
        rollout
        for rollout in rollouts
        if not rollout.suspended and all(part.grade for part in rollout.parts if part.finish_reason == "stop")
    ]
    kept, _ = leave_out(scored, recipe.reward)
    return advice(kept, recipe) if kept else (None, "")


class RecordedStep:
    """The rollouts that some of a step's ``files`` hold. Raises ValueError naming a file that is damaged."""

    def __init__(self, files: Sequence[Path], job: Job | None) -> None:
        # training compares with all of the step, and trains the last of two attempts at a rollout
        self._files = [*dict.fromkeys([*step_files(files[0].parent), *files])]
        for path in self._files:
            check_file(path)
        self.rollouts = rollouts = read_skeletons(self._files)
        if len(files) < len(self._files):
            mine = {rollout.key for rollout in read_skeletons(files)}
            self.rollouts = [rollout for rollout in rollouts if rollout.key in mine]
        probed = any(part.role == PROBE for rollout in rollouts for part in rollout.parts)
        evaluated = files[0].resolve().parents[1].name.endswith(RESPONSES)
        self.training = Training(rollouts, None if probed or evaluated else job)

    def views(self, rollouts: Sequence[Rollout], decode: Decode) -> list[RolloutView]:
        fill_numbers(rollouts, self._files)
        return [view(rollout, decode, self.training) for rollout in rollouts]

    def verdicts(self) -> list[tuple[str, int]]:
        """Return the verdicts of all its responses with their numbers, the most frequent first."""
        grades = [part.grade for rollout in self.rollouts for part in rollout.parts]
        return Counter(grade.verdict for grade in grades if grade is not None).most_common()

    def rows(self, rollouts: Sequence[Rollout], decode: Decode) -> Iterator[dict[str, Any]]:
        """Yield ``rollouts`` as plain data: what a page filters by, and ``packed``, compressed JSON of the
        ``question`` and ``parts``: place in the tree, facts, texts of tokens, and ``columns``."""
        for rollout, seen in zip(rollouts, self.views(rollouts, decode), strict=True):
            grades = [part.grade for part in rollout.parts if part.grade is not None]
            parts = [_part(part, one) for part, one in zip(rollout.parts, seen.parts, strict=True)]
            detail = {"question": seen.question, "parts": parts}
            text = json.dumps(detail, ensure_ascii=False, separators=(",", ":"))
            yield {
                "prompt": rollout.prompt_id,
                # `deepmath/train-00000.parquet#17` is of deepmath
                "source": rollout.prompt.source or rollout.prompt_id.partition("/")[0],
                "title": seen.title,
                "question": seen.question[:160],
                "verdicts": sorted({grade.verdict for grade in grades}),
                "reward": _rounded(np.mean([grade.reward for grade in grades])) if grades else None,
                "length": max((length for _, length, _ in rollout.lines()), default=0),
                "gap": _gap(rollout, seen),
                "packed": base64.b64encode(zlib.compress(text.encode(), 9)).decode(),
            }


def _gap(rollout: Rollout, seen: RolloutView) -> float | None:
    """Return the largest difference of rewards within a pair, or without pairs of all parts."""
    rewards = {side: list[float | None]() for side in ("a", "b", "")}
    for part, one in zip(rollout.parts, seen.parts, strict=True):
        rewards[part.role if part.role in rewards else ""].append(one.lesson.reward)
    sets = [*zip(rewards["a"], rewards["b"], strict=True)] or [rewards[""]]
    known = [[reward for reward in rewards if reward is not None] for rewards in sets]
    return max((_rounded(max(rewards) - min(rewards)) for rewards in known if rewards), default=None)


def _part(part: Part, seen: PartView) -> dict[str, Any]:
    own, node = part.tokens.is_generated, seen.lesson.node
    columns = {}
    if "logprobs" in part.tokens:
        columns["log-prob"] = np.round(part.tokens["logprobs"].astype(float), DIGITS)
    if node is not None:
        # an environment's tokens have neither advantage nor weight
        advantages = np.zeros(len(own))
        advantages[own] = node.advantage
        columns |= {"advantage": advantages, "weight": np.where(own, node.weight, 0.0)}
    if "versions" in part.tokens:
        columns["version"] = part.tokens["versions"]
    if not own.all():
        columns["given"] = ~own
    return {
        "label": seen.label,
        "parent": seen.parent,
        "facts": seen.facts(),
        "role": seen.lesson.role,
        "start": seen.start,
        "ended": seen.end == "stop",
        "tokens": seen.tokens,
        "columns": {name: _numbers(values) for name, values in columns.items()},
    }


def _numbers(values: np.ndarray) -> float | list[float]:
    """Return one number if all are equal."""
    if len(values) and (values == values[0]).all():
        return _rounded(values[0].item())
    return [_rounded(value) for value in values.tolist()]


def _rounded(value: Any) -> float:
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else int(value)

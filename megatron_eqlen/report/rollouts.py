"""Recorded rollouts made ready to be read by people: text, rewards, and what was trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Literal

from megatron_eqlen.recipe import EqualLengthRecipe
from megatron_eqlen.sampling.comparison import all_equal
from megatron_eqlen.sampling.equal_length.suffix import pair_rewards
from megatron_eqlen.types import Group, Rollout, SampledTree, Segment, Stream

Decode = Callable[[list[int]], str]

Role = Literal["raised", "lowered", "equal", "plain"]
"""Its reward against what it is compared with: above, below, the same; ``plain``: not compared."""

CONTEXT_TOKENS = 24
"""So many of the tokens before a segment are shown with it."""


@dataclass(frozen=True)
class SegmentView:
    """One side of a pair, a completion, a tail, or a step of a tree."""

    label: str
    """``A1``, ``B1``, ``tail``, ``completion 3``, ``step 2 after step 0``."""
    before: str
    """The end of what it inherits after the prompt."""
    text: str
    length: int
    """Tokens."""
    inherited: int
    """Tokens between the prompt and this segment."""
    end: str
    """``stop``, ``length`` or ``goes on``."""
    reward: float | None = None
    """What it is compared by; None where it has none (yet)."""
    role: Role = "plain"
    verdict: str = ""
    """The grader's word and the extracted answer, where the segment ends a response."""


@dataclass(frozen=True)
class PairView:
    a: SegmentView
    b: SegmentView
    use: str
    """``trained``, ``skipped`` (equal rewards), ``left out`` (no reward for B) or ``not scored``."""


@dataclass(frozen=True)
class RolloutView:
    prompt_id: str
    question: str
    title: str
    pairs: list[PairView] = field(default_factory=list)
    segments: list[SegmentView] = field(default_factory=list)
    """What is not part of a pair."""


def dump_files(streams: Path) -> list[Path]:
    """The recorded files of a ``.jsonl`` path, of one step's folder, or of a run's ``streams/`` folder.

    Raises ValueError naming the path if there are none.
    """
    if streams.is_file():
        return [streams]
    files = sorted(streams.glob("rank-*.jsonl")) or sorted(streams.glob("step-*/rank-*.jsonl"))
    if not files:
        found = "neither" if streams.is_dir() else "no such file or folder"
        raise ValueError(
            f"{streams}: expected a .jsonl file, or a folder with rank-*.jsonl or step-*/rank-*.jsonl, "
            f"found {found}"
        )
    return files


def view(rollout: Rollout, decode: Decode, recipe: EqualLengthRecipe) -> RolloutView:
    """A rollout as text. ``recipe`` says how a B side is rewarded; unscored rollouts have no rewards."""
    if isinstance(rollout, Stream):
        return _stream(rollout, decode, recipe)
    if isinstance(rollout, Group):
        return _group(rollout, decode)
    return _tree(rollout, decode)


def _stream(stream: Stream, decode: Decode, recipe: EqualLengthRecipe) -> RolloutView:
    pairs = []
    for number, (pair, (a, b)) in enumerate(zip(stream.pairs, _rewards(stream, recipe), strict=True)):
        prefix = stream.trunk_token_ids(number)
        sides = (
            _segment(f"A{number + 1}", pair.a, prefix, decode, a, _role(a, b)),
            _segment(f"B{number + 1}", pair.b, prefix, decode, b, _role(b, a)),
        )
        pairs.append(PairView(*sides, use=_use(a, b)))
    rest = []
    if stream.tail is not None:
        trunk = stream.trunk_token_ids(len(stream.pairs))
        rest = [_segment("tail", stream.tail, trunk, decode, _own_reward(stream.tail))]
    outcome = stream.outcome.replace("_", " ")
    title = f"stream {stream.index}, {_count(len(pairs), 'pair')}, {outcome}"
    return RolloutView(stream.prompt_id, stream.prompt.question, title, pairs, rest)


def _group(group: Group, decode: Decode) -> RolloutView:
    rewards = _group_rewards(group)
    middle = fmean(rewards) if None not in rewards else None
    segments = [
        _segment(f"completion {number}", completion, [], decode, reward, _role(reward, middle))
        for number, (completion, reward) in enumerate(zip(group.completions, rewards, strict=True))
    ]
    title = _count(len(segments), "completion")
    return RolloutView(group.prompt_id, group.prompt.question, title, segments=segments)


def _tree(tree: SampledTree, decode: Decode) -> RolloutView:
    segments = []
    for number, (step, parent) in enumerate(zip(tree.steps, tree.parents, strict=True)):
        label = f"step {number}" + (f" after step {parent}" if parent >= 0 else "")
        prefix = tree.response(parent) if parent >= 0 else []
        segments.append(_segment(label, step, prefix, decode, _own_reward(step)))
    title = f"tree of {_count(len(segments), 'step')}"
    return RolloutView(tree.prompt_id, tree.prompt.question, title, segments=segments)


def _segment(
    label: str,
    segment: Segment,
    prefix: list[int],
    decode: Decode,
    reward: float | None,
    role: Role = "plain",
) -> SegmentView:
    grade = segment.grade
    answer = "" if grade is None or grade.answer is None else f": {grade.answer}"
    return SegmentView(
        label=label,
        before=decode(prefix[-CONTEXT_TOKENS:]),
        text=decode(segment.token_ids),
        length=len(segment),
        inherited=len(prefix),
        end=segment.finish_reason or "goes on",
        reward=reward,
        role=role,
        verdict="" if grade is None else grade.verdict + answer,
    )


def _rewards(stream: Stream, recipe: EqualLengthRecipe) -> list[tuple[float | None, float | None]]:
    """Of (A, B) of each pair, as trained; None where there is none, and all while one is not scored."""
    if any(segment.grade is None for segment, _ in stream.ended()):
        return [(None, None)] * len(stream.pairs)
    rewards = pair_rewards(stream, recipe.suffix_reward, recipe.unfinished)
    return [values or (_own_reward(pair.a), None) for values, pair in zip(rewards, stream.pairs, strict=True)]


def _group_rewards(group: Group) -> list[float | None]:
    """0 for what did not end, as trained; None for all while one is not scored."""
    if any(completion.grade is None for completion, _ in group.ended()):
        return [None] * len(group.completions)
    return [_own_reward(completion) or 0.0 for completion in group.completions]


def _role(reward: float | None, other: float | None) -> Role:
    if reward is None or other is None:
        return "plain"
    if all_equal([reward, other]):
        return "equal"
    return "raised" if reward > other else "lowered"


def _use(a: float | None, b: float | None) -> str:
    if a is None:
        return "not scored"
    if b is None:
        return "left out"
    return "skipped" if all_equal([a, b]) else "trained"


def _own_reward(segment: Segment) -> float | None:
    return None if segment.grade is None else segment.grade.reward


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"

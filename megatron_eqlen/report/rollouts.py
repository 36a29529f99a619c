"""Recorded rollouts made ready to be read by people: text, rewards, and which tokens were trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from megatron_eqlen.objectives.advantages import all_equal
from megatron_eqlen.recipe import EqualLengthRecipe
from megatron_eqlen.rewards.suffix import pair_rewards
from megatron_eqlen.types import Group, Rollout, SampledTree, Segment, Stream

Decode = Callable[[list[int]], str]


@dataclass(frozen=True)
class SegmentView:
    """One side of a pair, a completion, a tail or a step of a tree."""

    label: str
    """``A1``, ``B1``, ``tail``, ``completion 3``, ``step 2 after step 0``."""
    text: str
    length: int
    """Tokens."""
    inherited: int
    """Tokens between the prompt and this segment."""
    end: str
    """``stop``, ``length`` or ``goes on``."""
    reward: float | None = None
    """What it is compared by; None where it has none (yet)."""
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
        raise ValueError(
            f"{streams}: expected a .jsonl file, or a folder with rank-*.jsonl or step-*/rank-*.jsonl, "
            f"found {'no recorded rollouts in it' if streams.is_dir() else 'no such file or folder'}"
        )
    return files


def view(rollout: Rollout, decode: Decode, recipe: EqualLengthRecipe) -> RolloutView:
    """A rollout as text. ``recipe`` says how a B side is rewarded."""
    if isinstance(rollout, Stream):
        return _stream(rollout, decode, recipe)
    if isinstance(rollout, Group):
        segments = [
            _segment(f"completion {number}", completion, 0, decode, _own_reward(completion))
            for number, completion in enumerate(rollout.completions)
        ]
        title = f"group of {len(segments)}, policy version {rollout.policy_version}"
        return RolloutView(rollout.prompt_id, title, segments=segments)
    return _tree(rollout, decode)


def _stream(stream: Stream, decode: Decode, recipe: EqualLengthRecipe) -> RolloutView:
    rewards = _rewards(stream, recipe)
    pairs, inherited = [], 0
    for number, (pair, values) in enumerate(zip(stream.pairs, rewards, strict=True), 1):
        a, b = values
        sides = (
            _segment(f"A{number}", pair.a, inherited, decode, a),
            _segment(f"B{number}", pair.b, inherited, decode, b),
        )
        pairs.append(PairView(*sides, use=_use(a, b)))
        inherited += len(pair.b)
    tail = stream.tail
    rest = [] if tail is None else [_segment("tail", tail, inherited, decode, _own_reward(tail))]
    title = (
        f"stream {stream.index}, {len(pairs)} pairs, {stream.outcome.replace('_', ' ')}, "
        f"policy version {stream.policy_version}"
    )
    return RolloutView(stream.prompt_id, title, pairs, rest)


def _tree(tree: SampledTree, decode: Decode) -> RolloutView:
    segments = []
    for number, (step, parent) in enumerate(zip(tree.steps, tree.parents, strict=True)):
        after = f" after step {parent}" if parent >= 0 else ""
        inherited = len(tree.response(parent)) if parent >= 0 else 0
        segments.append(_segment(f"step {number}{after}", step, inherited, decode, _own_reward(step)))
    title = f"tree of {len(segments)} steps, policy version {tree.policy_version}"
    return RolloutView(tree.prompt_id, title, segments=segments)


def _segment(
    label: str, segment: Segment, inherited: int, decode: Decode, reward: float | None
) -> SegmentView:
    grade = segment.grade
    answer = "" if grade is None or grade.answer is None else f" ({grade.answer})"
    verdict = "" if grade is None else grade.verdict + answer
    text = decode(segment.token_ids)
    end = segment.finish_reason or "goes on"
    return SegmentView(label, text, len(segment), inherited, end, reward, verdict)


def _rewards(stream: Stream, recipe: EqualLengthRecipe) -> list[tuple[float | None, float | None]]:
    """Of (A, B) of each pair, as trained; None where there is none, and all while one is not scored."""
    if any(segment.grade is None for segment, _ in stream.ended()):
        return [(None, None)] * len(stream.pairs)
    rewards = pair_rewards(stream, recipe.suffix_reward, recipe.unfinished)
    return [values or (_own_reward(pair.a), None) for values, pair in zip(rewards, stream.pairs, strict=True)]


def _use(a: float | None, b: float | None) -> str:
    if a is None:
        return "not scored"
    if b is None:
        return "left out"
    return "skipped" if all_equal([a, b]) else "trained"


def _own_reward(segment: Segment) -> float | None:
    return None if segment.grade is None else segment.grade.reward

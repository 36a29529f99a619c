"""Recorded rollouts as rows of text pieces: what was inherited, what is trained, with which reward.

A stream shows its trunk B_1 .. B_N in one row, and under it every leaf A_i after the prefix that it
inherits. Of a pair with unequal rewards the better side is ``raised`` and the other ``lowered``; with equal
rewards both are ``skipped``. A group shows one row a completion.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_eqlen.data.tokenizers import load_tokenizer
from megatron_eqlen.recipe import EqualLengthRecipe
from megatron_eqlen.rewards.suffix import pair_rewards
from megatron_eqlen.rollout.recorder import read_dump, rollout_key
from megatron_eqlen.types import Group, Pair, Rollout, Segment

Role = Literal["inherited", "raised", "lowered", "skipped", "untrained"]
Decode = Callable[[list[int]], str]

END = "■"
"""Shown where a response ended by itself."""


@dataclass(frozen=True)
class Piece:
    text: str
    role: Role
    label: str = ""
    """``A_2``, ``B_1``, ``tail``."""
    tokens: int = 0
    reward: float | None = None
    answer: str | None = None


@dataclass(frozen=True)
class RolloutView:
    title: str
    rows: list[list[Piece]]


def read_step(folder: Path) -> list[Rollout]:
    """All ranks' rollouts of one step's folder, in a fixed order."""
    rollouts = [rollout for path in sorted(folder.glob("*.jsonl")) for rollout in read_dump(path)]
    return sorted(rollouts, key=rollout_key)


def text_decoder(model: Path) -> Decode:
    """Token ids to text with the model folder's tokenizer. Raises ValueError if it has none."""
    return load_tokenizer(model).decode


def view(rollout: Rollout, decode: Decode, settings: EqualLengthRecipe) -> RolloutView:
    """A rollout in rows; rewards of B_i as ``settings`` reduces them. Rollouts must be scored."""
    if isinstance(rollout, Group):
        return _view_group(rollout, decode)
    rewards = pair_rewards(rollout, settings.suffix_reward, settings.unfinished)
    trunk = [
        _side(f"B_{number}", pair.b, other_reward=a, reward=b, decode=decode)
        for number, (pair, (a, b)) in _numbered(rollout.pairs, rewards)
    ]
    if rollout.tail is not None:
        trunk.append(_piece("tail", rollout.tail, "untrained", decode))
    leaves = [
        [
            Piece(_text(Segment(rollout.trunk_token_ids(number - 1), []), decode), "inherited"),
            _side(f"A_{number}", pair.a, other_reward=b, reward=a, decode=decode),
        ]
        for number, (pair, (a, b)) in _numbered(rollout.pairs, rewards)
    ]
    title = f"{rollout.prompt_id} · stream {rollout.index} · {len(rollout.pairs)} pairs · {rollout.outcome}"
    return RolloutView(title, [trunk, *leaves])


def _numbered(pairs: Sequence[Pair], rewards: Sequence[tuple[float, float] | None]):
    """(i, (pair, rewards)) from 1 on; a dropped pair counts as equal."""
    return enumerate(zip(pairs, [one or (0.0, 0.0) for one in rewards], strict=True), start=1)


def _view_group(group: Group, decode: Decode) -> RolloutView:
    rewards = [one.grade.reward if one.grade else 0.0 for one in group.completions]
    mean = sum(rewards) / len(rewards)
    rows = [
        [_side(f"{number}", completion, other_reward=mean, reward=reward, decode=decode)]
        for number, (completion, reward) in enumerate(zip(group.completions, rewards, strict=True), start=1)
    ]
    return RolloutView(f"{group.prompt_id} · {len(rows)} completions", rows)


def _side(label: str, segment: Segment, other_reward: float, reward: float, decode: Decode) -> Piece:
    role: Role = "skipped"
    if reward != other_reward:
        role = "raised" if reward > other_reward else "lowered"
    return _piece(label, segment, role, decode, reward)


def _piece(label: str, segment: Segment, role: Role, decode: Decode, reward: float | None = None) -> Piece:
    answer = segment.grade.answer if segment.grade else None
    return Piece(_text(segment, decode), role, label, len(segment), reward, answer)


def _text(segment: Segment, decode: Decode) -> str:
    return decode(segment.token_ids) + (END if segment.finish_reason == "stop" else "")

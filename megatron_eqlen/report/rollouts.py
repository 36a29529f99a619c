"""Rollouts in readable form: text, rewards, and their part in training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from megatron_eqlen.objectives.build import weighted_units
from megatron_eqlen.objectives.dynamic_sampling import trained
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.report.format import compact, shorten
from megatron_eqlen.sampling import KINDS
from megatron_eqlen.tokens import VERSIONS, TokenIds
from megatron_eqlen.types import Grade, Node, Part, Rollout, tokens_along

Decode = Callable[[TokenIds], str]

Role = Literal["raised", "lowered", "equal", "plain"]
"""Effect of training on the segment's probability, by its advantage. ``equal``: compared, but without an
advantage; ``plain``: not compared."""
Use = Literal["trained", "skipped", "not trained", "not scored", ""]
"""``skipped``: compared, but its weight is 0 (equal rewards). ``not trained``: part of no comparison. Empty
if unknown."""

MATH = "math"
"""The grader that compares an answer with a gold one (``Prompt.grader``)."""
CONTEXT_TOKENS = 24
"""Number of tokens before a segment that are shown with it."""
SHOWN = 4
"""Number of a step's rollouts that are shown."""


class Lesson(NamedTuple):
    """Effect of training on a segment."""

    reward: float | None
    """Reward in its comparison, or the grader's; None if there is none (yet)."""
    advantage: float | None
    """Advantage; None: not compared."""
    role: Role
    use: Use


@dataclass(frozen=True)
class SegmentView:
    """One side of a pair, a completion, a tail, or a step of a tree."""

    label: str
    """``A1``, ``B1``, ``tail``, ``completion 3``, ``step 2 after step 0``."""
    before: str
    """End of the tokens that the segment inherits after the prompt."""
    text: str
    length: int
    """Number of tokens."""
    inherited: int
    """Number of tokens between the prompt and this segment."""
    end: str
    """``stop``, ``length`` or ``continues`` (not ended here)."""
    reward: float | None
    """This and the next three: see ``Lesson``."""
    advantage: float | None
    role: Role
    use: Use
    verdict: str = ""
    """If the segment ends a response: the grader's verdict, the extracted answer and, unless it is correct,
    the gold one."""
    versions: tuple[int, ...] = ()
    """Policy versions of the weights that sampled it, in order; empty if unknown."""

    def facts(self) -> list[str]:
        """Facts shown beside its label."""
        known = {"reward": self.reward, "advantage": self.advantage}
        return [
            *(f"{name} {compact(value)}" for name, value in known.items() if value is not None),
            *([shorten(self.verdict)] if self.verdict else []),
            self.end,
            f"{self.length} tokens",
            *([f"policy version {', '.join(map(str, self.versions))}"] if self.versions else []),
        ]


class PairView(NamedTuple):
    a: SegmentView
    b: SegmentView


@dataclass(frozen=True)
class RolloutView:
    prompt_id: str
    question: str
    title: str
    pairs: list[PairView]
    segments: list[SegmentView]
    """Segments outside pairs."""

    def all_segments(self) -> list[SegmentView]:
        return [*(side for pair in self.pairs for side in pair), *self.segments]


class Training:
    """Effects of training on a step's rollouts, found with the functions of training itself; skeletons
    suffice. Without the recipe nothing is known.

    ``selected``: ``rollouts`` are those that the step trains, not all that it recorded.
    """

    def __init__(self, rollouts: Sequence[Rollout], recipe: Recipe | None, selected: bool = False) -> None:
        scored = all(part.grade for rollout in rollouts for part, _ in rollout.ended())
        self._other: Use = "" if recipe is None else "not trained" if scored else "not scored"
        self._lessons: dict[int, Lesson] = {}
        self._nodes: dict[int, Node] = {}
        """By the ``id()`` of the part, as ``_lessons``."""
        if recipe is None or not scored:
            return
        for unit in weighted_units(rollouts if selected else trained(rollouts, recipe), recipe):
            members = zip(unit.members, unit.nodes, unit.rewards, unit.advantages, strict=True)
            for part, node, reward, advantage in members:
                use = "trained" if node.weight else "skipped"
                self._nodes[id(part)] = node
                self._lessons[id(part)] = Lesson(reward, advantage, _role(node.weight, advantage), use)

    def of(self, part: Part) -> Lesson:
        reward = None if part.grade is None else part.grade.reward
        return self._lessons.get(id(part)) or Lesson(reward, None, "plain", self._other)

    def node_of(self, part: Part) -> Node | None:
        """Return the node that trains a part; None: not compared."""
        return self._nodes.get(id(part))

    def telling(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Return a few of ``rollouts`` of different prompts, first those with unequal rewards."""
        by_prompt: dict[str, Rollout] = {}
        for rollout in sorted(rollouts, key=lambda rollout: not self._teaches(rollout)):
            by_prompt.setdefault(rollout.prompt_id, rollout)
        return [*by_prompt.values()][:SHOWN]

    def _teaches(self, rollout: Rollout) -> bool:
        return any(self.of(part).role in ("raised", "lowered") for part in rollout.parts)


def _role(weight: float, advantage: float) -> Role:
    if not weight or not advantage:
        return "equal"
    return "raised" if advantage > 0 else "lowered"


def view(rollout: Rollout, decode: Decode, training: Training) -> RolloutView:
    """Return a rollout as text; ``training`` gives the lessons."""
    title, labels = KINDS[rollout.kind].labels(rollout)
    seen = {role: list[SegmentView]() for role in ("a", "b", "")}
    for label, part in zip(labels, rollout.parts, strict=True):
        inherited = tokens_along(rollout.line(part.parent))
        shown = _segment(rollout, part, label, inherited, decode, training)
        seen[part.role if part.role in seen else ""].append(shown)
    pairs = [PairView(a, b) for a, b in zip(seen["a"], seen["b"], strict=True)]
    return RolloutView(rollout.prompt_id, rollout.prompt.question, title, pairs, seen[""])


def _segment(
    rollout: Rollout, part: Part, label: str, inherited: TokenIds, decode: Decode, training: Training
) -> SegmentView:
    gold = rollout.prompt.gold if rollout.prompt.grader == MATH else ""  # of other graders no one answer
    return SegmentView(
        label=label,
        before=decode(inherited[-CONTEXT_TOKENS:]),
        text=_text(part, decode),
        length=len(part),
        inherited=len(inherited),
        end=part.finish_reason or "continues",
        **training.of(part)._asdict(),
        verdict="" if part.grade is None else _verdict(part.grade, gold),
        versions=_versions(part),
    )


def _text(part: Part, decode: Decode) -> str:
    """Return the text of a part; what an environment gave stands between brackets."""
    if len(part) == len(part.tokens):
        return decode(part.token_ids)
    generated = part.tokens.is_generated
    changes = np.flatnonzero(np.diff(generated)) + 1
    runs = np.split(part.token_ids, changes)
    own = generated[[0, *changes.tolist()]]
    return "".join(decode(run) if mine else f"⟦{decode(run)}⟧" for run, mine in zip(runs, own, strict=True))


def _verdict(grade: Grade, gold: str) -> str:
    """Format the verdict: ``correct: 7``, ``wrong: 8 (gold: 7)``, ``no_answer (gold: 7)``."""
    answer = "" if grade.answer is None else f": {grade.answer}"
    beside = f" (gold: {gold})" if gold and grade.verdict != "correct" else ""
    return f"{grade.verdict}{answer}{beside}"


def _versions(part: Part) -> tuple[int, ...]:
    """Return the policy versions that sampled a part, in order."""
    if "versions" not in part.tokens or not len(part):
        return ()
    distinct = dict.fromkeys(part.tokens["versions"].tolist())
    return tuple(version for version in distinct if version != VERSIONS.unknown)

"""Rollouts in readable form, for pages and ``eqlen inspect``: text, rewards, and their part in training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Literal, NamedTuple

from megatron_eqlen.job import Job
from megatron_eqlen.objectives.build import weighted_units
from megatron_eqlen.objectives.dynamic_sampling import trained
from megatron_eqlen.report.format import compact, shorten
from megatron_eqlen.sampling import KINDS
from megatron_eqlen.tokens import VERSIONS
from megatron_eqlen.types import Grade, Node, Part, Rollout

Decode = Callable[[Sequence[int]], str]
Role = Literal["raised", "lowered", "equal", "plain"]
"""Effect of training on the part's probability. ``equal``: no advantage; ``plain``: not compared."""
Use = Literal["trained", "skipped", "not trained", "not scored", ""]
"""``skipped``: compared, with weight 0 (equal rewards). ``not trained``: in no comparison. Empty: unknown."""

SHOWN = 4
"""Number of a step's rollouts that are shown."""
CUT = 4
"""Most tokens that one character is made of."""
FIRST_IDS = 1000
"""Token ids among which a letter or digit is looked for."""


class Lesson(NamedTuple):
    """Effect of training on a part."""

    reward: float | None
    """Reward in its comparison, or the grader's; None if there is none (yet)."""
    advantage: float | None
    """Advantage; None: not compared."""
    role: Role
    use: Use
    node: Node | None = None
    """The node that trained it; None: not compared."""


@dataclass(frozen=True)
class PartView:
    """One side of a pair, a completion, a tail, or a step of a tree."""

    label: str
    """``A1``, ``B1``, ``tail``, ``completion 3``, ``step 2 after step 0``."""
    parent: int
    """Place of the part that it continues, -1 for the prompt."""
    start: int
    """Number of tokens between the prompt and this part."""
    tokens: list[str]
    """Text of each token."""
    own: list[bool]
    """True for each token that the policy generated, False for one that an environment gave."""
    end: str
    """``stop``, ``length`` or ``continues`` (not ended here)."""
    lesson: Lesson
    verdict: str
    """At a response's end: the verdict, the extracted answer and, unless it is correct, the gold one."""
    versions: tuple[int, ...]
    """Policy versions of the weights that sampled it, in order; empty if unknown."""

    @property
    def text(self) -> str:
        """Text of the part; what an environment gave stands between brackets."""
        runs = groupby(zip(self.own, self.tokens, strict=True), key=lambda pair: pair[0])
        texts = [(own, "".join(text for _, text in run)) for own, run in runs]
        return "".join(text if own else f"⟦{text}⟧" for own, text in texts)

    def facts(self) -> list[str]:
        known = {"reward": self.lesson.reward, "advantage": self.lesson.advantage}
        return [
            *(f"{name} {compact(value)}" for name, value in known.items() if value is not None),
            *([shorten(self.verdict)] if self.verdict else []),
            self.end,
            f"{sum(self.own)} tokens",
            *([f"inherits {self.start}"] if self.start else []),
            *([f"policy version {', '.join(map(str, self.versions))}"] if self.versions else []),
            *([self.lesson.use] if self.lesson.use else []),
        ]


@dataclass(frozen=True)
class RolloutView:
    prompt_id: str
    question: str
    title: str
    parts: list[PartView]


class Training:
    """Effects of training on a step's rollouts, by training's own functions; nothing without the job."""

    def __init__(self, rollouts: Sequence[Rollout], job: Job | None) -> None:
        scored = all(part.grade for rollout in rollouts for part, _ in rollout.ended())
        self._other: Use = "" if job is None else "not trained" if scored else "not scored"
        self._lessons: dict[int, Lesson] = {}  # by the id() of the part
        if job is None or not scored:
            return
        for unit in weighted_units(trained(rollouts, job), job):
            members = zip(unit.members, unit.nodes, unit.rewards, unit.advantages, strict=True)
            for part, node, reward, advantage in members:
                use = "trained" if node.weight else "skipped"
                moved: Role = "raised" if advantage > 0 else "lowered"
                role = moved if node.weight and advantage else "equal"
                self._lessons[id(part)] = Lesson(reward, advantage, role, use, node)

    def of(self, part: Part) -> Lesson:
        reward = None if part.grade is None else part.grade.reward
        return self._lessons.get(id(part)) or Lesson(reward, None, "plain", self._other)

    def telling(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Return a few of ``rollouts`` of different prompts, first those with unequal rewards."""
        by_prompt: dict[str, Rollout] = {}
        taught = {id(r): any(self.of(p).role in ("raised", "lowered") for p in r.parts) for r in rollouts}
        for rollout in sorted(rollouts, key=lambda rollout: not taught[id(rollout)]):
            by_prompt.setdefault(rollout.prompt_id, rollout)
        return [*by_prompt.values()][:SHOWN]


def view(rollout: Rollout, decode: Decode, training: Training) -> RolloutView:
    """Return a rollout as text; ``training`` gives the lessons. ``decode``: as ``by_token`` returns it."""
    title, labels = KINDS[rollout.kind].labels(rollout)
    places = {part.number: place for place, part in enumerate(rollout.parts)}
    ends = rollout.along(0, lambda end, part: end + len(part.tokens))
    if len(labels) != (count := len(rollout.parts)):  # of a kind of the user's own
        raise ValueError(f"sampling: {rollout.kind}: labels: expected {count}, one a part, found {labels}")
    gold = rollout.prompt.gold if rollout.prompt.grader == "math" else ""  # of other graders no one answer
    parts = [
        PartView(
            label=label,
            parent=places.get(part.parent, -1),
            start=ends[part.parent],
            tokens=texts_of(part.token_ids.tolist(), decode),
            own=part.tokens.is_generated.tolist(),
            end=part.finish_reason or "continues",
            lesson=training.of(part),
            verdict="" if part.grade is None else _verdict(part.grade, gold),
            versions=_versions(part),
        )
        for label, part in zip(labels, rollout.parts, strict=True)
    ]
    return RolloutView(rollout.prompt_id, rollout.prompt.question, title, parts)


def by_token(decode: Decode) -> Decode:
    """Return ``decode`` for tokens inside of a text: many tokenizers drop the space before its first word."""
    first = next((n for n in range(FIRST_IDS) if decode([n]).isascii() and decode([n]).isalnum()), None)
    head = [] if first is None else [first]
    skipped = len(decode(head))
    return cache(lambda token_ids: decode([*head, *token_ids])[skipped:])


def texts_of(token_ids: list[int], decode: Decode) -> list[str]:
    """Return the text of each token. A character that several tokens make stands at the last of them."""
    texts, cut = list[str](), list[int]()
    for token in token_ids:
        cut.append(token)
        text = decode(tuple(cut))
        # U+FFFD stands for a character whose last bytes are in the next tokens
        whole = not text.endswith("\ufffd") or len(cut) == CUT
        texts.append(text if whole else "")
        cut = [] if whole else cut
    return texts


def _verdict(grade: Grade, gold: str) -> str:
    """Format the verdict: ``correct: 7``, ``wrong: 8 (gold: 7)``, ``no_answer (gold: 7)``."""
    answer = "" if grade.answer is None else f": {grade.answer}"
    beside = f" (gold: {gold})" if gold and grade.verdict != "correct" else ""
    return f"{grade.verdict}{answer}{beside}"


def _versions(part: Part) -> tuple[int, ...]:
    """Return the policy versions that sampled a part, in order."""
    versions = part.tokens["versions"].tolist() if "versions" in part.tokens else ()
    return tuple(version for version in dict.fromkeys(versions) if version != VERSIONS.unknown)

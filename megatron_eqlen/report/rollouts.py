"""Recorded rollouts in readable form: text, rewards, and their part in training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from megatron_eqlen.objectives.build import weighted_units
from megatron_eqlen.objectives.dynamic_sampling import trained
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.recipe.load import RECIPE, load
from megatron_eqlen.report.format import compact, shorten
from megatron_eqlen.rollout.record.reader import step_files
from megatron_eqlen.rollout.record.recorder import FILES
from megatron_eqlen.sampling import KINDS
from megatron_eqlen.tokens import SAMPLED, VERSIONS, Placeholder, TokenIds
from megatron_eqlen.types import Grade, Part, Prompt, Rollout, tokens_along

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
    means: dict[str, float] = field(default_factory=dict)
    """Means over its tokens of the columns that ``rollout.keep_columns`` names."""

    def facts(self) -> list[str]:
        """Facts shown beside its label."""
        known = {"reward": self.reward, "advantage": self.advantage, **self.means}
        return [
            *(f"{name} {compact(value)}" for name, value in known.items() if value is not None),
            *([shorten(self.verdict)] if self.verdict else []),
            self.end,
            f"{self.length} tokens",
            *([f"policy version {', '.join(map(str, self.versions))}"] if self.versions else []),
        ]


@dataclass(frozen=True)
class PairView:
    a: SegmentView
    b: SegmentView


@dataclass(frozen=True)
class RolloutView:
    prompt_id: str
    question: str
    title: str
    pairs: list[PairView] = field(default_factory=list)
    segments: list[SegmentView] = field(default_factory=list)
    """Segments outside pairs."""

    def all_segments(self) -> list[SegmentView]:
        return [*(side for pair in self.pairs for side in (pair.a, pair.b)), *self.segments]


def recorded_steps(streams: Path) -> Iterator[tuple[str, list[Path]]]:
    """Yield (name, files) of a ``.arrow`` file, of one step's folder, or of the steps of a ``streams/``
    folder.

    Raises ValueError naming the path if there are none.
    """
    if streams.is_file():
        yield streams.name, [streams]
        return
    folders = [streams] if any(streams.glob(FILES)) else sorted(streams.glob("step-*"))
    steps = ((folder.name, files) for folder in folders if (files := step_files(folder)))
    first = next(steps, None)
    if first is None:
        kind = "neither" if streams.is_dir() else "no such file or folder"
        raise ValueError(
            f"{streams}: expected a .arrow file, or a folder with {FILES} or step-*/{FILES}, found {kind}"
        )
    yield first
    yield from steps


def recipe_of(streams: Path) -> Recipe | None:
    """Return the recipe of the run or harvest that recorded ``streams`` (as for ``recorded_steps``).

    The recipe lies beside the steps, or beside the folder ``streams/`` that holds them.
    """
    here = streams.resolve()
    for folder in (here, *here.parents):
        recorded = (folder / "streams").is_dir() or any(folder.glob(f"step-*/{FILES}"))
        if recorded and (folder / RECIPE).is_file():
            return load(folder / RECIPE)
    return None


class Training:
    """Effects of training on a step's ``rollouts``, found with the functions of training itself and the run's
    recipe. Skeletons suffice."""

    def __init__(self, rollouts: Sequence[Rollout], recipe: Recipe) -> None:
        self.scored = all(part.grade for rollout in rollouts for part, _ in rollout.ended())
        self.members: dict[int, Lesson] = {}
        """Lessons by the ``id()`` of the part."""
        if self.scored:
            self._compare(rollouts, recipe)

    def of(self, part: Part) -> Lesson:
        use = "not trained" if self.scored else "not scored"
        return self.members.get(id(part)) or Lesson(_own_reward(part), None, "plain", use)

    def _compare(self, rollouts: Sequence[Rollout], recipe: Recipe) -> None:
        for unit in weighted_units(trained(rollouts, recipe), recipe):
            members = zip(unit.members, unit.nodes, unit.rewards, unit.advantages, strict=True)
            for part, node, reward, advantage in members:
                use = "trained" if node.weight else "skipped"
                self.members[id(part)] = Lesson(reward, advantage, _role(node.weight, advantage), use)


class Unknown:
    """Used instead of ``Training`` if the recipe is not known."""

    def of(self, part: Part) -> Lesson:
        return Lesson(_own_reward(part), None, "plain", "")


def _role(weight: float, advantage: float) -> Role:
    if not weight or not advantage:
        return "equal"
    return "raised" if advantage > 0 else "lowered"


class LabeledPart(NamedTuple):
    """A part with its label."""

    label: str
    """``A1``, ``B1``, ``tail``, ``completion 3``, ``step 2 after step 0``."""
    part: Part
    inherited: TokenIds
    """Token ids between the prompt and the part."""


def labeled_parts(rollout: Rollout) -> tuple[str, list[LabeledPart]]:
    """Return a rollout's title and its parts."""
    title, labels = KINDS[rollout.kind].labels(rollout)
    return title, [
        LabeledPart(label, part, tokens_along(rollout.line(part.parent)))
        for label, part in zip(labels, rollout.parts, strict=True)
    ]


def view(rollout: Rollout, decode: Decode, training: Training | Unknown) -> RolloutView:
    """Return a rollout as text; ``training`` gives the lessons."""
    title, parts = labeled_parts(rollout)
    gold = gold_answer(rollout.prompt)
    seen = {role: list[SegmentView]() for role in ("a", "b", "")}
    for placed in parts:
        role = placed.part.role if placed.part.role in seen else ""
        seen[role].append(_segment(placed, decode, training, gold))
    return RolloutView(
        rollout.prompt_id,
        rollout.prompt.question,
        title,
        [PairView(a, b) for a, b in zip(seen["a"], seen["b"], strict=True)],
        seen[""],
    )


def gold_answer(prompt: Prompt) -> str:
    """Return the gold answer; empty if that is not one answer, as for programs."""
    return prompt.gold if prompt.grader == MATH else ""


def _verdict(grade: Grade, gold: str) -> str:
    """Format the verdict: ``correct: 7``, ``wrong: 8 (gold: 7)``, ``no_answer (gold: 7)``."""
    answer = "" if grade.answer is None else f": {grade.answer}"
    beside = f" (gold: {gold})" if gold and grade.verdict != "correct" else ""
    return f"{grade.verdict}{answer}{beside}"


def _segment(
    placed: LabeledPart, decode: Decode, training: Training | Unknown, gold: str = ""
) -> SegmentView:
    part, grade = placed.part, placed.part.grade
    return SegmentView(
        label=placed.label,
        before=decode(placed.inherited[-CONTEXT_TOKENS:]),
        text=decode(part.token_ids),
        length=len(part),
        inherited=len(placed.inherited),
        end=part.finish_reason or "continues",
        **training.of(part)._asdict(),
        verdict="" if grade is None else _verdict(grade, gold),
        versions=_versions(part),
        means=_means(part),
    )


def _versions(part: Part) -> tuple[int, ...]:
    """Return the policy versions that sampled a part, in order."""
    if "versions" not in part.tokens or not len(part):
        return ()
    distinct = dict.fromkeys(part.tokens["versions"].tolist())
    return tuple(version for version in distinct if version != VERSIONS.unknown)


def _means(part: Part) -> dict[str, float]:
    known = {name: part.tokens[name] for name in SAMPLED if name in part.tokens and len(part)}
    return {name: float(v.mean()) for name, v in known.items() if not isinstance(v, Placeholder)}


def _own_reward(part: Part) -> float | None:
    return None if part.grade is None else part.grade.reward

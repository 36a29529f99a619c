"""Probes of a run: its recorded rollouts, continued by the weights that sampled them (``sampling.probe``).

    RUN/probes/step-00000012/    of step 12, or --out
        probe.json, probe.html   what was asked, and what was found (report/probe.py)
        recorded                 the step's record, if environments saved states there
        weights/                 a run that stops where the weights are those of the step, with its export
        step-00000011/           the record: rollouts of kind ``tree`` with parts of role ``probe``

Weights are those of a checkpoint of the run, or made again: its recorded steps are trained anew from the
newest checkpoint before, or from the start, which gives the same bits.
"""

from __future__ import annotations

import contextlib
import random
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron_eqlen.data.prompts import PromptSource
from megatron_eqlen.environments.conversation import STATES
from megatron_eqlen.files import expecting, read_json, remove_partial, step_folders, step_name, write_json
from megatron_eqlen.harvest.harvest_plan import HarvestPlan
from megatron_eqlen.hf.folder import HFFolder
from megatron_eqlen.hf.tokenizer import THINKING
from megatron_eqlen.job import Job
from megatron_eqlen.models import checkpoint_folder
from megatron_eqlen.processes import distributed
from megatron_eqlen.processes.hold import Hold
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.record.reader import read_step, scored_steps
from megatron_eqlen.record.replayed import check_steps
from megatron_eqlen.report.metrics import FILE as METRICS
from megatron_eqlen.report.metrics import Columns
from megatron_eqlen.report.page import write_probe_page
from megatron_eqlen.report.probe import FILE, FOUND, LineKey, look
from megatron_eqlen.report.rollouts import Decode, by_token, texts_of
from megatron_eqlen.rewards.scoring import leave_out
from megatron_eqlen.run.generation import Generator
from megatron_eqlen.run.session import Session
from megatron_eqlen.run.step import Step
from megatron_eqlen.sampling.harvester import Marker
from megatron_eqlen.sampling.kind import plural
from megatron_eqlen.sampling.probe import SEEDS, TRACKS, Places, ProbeSampling
from megatron_eqlen.tokens import ROUTES
from megatron_eqlen.types import Line, Prompt, Rollout, RolloutKey, rollout_key, tokens_along

SENTENCE = re.compile(r"[.!?:;]+[\"')\]]*(?=\s)|[。！？：；]+[\"')\]”’」』）]*|\n+")
"""End of a sentence, or of a line."""

USUAL = 4
"""Tokens of a probe over those of its step, without --budget."""


class ProbeError(ValueError):
    """A question about a run that no probe can answer."""


@dataclass(frozen=True)
class Asked:
    """Question of a user about a run: the options of ``eqlen probe``."""

    run: Path
    step: int
    """Counted from 1, as reports count."""
    at: str = "sentences"
    """Places: ``sentences``, ``forks``, ``every:16`` or ``10,20`` (generated tokens of a response)."""
    samples: int = 8
    budget: int | None = None
    """Tokens that may be generated, as far as can be told before; None: ``USUAL`` times the step's."""
    seed: int = 0
    force: str | None = None
    """Text that is put in at each place, where the policy's turn does not have its end marker yet."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"sentences|forks|every:[1-9]\d*|\d+(,\d+)*", self.at):
            raise ProbeError(
                f"--at: expected sentences, forks, every:TOKENS, or tokens as 10,20, found {self.at!r}"
            )
        if self.force is not None and not self.at[-1].isdigit():
            raise ProbeError(
                f"--at: with --force expected every:TOKENS, or tokens as 10,20, found {self.at!r}"
            )
        if self.samples < 2:
            raise ProbeError(f"--samples: expected 2 or more for an interval, found {self.samples}")
        if not 0 <= self.seed < SEEDS:
            raise ProbeError(f"--seed: expected 0 to {SEEDS - 1}, found {self.seed}")


class Place(NamedTuple):
    """A place of a response."""

    part: int
    stop: int
    """Tokens of the part before it."""
    length: int
    """Tokens of the response before it."""
    left: int
    """Tokens that a continuation is expected to have: as many as the response had from there, or behind its
    end marker where that is forced."""


@dataclass(frozen=True)
class Chosen:
    """Responses that are continued, and their places."""

    places: dict[RolloutKey, Places]
    responses: dict[LineKey, list[int]]
    """Lengths of each response before its places."""
    expected: int
    """Tokens that the continuations are expected to have."""

    @property
    def count(self) -> int:
        """Number of places."""
        return sum(len(stops) for places in self.places.values() for stops in places.values())


@dataclass(frozen=True)
class Target:
    """A step of a run, its recorded rollouts, and the places of those that are probed."""

    job: Job
    asked: Asked

    @property
    def streams(self) -> Path:
        inner = self.asked.run / "streams"
        return inner if inner.is_dir() else self.asked.run  # of `eqlen harvest`

    @cached_property
    def rollouts(self) -> list[Rollout]:
        """The step's rollouts. Raises ProbeError if there is none, or if different weights sampled them."""
        folder = self.streams / step_name(self.asked.step - 1)
        recorded = [number + 1 for number, _ in scored_steps(self.streams)]
        if self.asked.step not in recorded:
            nearest = min(recorded, key=lambda step: abs(step - self.asked.step), default=0)
            kept = recorded and f"{len(recorded)} of {recorded[0]} to {recorded[-1]}, nearest {nearest}"
            raise ProbeError(
                f"--step: expected a graded step that {self.streams} holds ({kept or 'none'}), "
                f"found {self.asked.step}"
            )
        whole = [rollout for rollout in read_step(folder, without=[ROUTES.name]) if not rollout.suspended]
        if without := [r.prompt_id for r in whole for part, _ in r.ended() if part.grade is None]:
            raise ProbeError(f"{folder}: expected grades of all responses, found none of {without[0]}'s")
        found, _ = leave_out(whole, self.job.recipe.reward)
        versions = {int(v) for r in found for part in r.parts for v in np.unique(part.tokens["versions"])}
        if not found:
            raise ProbeError(f"{folder}: expected rollouts that have ended, found none")
        if len(versions) > 1:
            raise ProbeError(
                f"{folder}: expected rollouts of one policy, found versions {sorted(versions)} of its "
                "weights: with rollout.carry_over or rollout.staleness no one policy continues them"
            )
        return found

    @cached_property
    def decode(self) -> Decode:
        return by_token(self.job.tokenizer.decode)

    @property
    def version(self) -> int:
        return int(self.rollouts[0].parts[0].tokens["versions"][0])

    @cached_property
    def steps(self) -> int:
        """Number of steps whose training made the weights that sampled the rollouts."""
        columns = Columns(self.asked.run, ["train/updates"])
        known, wanted = columns.steps[: self.asked.step - 1].tolist(), [*range(1, self.asked.step)]
        if known != wanted:
            missing = next(step for step in wanted if step not in known)
            raise ProbeError(
                f"{self.asked.run / METRICS}: expected the updates of all steps before step "
                f"{self.asked.step}, which made its weights, found no step {missing}"
            )
        made = np.append(0, np.cumsum(columns["train/updates"][: len(wanted)])).astype(int)
        if self.version not in made:
            raise ProbeError(
                f"{self.asked.run}: no step's training ends with version {self.version} of the weights"
            )
        return int(np.flatnonzero(made == self.version)[-1])

    @property
    def budget(self) -> int:
        generated = sum(len(part) for rollout in self.rollouts for part in rollout.parts)
        return USUAL * generated if self.asked.budget is None else self.asked.budget

    @cached_property
    def chosen(self) -> Chosen:
        """Responses drawn at random until the budget is used up, one at least."""
        lines = [
            (rollout, line)
            for rollout in self.rollouts
            for line in rollout.lines()
            if line.last.finish_reason
        ]
        random.Random(self.asked.seed).shuffle(lines)
        chosen: dict[RolloutKey, dict[int, list[int]]] = {}
        responses, expected = dict[LineKey, list[int]](), 0
        for rollout, line in lines:
            known = chosen.get(rollout_key(rollout), {})
            places = [*self._places(rollout, line)]
            new = [place for place in places if place.stop not in known.get(place.part, ())]
            cost = self.asked.samples * sum(place.left for place in new)
            if chosen and expected + cost > self.budget:
                break
            expected += cost
            responses[*rollout_key(rollout), line.last.number] = [place.length for place in places]
            for place in new:
                known.setdefault(place.part, []).append(place.stop)
            chosen[rollout_key(rollout)] = known
        of_rollouts: dict[RolloutKey, Places] = {
            key: {n: sorted(stops) for n, stops in known.items()} for key, known in chosen.items()
        }
        found = Chosen(of_rollouts, responses, expected)
        if found.count == len(of_rollouts) and self.asked.at.strip("0,"):
            raise ProbeError(
                f"--at {self.asked.at}: expected places in a response, found none in {len(responses)} drawn"
            )
        if found.count * self.asked.samples > TRACKS:
            raise ProbeError(f"--samples, --budget: expected at most {TRACKS} continuations, found more")
        return found

    def cost(self) -> str:
        """Return what the probe will cost. Raises ReplayError if a step to train again is gone."""
        count, expected = self.chosen.count, self.chosen.expected
        known = Columns(self.asked.run, ["harvest/tokens_per_second", "time/train"])
        at = known["harvest/tokens_per_second"][known.steps == self.asked.step]
        seconds = f", {expected / at[0]:.0f} s at its speed without the start" if at.sum() > 0 else ""
        over = " (more than --budget: one response at least)" * (expected > self.budget)
        trained = self.steps - max((n for n, _ in self._checkpoints), default=0)
        if trained:
            check_steps(self.streams, self.steps - trained, self.steps)
        training = known["time/train"][(known.steps > self.steps - trained) & (known.steps <= self.steps)]
        again = f"; no checkpoint has these weights: {plural(trained, 'step')} trained again"
        again = f"{again}, {np.nansum(training):.0f} s" * (trained > 0)
        what = f"{plural(len(self.chosen.responses), 'response')}, {plural(count, 'place')}"
        return (
            f"step {self.asked.step}: {what} x {self.asked.samples} continuations, about {expected:,} "
            f"tokens{over}{seconds}{again}"
        )

    @property
    def _checkpoints(self) -> list[tuple[int, Path]]:
        """Checkpoints of the run that are not after the step's weights."""
        return [(n, path) for n, path in step_folders(self.asked.run / "checkpoints") if n <= self.steps]

    @cached_property
    def forced(self) -> list[int]:
        """Tokens of ``force``, none without it. Raises ValueError for text that no response can contain."""
        if (text := self.asked.force) is None:
            return []
        Marker.of(text, self.job.tokenizer, "--force")
        forced, most = self.job.tokenizer.encode(text), self.job.recipe.rollout.max_response_length
        if not 0 < len(forced) < most:
            raise ProbeError(f"--force {text!r}: expected 1 to {most - 1} tokens, found {len(forced)}")
        return forced

    @property
    def marker(self) -> str | None:
        """End marker: ``</think>`` or the recipe's marker, if ``force`` has it, else all of ``force``."""
        force, known = self.asked.force, (THINKING[1], self.job.recipe.tree_sampling.marker)
        return next((marker for marker in known if force and marker and marker in force), force)

    def _places(self, rollout: Rollout, line: Line) -> Iterator[Place]:
        """Yield the places of a response. With ``force`` the text of a turn before a place lacks the marker,
        and the limit leaves room for an answer."""
        at, parts = self.asked.at, rollout.line(line.last.number)
        ends = np.cumsum([len(part) for part in parts]).tolist()
        generated = np.concatenate([part.tokens.is_generated for part in parts])
        is_open, closed = [True] * line.length, line.length
        if (marker := self.marker) is not None:
            texts = texts_of(tokens_along(parts).tolist(), self.decode)
            is_open = before_marker(texts, generated, marker)
            closed = [*is_open, False].index(False)
            del is_open[min(line.length, self.job.recipe.rollout.max_response_length - len(self.forced)) :]

        def place(part: int, stop: int, length: int) -> Place:
            return Place(part, stop, length, line.length - (closed if closed < line.length else length))

        yield place(-1, 0, 0)
        if at == "sentences":
            after = np.array(ends_of_sentences(tokens_along(parts).tolist(), self.decode), int) - 1
            lengths = generated.cumsum()[after[generated[after]]].tolist()
        elif at == "forks":
            lengths = ends
        elif at.startswith("every:"):
            every = int(at.removeprefix("every:"))
            lengths = range(every, line.length, every)
        else:
            lengths = sorted({int(place) for place in at.split(",")})
        for part, end in zip(parts, ends, strict=True):
            inside = [
                length
                for length in lengths
                if end - len(part) < length <= end and length < len(is_open) and is_open[length]
            ]
            yield from (place(part.number, length - end + len(part), length) for length in inside)

    def weights(self, out: Path) -> Path:
        """Return the folder of the weights that sampled the rollouts, which may have to be made."""
        return out / "weights/export" if self.steps else self.job.folder

    def training(self, out: Path) -> Job:
        """Return the run whose export is ``weights``."""
        return Job(self._apart(self.job.recipe, out / "weights"))

    def prepare(self, out: Path) -> None:
        """Write what is asked to ``out``, and copy the newest checkpoint from which the weights can be made.
        Raises ProbeError for a folder with another probe, or with something else."""
        asked = asdict(self.asked) | {"run": str(self.asked.run.resolve())}
        file, begun = out / FILE, {"recorded", "weights"}  # by an attempt that was cut off here
        out.mkdir(parents=True, exist_ok=True)
        other = sorted(path.name for path in out.iterdir() if path.name not in begun and path.name[0] != ".")
        if other and not file.exists():
            raise ProbeError(f"--out {out}: expected {FILE} or an empty folder, found {other[0]}")
        with contextlib.closing(Hold(out)):
            if file.exists():
                with expecting("what eqlen probe writes", file):
                    before = {**read_json(file)["asked"]}
                if differs := [key for key in asked if before.get(key) != asked[key]]:
                    key = differs[0]
                    raise ProbeError(
                        f"--out {out}: holds another probe ({key}: {before.get(key)!r} -> {asked[key]!r})"
                    )
                return
            recorded = self.streams / step_name(self.asked.step - 1)
            if (recorded / STATES).is_dir():  # where environments in mid-turn take up their states
                (out / "recorded").unlink(missing_ok=True)
                (out / "recorded").symlink_to(recorded.resolve())
            if self.steps and self._checkpoints:
                remove_partial(out / "weights/checkpoints")
                checkpoint_folder.copy(self._checkpoints[-1][1], out / "weights/checkpoints")
                shutil.copy(self.asked.run / METRICS, out / "weights")
            write_json(file, {"asked": asked})

    @staticmethod
    def _apart(recipe: Recipe, folder: Path) -> Recipe:
        """Return the recipe of a run of its own, without evaluations."""
        return recipe.model_copy(
            update={
                "run_dir": str(folder),
                "evaluation": recipe.evaluation.model_copy(update={"benchmarks": [], "every": 0}),
                "report": recipe.report.model_copy(update={"keep_streams": "all"}),
            }
        )

    def sampling(self, out: Path) -> Job:
        """Return the job of the continuations: the run's sampling, limits, environments and graders."""
        recipe = self._apart(self.job.recipe, out)
        rollout = {"tokens_per_step": None, "carry_over": False, "keep_routes": False, "staleness": 0}
        path = {"path": str(self.weights(out)), "revision": None} if self.steps else {}
        return Job(
            recipe.model_copy(
                update={
                    "model": recipe.model.model_copy(update=path),
                    "rollout": recipe.rollout.model_copy(update=rollout),
                    "loss": recipe.loss.model_copy(update={"dynamic_sampling": False}),
                    "teacher": recipe.teacher.model_copy(update={"path": "", "url": ""}),
                }
            )
        )


def ends_of_sentences(token_ids: list[int], decode: Decode) -> list[int]:
    """Return after how many tokens a sentence or a line ends."""
    texts = texts_of(token_ids, decode)
    ends = [found.end() for found in SENTENCE.finditer("".join(texts))]
    return (np.unique(np.searchsorted(np.cumsum([len(text) for text in texts]), ends)) + 1).tolist()


def before_marker(texts: Sequence[str], generated: Sequence[bool] | np.ndarray, marker: str) -> list[bool]:
    """Return for each number of generated tokens, from 0 on: True if the policy's turn lacks ``marker`` in
    these. ``texts``: of all tokens; another turn begins after those that an environment gave."""
    is_open, tail = [True], ""
    for text, own in zip(texts, generated, strict=True):
        if own:
            tail = (tail + text)[-len(marker) - len(text) :]
            is_open.append(is_open[-1] and marker not in tail)
        else:
            is_open[-1], tail = True, ""
    return is_open


class _Continuations(Generator):
    """Continues recorded rollouts with weights of ``version``."""

    def __init__(self, session: Session, out: Path, kind: ProbeSampling, version: int) -> None:
        served = session.recipe.rollout.engine == "server" and version > 0
        super().__init__(session, out, synced=served)
        self.kind, self.placed = kind, None
        if served:  # servers hold the weights of their start, or of a sync
            folder = HFFolder(session.job.folder)
            self.engine.wake()
            self.engine.update_weights(((name, folder.tensor(name)) for name in folder.entries), version)
        else:
            self.engine.policy_version = version  # pyright: ignore[reportAttributeAccessIssue]  of each engine

    def start_prompts(self) -> PromptSource | None:
        return None

    def prompts(self, step: Step) -> list[Prompt]:
        return [] if step.batches else self.kind.prompts

    def _plan(self, step: Step, prompts: list[Prompt]) -> HarvestPlan:
        return replace(super()._plan(step, prompts), kind=self.kind)


def probe(target: Target, out: Path) -> None:
    """Continue the step's rollouts with the weights there, and write and print what the continuations say of
    them. A probe that was cut off is completed."""
    with Session(target.sampling(out)) as session:
        hold = Hold(out) if distributed.is_rank0() else None
        asked, chosen = target.asked, target.chosen
        kind = ProbeSampling(target.rollouts, chosen.places, asked.samples, asked.seed, target.forced)
        step = Step(number=asked.step - 1, policy_version=target.version)
        _Continuations(session, out, kind, target.version).collect(step)
        distributed.gather([])  # every rank has written its grades
        if hold is not None:
            hold.check()
            found = look(read_step(out / step.name), target.rollouts, chosen.responses, target.job)
            write_json(out / FILE, read_json(out / FILE) | {FOUND: found.as_json(target.decode)})
            session.progress.say(found.text(target.decode))
            page = write_probe_page(out / "probe.html", asked.step, found, target.job.recipe, target.decode)
            session.progress.say(f"see {page}")

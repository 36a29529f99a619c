"""Probes of a run: its recorded rollouts, continued by the weights that sampled them (``sampling.probe``).

    RUN/probes/step-00000012/    of step 12, or --out
        probe.json, probe.html   what was asked, and what was found (report/probe.py)
        recorded                 the step's record, if environments saved states there
        weights/                 a run that stops where the weights are those of the step, with its export
        step-00000011/           the record: rollouts of kind ``tree`` with parts of role ``probe``

Weights are a checkpoint's, or made again, with the same bits: by training recorded steps from a checkpoint.
"""

from __future__ import annotations

import contextlib
import random
import re
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from megatron_eqlen import files
from megatron_eqlen.environments.conversation import STATES
from megatron_eqlen.hf.folder import HFFolder
from megatron_eqlen.hf.tokenizer import THINKING
from megatron_eqlen.job import Job
from megatron_eqlen.models import checkpoint_folder
from megatron_eqlen.processes import distributed
from megatron_eqlen.processes.hold import Hold
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.record.reader import read_step, scored_between
from megatron_eqlen.record.replayed import check_steps
from megatron_eqlen.report.metrics import FILE as METRICS
from megatron_eqlen.report.metrics import Columns
from megatron_eqlen.report.page import write_probe_page
from megatron_eqlen.report.probe import FILE, FOUND, as_json, look, tables
from megatron_eqlen.report.rollouts import Decode, by_token, texts_of
from megatron_eqlen.rewards.measured import leave_out
from megatron_eqlen.run.generation import OneHarvest
from megatron_eqlen.run.session import Session
from megatron_eqlen.run.step import Step
from megatron_eqlen.sampling.harvester import Marker
from megatron_eqlen.sampling.kind import plural
from megatron_eqlen.sampling.probe import SEEDS, TRACKS, Place, ProbeSampling
from megatron_eqlen.tokens import ROUTES
from megatron_eqlen.types import Line, Rollout, RolloutKey, tokens_along

# ends `so x = 2.")` where a space follows, `所以 x = 2。` before anything, and each run of line breaks
SENTENCE = re.compile(r"[.!?:;]+[\"')\]]*(?=\s)|[。！？：；]+[\"')\]”’」』）]*|\n+")
"""End of a sentence, or of a line."""


@dataclass(frozen=True)
class ProbeOptions:
    """Options of ``eqlen probe``."""

    run: Path
    step: int
    """Counted from 1, as reports count."""
    at: str = "sentences"
    """Places: ``sentences``, ``forks``, ``every:16`` or ``10,20`` (generated tokens of a response)."""
    samples: int = 8
    budget: int | None = None
    """Most tokens that the probe is expected to generate; None: four times the step's."""
    seed: int = 0
    force: str | None = None
    """Text to insert at each place where the policy's turn does not have its end marker yet."""

    def __post_init__(self) -> None:
        tokens = "every:TOKENS, or tokens as 10,20"
        is_known = re.fullmatch(r"sentences|forks|every:[1-9]\d*|\d+(,\d+)*", self.at)
        for fits, expected, found in (
            (is_known, f"at: expected sentences, forks, {tokens}", self.at),
            (self.force is None or self.at[-1:].isdigit(), f"at: with --force expected {tokens}", self.at),
            (self.samples >= 2, "samples: expected 2 or more for an interval", self.samples),
            (0 <= self.seed < SEEDS, f"seed: expected 0 to {SEEDS - 1}", self.seed),
        ):
            if not fits:
                raise ValueError(f"--{expected}, found {found!r}")


@dataclass(frozen=True)
class Target:
    """Places in the recorded rollouts of a run's step to be probed, and the weights that sampled them."""

    job: Job
    options: ProbeOptions

    @property
    def streams(self) -> Path:
        return files.streams_of(self.options.run)

    @cached_property
    def rollouts(self) -> list[Rollout]:
        """The step's rollouts. Raises ValueError if there is none, or if different weights sampled them."""
        (folder,) = scored_between(self.streams, self.options.step, self.options.step)
        # the step that completes a suspended rollout records it whole
        whole = [rollout for rollout in read_step(folder, without=[ROUTES.name]) if not rollout.suspended]
        if without := [r.prompt_id for r in whole for part, _ in r.ended() if part.grade is None]:
            raise ValueError(f"{folder}: expected grades of all responses, found none of {without[0]}'s")
        # training leaves out the same ones
        found, _ = leave_out(whole, self.job.recipe.reward)
        versions = {int(v) for r in found for part in r.parts for v in np.unique(part.tokens["versions"])}
        if not found:
            raise ValueError(f"{folder}: expected rollouts that have ended, found none")
        if len(versions) > 1:
            found = f"expected rollouts of one policy, found versions {sorted(versions)} of its weights"
            why = "with rollout.carry_over or rollout.staleness no one policy continues them"
            raise ValueError(f"{folder}: {found}: {why}")
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
        columns, before = Columns(self.options.run, ["train/updates"]), self.options.step - 1
        if missing := {*range(1, before + 1)} - {*columns.steps.tolist()}:
            needed = f"the updates of all steps before step {self.options.step}, which made its weights"
            found = f"no step {min(missing)}"
            raise ValueError(f"{self.options.run / METRICS}: expected {needed}, found {found}")
        # [steps + 1] policy version after each number of steps; one that skips its update repeats it
        made = np.append(0, np.cumsum(columns["train/updates"][:before]))
        if self.version not in made:
            raise ValueError(f"{self.options.run}: no training made version {self.version} of the weights")
        return int(np.flatnonzero(made == self.version)[-1])

    @cached_property
    def budget(self) -> int:
        generated = sum(len(part) for rollout in self.rollouts for part in rollout.parts)
        return 4 * generated if self.options.budget is None else self.options.budget

    @cached_property
    def kind(self) -> ProbeSampling:
        """Continues responses drawn at random until the budget is used up, one at least."""
        options = self.options
        # responses in random order, each with all its places
        drawn = [(r, line) for r in self.rollouts for line in r.lines() if line.last.finish_reason]
        order = [*enumerate(drawn)]
        random.Random(options.seed).shuffle(order)
        chosen, places, expected = list[int](), dict[RolloutKey, dict[Place, int]](), 0
        for n, (rollout, line) in order:
            # lines share prefixes: a place that an earlier one has brought costs nothing more
            known = places.get(key := rollout.key, {})
            more = self._places(rollout, line) | known
            cost = options.samples * (sum(more.values()) - sum(known.values()))
            if chosen and expected + cost > self.budget:
                break
            chosen.append(n)
            places[key], expected = more, expected + cost
        count = sum(map(len, places.values()))
        # every response has the place at its prompt: one place each is none of those asked for
        if count == len(places) and options.at.strip("0,"):
            raise ValueError(f"--at {options.at}: expected places, found none in {len(chosen)} responses")
        if count * options.samples > TRACKS:
            raise ValueError(f"--samples, --budget: expected at most {TRACKS} continuations, found more")
        # in the record's order again
        responses = [drawn[n] for n in sorted(chosen)]
        return ProbeSampling(self.rollouts, responses, places, options.samples, options.seed, self.forced)

    def cost(self) -> str:
        """Return what the probe will cost. Raises ReplayError if a step to train again is gone."""
        options, responses = self.options, plural(len(self.kind.responses), "response")
        known = Columns(options.run, ["harvest/tokens_per_second", "time/train"])
        lengths = [length for places in self.kind.places.values() for length in places.values()]
        places, expected = plural(len(lengths), "place"), options.samples * sum(lengths)
        told = f"{responses}, {places} x {options.samples} continuations, about {expected:,} tokens"
        if expected > self.budget:
            told += " (more than --budget: one response at least)"
        # the run's own speed in that step, so on the same machine and at the same lengths
        speed = known["harvest/tokens_per_second"][known.steps == options.step]
        if speed.sum() > 0:
            told += f", {expected / speed[0]:.0f} s at its speed without the start"
        # without a checkpoint of these weights, steps from the newest one before are trained again
        first = max((n for n, _ in self.checkpoints), default=0)
        if first < self.steps:
            check_steps(self.streams, first, self.steps)
            seconds = np.nansum(known["time/train"][(known.steps > first) & (known.steps <= self.steps)])
            again = plural(self.steps - first, "step")
            told += f"; no checkpoint has these weights: {again} trained again, {seconds:.0f} s"
        return f"step {options.step}: {told}"

    @property
    def checkpoints(self) -> list[tuple[int, Path]]:
        """Checkpoints of the run that are not after the step's weights."""
        kept = files.step_folders(self.options.run / "checkpoints")
        return [(n, path) for n, path in kept if n <= self.steps]

    @cached_property
    def forced(self) -> list[int]:
        """Tokens of ``force``, none without it. Raises ValueError for text that no response can contain."""
        if (text := self.options.force) is None:
            return []
        Marker.of(text, self.job.tokenizer, "--force")
        # It stands within a response, and begins with no space that a tokenizer puts before a text.
        forced = self.job.tokenizer.encode(text, after="\n")
        most = self.job.recipe.rollout.max_response_length
        if not 0 < len(forced) < most:
            raise ValueError(f"--force {text!r}: expected 1 to {most - 1} tokens, found {len(forced)}")
        return forced

    @property
    def marker(self) -> str | None:
        """End marker: ``</think>`` or the recipe's marker, if ``force`` has it, else all of ``force``."""
        force, known = self.options.force, (THINKING[1], self.job.recipe.tree_sampling.marker)
        return next((marker for marker in known if force and marker and marker in force), force)

    def _places(self, rollout: Rollout, line: Line) -> dict[Place, int]:
        """Return the places of a response, each with the expected tokens of a continuation: as many as the
        response had from there, or behind its end marker where that is forced. With ``force``, text of the
        turn before a place lacks the marker, and the limit leaves room for an answer."""
        # places are lengths in generated tokens, so an environment's tokens must not count
        at, parts = self.options.at, rollout.line(line.last.number)
        token_ids, ends = tokens_along(parts).tolist(), np.cumsum([0, *map(len, parts)])
        generated = np.concatenate([part.tokens.is_generated for part in parts])
        if at == "sentences":
            # tokens that end a sentence, except those of the environment
            after = np.array(ends_of_sentences(token_ids, self.decode), int) - 1
            lengths = generated.cumsum()[after[generated[after]]].tolist()
        elif at == "forks":
            lengths = ends.tolist()
        elif at.startswith("every:"):
            every = int(at.removeprefix("every:"))
            lengths = range(every, line.length, every)
        else:
            lengths = map(int, at.split(","))
        room = min(line.length, self.job.recipe.rollout.max_response_length - len(self.forced))
        is_open = [True] * line.length
        if (marker := self.marker) is not None:
            is_open = before_marker(texts_of(token_ids, self.decode), generated, marker)[: line.length]
        # behind forced text a continuation has what the response had behind its own end marker
        thought = 0 if all(is_open) else line.length - is_open.index(False)
        # a place at the end of a part belongs to this part, not to the next one; 0 is the prompt's end
        numbers = [-1, *(part.number for part in parts)]
        return {
            (numbers[ends.searchsorted(length)], length): thought or line.length - length
            for length in {0, *lengths}
            if length < room and is_open[length]
        }


@dataclass(frozen=True)
class ProbeFolder:
    """Folder of a probe, with the jobs that write there."""

    target: Target
    out: Path

    @property
    def weights(self) -> Path:
        """Folder of the weights that sampled the rollouts, which may have to be made."""
        return self.out / "weights/export" if self.target.steps else self.target.job.folder

    @property
    def training(self) -> Job:
        """The run whose export is ``weights``."""
        return _apart(self.target.job.recipe, self.out / "weights")

    @property
    def sampling(self) -> Job:
        """The job of the continuations: the run's sampling, limits, environments and graders."""
        # probes train nothing: no budget, no columns for the loss, no selection of prompts
        rollout = {"tokens_per_step": None, "carry_over": False, "keep_routes": False, "staleness": 0}
        model = {"path": str(self.weights), "revision": None} if self.target.steps else {}
        loss, teacher = {"dynamic_sampling": False}, {"path": "", "url": ""}
        recipe = self.target.job.recipe
        return _apart(recipe, self.out, model=model, rollout=rollout, loss=loss, teacher=teacher)

    def prepare(self) -> None:
        """Write the options, and copy the checkpoint. Raises ValueError if the folder has others."""
        target, options, out = self.target, self.target.options, self.out
        asked = asdict(options) | {"run": str(options.run.resolve())}
        file, begun = out / FILE, {"recorded", "weights"}  # by an attempt that was cut off here
        out.mkdir(parents=True, exist_ok=True)
        other = sorted(path.name for path in out.iterdir() if path.name not in begun and path.name[0] != ".")
        if other and not file.exists():
            raise ValueError(f"--out {out}: expected {FILE} or an empty folder, found {other[0]}")
        # two probes that begin at the same time would mix their files
        with contextlib.closing(Hold(out)):
            if file.exists():
                with files.expecting("what eqlen probe writes", file):
                    before = {**files.read_json(file)["asked"]}
                for key, value in asked.items():
                    if (found := before.get(key)) != value:
                        raise ValueError(f"--out {out}: holds another probe ({key}: {found!r} -> {value!r})")
                return
            recorded = target.streams / files.step_name(options.step - 1)
            if (recorded / STATES).is_dir():  # where environments in mid-turn take up their states
                (out / "recorded").unlink(missing_ok=True)
                (out / "recorded").symlink_to(recorded.resolve())
            if target.steps and target.checkpoints:
                files.remove_partial(out / "weights/checkpoints")
                checkpoint_folder.copy(target.checkpoints[-1][1], out / "weights/checkpoints")
                shutil.copyfile(options.run / METRICS, out / "weights" / METRICS)
            # last: from now on the folder is that of this probe
            files.write_json(file, {"asked": asked})


def _apart(recipe: Recipe, folder: Path, **changes: dict[str, Any]) -> Job:
    """Return the job of a run of its own, without evaluations. ``changes``: keys of sections."""
    changes |= {"evaluation": {"benchmarks": [], "every": 0}, "report": {"keep_streams": "all"}}
    sections = {name: getattr(recipe, name).model_copy(update=keys) for name, keys in changes.items()}
    return Job(recipe.model_copy(update=sections | {"run_dir": str(folder)}))


def ends_of_sentences(token_ids: list[int], decode: Decode) -> list[int]:
    """Return after how many tokens a sentence or a line ends."""
    texts = texts_of(token_ids, decode)
    ends = [found.end() for found in SENTENCE.finditer("".join(texts))]
    return (np.unique(np.searchsorted(np.cumsum([len(text) for text in texts]), ends)) + 1).tolist()


def before_marker(texts: Sequence[str], generated: Sequence[bool] | np.ndarray, marker: str) -> list[bool]:
    """Return for each number of generated tokens, from 0 on, True if ``marker`` is not in them since the
    policy's turn began. ``texts``: of all tokens; a turn begins after tokens that an environment gave."""
    is_open, turn = [True], ""
    for text, own in zip(texts, generated, strict=True):
        if own:
            turn += text
            # only text that the newest token may have completed is searched
            is_open.append(is_open[-1] and marker not in turn[-len(marker) - len(text) :])
        else:
            # the turn that follows the environment's tokens begins without the marker
            is_open[-1], turn = True, ""
    return is_open


def probe(folder: ProbeFolder) -> None:
    """Continue the step's rollouts, and write and print the result. A probe that was cut off is completed."""
    target, out = folder.target, folder.out
    with Session(folder.sampling) as session:
        hold = Hold(out) if distributed.is_rank0() else None
        step = Step(number=target.options.step - 1, policy_version=target.version)
        served = session.recipe.rollout.engine == "server" and target.version > 0
        generator = OneHarvest(session, out, target.kind.prompts, target.kind, synced=served)
        if served:  # servers hold the weights of their start, or of a sync
            model = HFFolder(session.job.folder)
            generator.engine.wake()
            weights = ((name, model.tensor(name)) for name in model.entries)
            generator.engine.update_weights(weights, target.version)
        else:
            generator.engine.policy_version = target.version  # pyright: ignore[reportAttributeAccessIssue]  of each
        generator.collect(step)
        distributed.gather([])  # every rank has written its grades
        if hold is not None:
            hold.check()
            found = look(read_step(out / step.name), target.kind, target.job, target.decode)
            files.write_json(out / FILE, files.read_json(out / FILE) | {FOUND: as_json(found)})
            session.progress.say(tables(found))
            page = write_probe_page(out / "probe.html", target.options.step, found, target.job.recipe)
            session.progress.say(f"see {page}")

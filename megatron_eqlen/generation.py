"""Where a step's scored rollouts come from: an engine (or a run's record: ``replay``).

    prompts ─► harvest (this replica's share) ─► score (skeletons of all replicas', graded) ─► Step.add

Prompts are split over the engine replicas for generation, and a replica's rollouts over its ranks for
scoring; afterwards every rank has the rollouts that it graded, and skeletons of all others.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from megatron_eqlen.data.prompts import PromptSource, position_metrics, read_benchmark
from megatron_eqlen.evaluation.evaluate import evaluate
from megatron_eqlen.evaluation.result import EvaluationResult
from megatron_eqlen.files import step_name
from megatron_eqlen.hf.folder import HFFolder
from megatron_eqlen.metrics import ENGINE_PROBE_SECONDS, at_once
from megatron_eqlen.objectives import dynamic_sampling
from megatron_eqlen.objectives.units import taking_part
from megatron_eqlen.recipe import BenchmarkRecipe, Recipe
from megatron_eqlen.replicas import Replicas, shared
from megatron_eqlen.rewards.scoring import reward_metrics
from megatron_eqlen.rollout.carried import Drawn, open_prompts, recall, take_up
from megatron_eqlen.rollout.engine import Engine, IdleEngine
from megatron_eqlen.rollout.harvest import harvest, harvest_seed
from megatron_eqlen.rollout.record_reader import (
    left_files,
    read_left,
    read_prompts,
    read_skeletons,
    remove_journals,
    set_aside_stale,
    step_files,
)
from megatron_eqlen.rollout.recorder import Recorder, record_grades
from megatron_eqlen.rollout.sync_check import SyncCheck, SyncError
from megatron_eqlen.session import Session
from megatron_eqlen.step import Batch, Step
from megatron_eqlen.training import distributed
from megatron_eqlen.training.agreement import MismatchWatch
from megatron_eqlen.training.distributed import agree, gather
from megatron_eqlen.training.policy import Policy
from megatron_eqlen.types import Metrics, Prompt, RolloutKey, rollout_key

SUSPENDED = "suspended"
"""Key in a data position that holds the rollouts with which the next step goes on."""


def suspended_at(data_position: dict[str, Any] | None) -> dict[RolloutKey, Drawn]:
    """``Rollouts.suspended`` where the data source stands at ``data_position``."""
    found = (data_position or {}).get(SUSPENDED, [])
    return {(prompt_id, index): Drawn(*drawn) for prompt_id, index, *drawn in found}


class Rollouts(Protocol):
    """Where the loop gets its rollouts: a ``Generator``, ``Ahead`` of one, or a ``replay.Replay``."""

    suspended: dict[RolloutKey, Drawn]
    """The rollouts with which the next step goes on (``rollout.carry_over``); the same on every rank."""

    @property
    def benchmarks(self) -> Sequence[BenchmarkRecipe]:
        """The benchmarks that it can evaluate."""
        ...

    def collect(self, step: Step) -> Step:
        """The step with its scored rollouts."""
        ...

    def check(self, first: int) -> None:
        """Raise ValueError if rollouts for the steps from ``first`` (counted from 0) on are not available."""
        ...

    def sleep(self) -> None:
        """Free the accelerator's memory for the trainer."""
        ...

    def update_weights(self, policy: Policy) -> Metrics:
        """Bring the policy's weights to the engine; returns the time it took."""
        ...

    def disagreement(self, mismatch: float | None) -> str | None:
        """What there is to say of the mismatch after a step that had this one (``MismatchWatch.see``)."""
        ...

    def evaluate(self, benchmark: BenchmarkRecipe) -> EvaluationResult: ...

    def go_to(self, data_position: dict[str, Any] | None) -> None:
        """Continue drawing prompts after ``data_position`` (of a checkpoint)."""
        ...


class InTurn(ABC):
    """Collects a step's rollouts when it is asked for them, of as many batches of prompts as it needs."""

    def collect(self, step: Step) -> Step:
        while prompts := self.prompts(step):
            step = step.add(self.score(step, self.harvest(step, prompts)))
        return step

    @abstractmethod
    def prompts(self, step: Step) -> list[Prompt]:
        """The next prompts for ``step``, the same on every rank; an empty list when it has enough."""

    @abstractmethod
    def harvest(self, step: Step, prompts: list[Prompt]) -> Batch:
        """This replica's share of the rollouts of ``prompts``."""

    @abstractmethod
    def score(self, step: Step, harvested: Batch) -> Batch:
        """All replicas' rollouts, graded; with dynamic sampling only those that ``step`` keeps."""


class Generator(InTurn):
    """Rollouts from this rank's engine, recorded under ``streams`` as they complete.

    ``synced``: weights come from a policy before anything is generated; otherwise those at
    ``recipe.model.path`` are used.
    """

    def __init__(self, session: Session, streams: Path, synced: bool = True) -> None:
        self.session, self.recipe, self.streams = session, session.recipe, streams
        self.benchmarks = self.recipe.evaluation.benchmarks
        self.source: PromptSource | None = None
        """On rank 0 only, which draws for all ranks. Gold answers are checked under a time limit, so ranks
        that each drew their own prompts could keep different ones."""
        if distributed.is_rank0():
            self.source = PromptSource(self.recipe.data, session.tokenizer, self.recipe.seed)
            session.ends_with(self.source.close)
        self.engine = start_engine(
            self.recipe, session.tokenizer.eos_token_ids, session.replicas, syncs_first=synced
        )
        session.ends_with(self.engine.close)
        session.watchdog.tells(lambda: {"engine": self.engine.state()})
        self.patience = self.recipe.rollout.request_timeout
        """Seconds after which a silent engine is given up."""
        self.sync_check = SyncCheck()
        self.watch = MismatchWatch(self.recipe.rollout.mismatch)
        self.suspended: dict[RolloutKey, Drawn] = {}
        self.carried: dict[RolloutKey, Drawn] = {}
        """Of ``suspended`` what this step goes on with."""
        self.left: tuple[int | None, list[Path]] = None, []
        """A step's number, and what an attempt at it that was cut short has recorded. What this process
        generates for the step's later prompts needs no reading."""

    # ---- prompts ------------------------------------------------------------------------------------

    def prompts(self, step: Step) -> list[Prompt]:
        """The step's prompts: those of carried rollouts, and so many new ones that as many tracks are open as
        at the beginning of any step. With dynamic sampling, as many again until enough of them have unequal
        rewards, at most ``loss.max_num_gen_batches`` times; not with ``rollout.carry_over``, where suspended
        rollouts would pile up."""
        wanted = self.recipe.data.prompts_per_step
        again = self.session.objective.dynamic_sampling and not self.recipe.rollout.carry_over
        most = self.recipe.loss.max_num_gen_batches if again else 1
        if len(step.batches) >= most or step.prompts >= wanted:
            return []
        if not step.batches:
            self.carried, self.suspended = self.suspended, {}
        return agree(lambda: self._draw(step, {} if step.batches else self.carried, wanted))

    def _draw(self, step: Step, carried: Collection[RolloutKey], wanted: int) -> list[Prompt]:
        """On rank 0: the prompts of ``carried`` rollouts, and as many new ones as their open tracks leave of
        ``wanted``."""
        assert self.source is not None
        prompts: list[Prompt] = []
        if carried:
            names = {prompt_id for prompt_id, _ in carried}
            files = step_files(self.streams / step_name(step.number - 1))
            prompts = [prompt for prompt in read_prompts(files) if prompt.prompt_id in names]
            rollouts = [one for one in read_skeletons(files) if rollout_key(one) in carried]
            wanted -= min(wanted, round(open_prompts(rollouts, self.recipe)))
        return prompts + self.source.next(wanted)

    def go_to(self, data_position: dict[str, Any] | None) -> None:
        if self.source is not None:
            if data_position is None:
                raise ValueError(
                    "the checkpoint was made with --replay and holds no data position: continue with "
                    "--replay, or start a new run from its weights (model.path)"
                )
            self.source.load_state_dict(data_position)
        self.suspended |= suspended_at(data_position)

    # ---- rollouts -----------------------------------------------------------------------------------

    def harvest(self, step: Step, prompts: list[Prompt]) -> Batch:
        """Generate the rollouts of this step that are not recorded yet; one rank of each replica records
        them."""
        replicas, mine = self.session.replicas, self.session.replicas.share(prompts)
        asked = {prompt.prompt_id for prompt in mine}
        if self.left[0] != step.number:
            self._set_aside_stale(step)
            self.left = step.number, agree(lambda: left_files(self.streams / step.name))
        rollout = self.recipe.rollout
        left = read_left(self.left[1], asked, rollout.keep_routes)
        suspended = {key: drawn for key, drawn in self.carried.items() if key[0] in asked}
        carried = take_up(self.streams, step.number, suspended, self.recipe)
        recall(carried, left.rollouts)
        self.session.scorer.begin_ended(replicas.part(left.rollouts))
        probed = self._probe()
        with self.session.stage("harvest", self.patience) as seconds, ExitStack() as files:  # until on disk
            recorder = None
            if replicas.leads:
                recorder = files.enter_context(Recorder(self._file(step), rollout.record_routes))
            rollouts, metrics = harvest(
                self.engine,
                mine,
                one_replicas_share(self.recipe, replicas),
                self.session.tokenizer.eos_token_ids,
                seed=harvest_seed(self.recipe, step.number),
                left=left,
                carried=carried,
                recorder=recorder,
                on_part=self.session.begin_grading,
                whole=replicas.keeps,
                together=replicas.together,
                oldest_version=step.policy_version if rollout.staleness else None,
            )
        position = self.source.state_dict() if self.source is not None else None
        combined = replicas.combine(metrics)  # every rank has read what is removed now
        if distributed.is_rank0():
            remove_journals(self.left[1], [prompt.prompt_id for prompt in prompts])
        measured = combined | probed | seconds | position_metrics(position)
        return Batch(rollouts, measured, position, prompts)

    def score(self, step: Step, harvested: Batch) -> Batch:
        """Grade this rank's part of its replica's rollouts, learn of all others, record the grades."""
        with self.session.stage("score", self.recipe.reward.step_timeout) as seconds:
            part = self.session.replicas.part(harvested.rollouts)
            graded = self.session.scorer.score(part, self.recipe.reward.step_timeout)
            everyone = shared(part, harvested.prompts)
            if self.session.replicas.leads:
                mine = {rollout_key(rollout) for rollout in harvested.rollouts}
                record_grades(self._file(step), [one for one in everyone if rollout_key(one) in mine])
            seconds |= at_once(gather([graded]))
        keys = [rollout_key(one) for one in everyone if one.suspended]
        drawn = Drawn(step.number, step.policy_version)
        self.suspended |= {key: self.carried.get(key, drawn) for key in keys}
        position = harvested.data_position
        if position is not None and self.recipe.rollout.carry_over:
            position[SUSPENDED] = [[*key, *drawn] for key, drawn in self.suspended.items()]
        return select(Batch(everyone, harvested.metrics | seconds, position), step, self.session)

    def evaluate(self, benchmark: BenchmarkRecipe) -> EvaluationResult:
        """The benchmark's result with the engine's current weights."""
        session = self.session
        self._probe()
        return evaluate(
            self.engine,
            benchmark,
            agree(lambda: read_benchmark(benchmark, self.recipe.data, session.tokenizer)),
            session.scorer,
            self.recipe,
            session.tokenizer.eos_token_ids,
            share=session.replicas.share,
            grades=session.replicas.grades,
            gather=gather,
        )

    def check(self, first: int) -> None:
        """Nothing to check: an engine can generate any step."""

    # ---- weights ------------------------------------------------------------------------------------

    def sleep(self) -> None:
        self.engine.sleep()

    def update_weights(self, policy: Policy) -> Metrics:
        with self.session.stage("sync", self.patience) as seconds:
            self.engine.wake()
            self.engine.update_weights(self.sync_check.passing(policy.weights()), policy.version)
        return seconds

    def _probe(self) -> Metrics:
        """Ask the engine, once after each sync, whether that had an effect. Returns the time it took. Raises
        SyncError, on every rank, naming the replica."""
        if not self.sync_check.due:
            return {}
        started = time.perf_counter()
        mine = self.sync_check.stale(self.engine.probe())
        named = [f"{name}, driven by rank {dist.get_rank()}" for name in mine]
        if stale := gather(named if self.session.replicas.leads else []):
            raise SyncError(
                f"the weight sync had no effect on {'; '.join(stale)}: the answer to a fixed prompt has not "
                f"changed by one bit, though most of the weights that were sent have"
            )
        return {ENGINE_PROBE_SECONDS: time.perf_counter() - started}

    def disagreement(self, mismatch: float | None) -> str | None:
        return self.watch.see(mismatch) if self.recipe.rollout.comparable else None

    def _set_aside_stale(self, step: Step) -> None:
        staleness, folder = self.recipe.rollout.staleness, self.streams / step.name
        newest = math.inf if staleness else step.policy_version
        carried = {key: drawn.oldest_version for key, drawn in self.carried.items()}
        agree(lambda: set_aside_stale(folder, step.policy_version, newest, carried))

    def _file(self, step: Step) -> Path:
        return self.streams / step.name / f"rank-{dist.get_rank()}.arrow"


def select(scored: Batch, step: Step, session: Session) -> Batch:
    """The batch with reward metrics of what ended in this step, and only the rollouts that take part in it.
    Dynamic sampling leaves out prompts without unequal rewards, and prompts beyond
    ``data.prompts_per_step``."""
    recipe = session.recipe
    ended = [(one.prompt, s) for one in scored.rollouts for s in one.segments() if s.finish_reason == "stop"]
    metrics = scored.metrics | reward_metrics([(prompt, s.grade) for prompt, s in ended if not s.carried])
    rollouts = taking_part(scored.rollouts, recipe)
    if session.objective.dynamic_sampling:
        room = recipe.data.prompts_per_step - step.prompts
        rollouts, metrics["objective/filtered_prompts"] = dynamic_sampling.select(rollouts, recipe, room)
    return Batch(rollouts, metrics, scored.data_position)


def start_engine(
    recipe: Recipe, eos_token_ids: frozenset[int], replicas: Replicas, syncs_first: bool
) -> Engine:
    """This rank's engine, with the weights that the recipe starts from."""
    rollout, path = recipe.rollout, recipe.model.path
    longest = recipe.data.max_prompt_length + rollout.max_response_length
    if not replicas.drives:
        return IdleEngine(longest)
    if not syncs_first:
        HFFolder(path).check_vllm_reads_the_same()
    if rollout.engine == "server":
        from megatron_eqlen.rollout.vllm.client import ServerEngine

        return ServerEngine(path, rollout, eos_token_ids, longest, syncs_first=syncs_first)
    from megatron_eqlen.rollout.vllm.colocated import ColocatedEngine  # imports vLLM

    return ColocatedEngine(path, rollout, recipe.model.dtype, eos_token_ids, longest, recipe.seed)


def one_replicas_share(recipe: Recipe, replicas: Replicas) -> Recipe:
    """The recipe with the token budget of one replica."""
    budget = recipe.rollout.tokens_per_step
    if budget is None:
        return recipe
    rollout = recipe.rollout.model_copy(update={"tokens_per_step": max(1, budget // replicas.count)})
    return recipe.model_copy(update={"rollout": rollout})

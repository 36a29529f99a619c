"""Rollouts from an engine, recorded as they complete."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_eqlen.data.prompts import PromptSource, position_metrics, read_benchmark
from megatron_eqlen.environments.load import conversations, tools
from megatron_eqlen.evaluation.evaluate import EVALUATION_SEED, folder_name, result_of, subject
from megatron_eqlen.evaluation.result import EvaluationResult
from megatron_eqlen.files import step_name
from megatron_eqlen.harvest.harvest import harvest, harvest_seed
from megatron_eqlen.harvest.harvest_plan import HarvestPlan
from megatron_eqlen.metrics import at_once
from megatron_eqlen.processes.distributed import agree, gather
from megatron_eqlen.recipe import BenchmarkRecipe
from megatron_eqlen.record import reader
from megatron_eqlen.record.partial import CarryOver, RolloutOrigin, open_prompts
from megatron_eqlen.record.recorder import Recorder, record_grades
from megatron_eqlen.rewards.measured import leave_out
from megatron_eqlen.rewards.scoring import EarlyGrading
from megatron_eqlen.run.engine import start_engine
from megatron_eqlen.run.rollouts import InTurn
from megatron_eqlen.run.session import Session
from megatron_eqlen.run.step import Batch, Step
from megatron_eqlen.sampling.harvester import HarvestObserver, Marker
from megatron_eqlen.sampling.placed import PlacedTrees
from megatron_eqlen.sampling.probe import ProbeSampling
from megatron_eqlen.sampling.tree import TreeSampling
from megatron_eqlen.training.agreement import check_servers
from megatron_eqlen.training.policy import Policy
from megatron_eqlen.types import Metrics, Prompt, Rollout, RolloutKey

PLACED = "placed"
"""Key in a data position that holds ``PlacedTrees.seen``."""


class Generator(InTurn):
    """Rollouts from this rank's engine, recorded under ``streams`` as they complete. ``synced``: weights come
    from a policy before anything is generated, not from ``recipe.model.path``."""

    from_engine = True

    def __init__(
        self, session: Session, streams: Path, synced: bool = True, source: PromptSource | None = None
    ) -> None:
        self.session, self.recipe, self.streams = session, session.recipe, streams
        self.benchmarks = self.recipe.evaluation.benchmarks
        self.conversations = conversations(self.recipe, session.tokenizer)
        if self.conversations is not None:
            session.ends_with(self.conversations.close)
        if synced and self.recipe.teacher.url and session.replicas.drives:
            _ = self.teacher  # a run tries it before the engine starts; an evaluation never asks it
        self.source = source
        """On rank 0 only, which draws for all ranks: gold answers are checked under a time limit, so ranks
        that drew their own prompts could keep different ones."""
        self.engine = start_engine(session.job, session.replicas, syncs_first=synced)
        session.ends_with(self.engine.close)
        self.patience = self.recipe.rollout.request_timeout
        """Seconds after which a silent engine is given up."""
        text = self.recipe.tree_sampling.marker
        self.marker = None if text is None else Marker.of(text, session.tokenizer)
        placed = self.recipe.sampling == "tree" and self.recipe.tree_sampling.fork == "profile"
        self.placed = PlacedTrees(self.recipe) if placed else None
        self.kind: TreeSampling | None = self.placed
        self._recorded_step: int | None = None
        self._recorded_files: list[Path] = []
        """Files that an earlier process recorded of the step with this number."""

    # ---- prompts ------------------------------------------------------------------------------------

    def prompts(self, step: Step) -> list[Prompt]:
        """Return the step's prompts: those of resumed rollouts, and new ones until as many tracks are open as
        in any step. Dynamic sampling draws as many again until enough prompts have unequal rewards, at most
        ``loss.max_num_gen_batches`` times; not with ``rollout.carry_over``, where suspended ones pile up."""
        wanted = self.recipe.data.prompts_per_step
        again = self.session.objective.dynamic_sampling and not self.recipe.rollout.carry_over
        most = self.recipe.loss.max_num_gen_batches if again else 1
        if len(step.batch_metrics) >= most or step.prompts >= wanted:
            return []
        # the first batch: resume what the step before suspended, and place the forks of new trees
        if not step.batch_metrics:
            self.carried = CarryOver(resumed=self.carried.suspended)
            for moved in self.placed.decide() if self.placed else ():
                self.session.progress.say(moved)
        return agree(lambda: self._draw(step, {} if step.batch_metrics else self.carried.resumed, wanted))

    def _draw(self, step: Step, resumed: Collection[RolloutKey], wanted: int) -> list[Prompt]:
        """Return, on rank 0, the prompts of ``resumed`` rollouts, and new ones up to ``wanted`` in all."""
        assert self.source is not None
        if not resumed:
            return self.source.next(wanted)
        # the source has drawn these prompts before; the step that suspended them has recorded them
        names = {prompt_id for prompt_id, _ in resumed}
        before = self.streams / step_name(step.number - 1)
        files = reader.step_files(before)
        prompts = [prompt for prompt in reader.read_prompts(files) if prompt.prompt_id in names]
        if lost := names - {prompt.prompt_id for prompt in prompts}:
            found = f"expected {len(names)} suspended prompts, found nothing of {min(lost)}"
            raise reader.PartialRolloutError(f"{before}: {found}; go back to an earlier checkpoint")
        suspended = [rollout for rollout in reader.read_skeletons(files) if rollout.key in resumed]
        # suspended rollouts keep the engine as busy as so many new prompts
        as_prompts = round(open_prompts(suspended, self.recipe))
        return prompts + self.source.next(max(wanted - as_prompts, 0))

    def go_to(self, data_position: dict[str, Any] | None) -> None:
        if self.source is not None:
            if data_position is None:
                ways = "continue with --replay, or start a new run from its weights (model.path)"
                raise ValueError(f"the checkpoint was made with --replay and holds no data position: {ways}")
            self.source.load_state_dict(data_position)
        if self.recipe.rollout.carry_over:  # not after ``--from`` a run that carried over
            self.carried = CarryOver.at(data_position)
        if self.placed is not None:
            self.placed.seen = (data_position or {}).get(PLACED, {})

    # ---- rollouts -----------------------------------------------------------------------------------

    def harvest(self, step: Step, prompts: list[Prompt]) -> Batch:
        """Generate the rollouts that are not recorded yet; one rank of each replica records them."""
        replicas = self.session.replicas
        # once a step: files of its later batches of prompts are of this process, not of an earlier attempt
        if self._recorded_step != step.number:
            self._find_recorded(step)
        plan = self._plan(step, replicas.share(prompts))
        # the stage lasts until the record is on disk
        with self.session.stage("harvest", self.patience) as seconds:
            rollouts, metrics = self._generate(plan, self.streams / step.name)
        position = self.source.state_dict() if self.source is not None else None
        combined = at_once(gather([metrics] if replicas.leads else []))
        # every rank has read the files that are removed now, which the step's next batch must not look for
        if not self.recipe.rollout.carry_over:
            ids, files = {prompt.prompt_id for prompt in prompts}, self._recorded_files
            self._recorded_files = agree(lambda: reader.remove_open_tracks(files, ids))
        measured = combined | seconds | position_metrics(position)
        return Batch(replicas.part(rollouts), measured, position, prompts)

    def _generate(self, plan: HarvestPlan, folder: Path) -> tuple[list[Rollout], Metrics]:
        """Harvest what ``plan`` lacks, and record it in ``folder`` as it is generated."""
        scorer, replicas = self.session.scorer, self.session.replicas
        # grade what an earlier attempt recorded, while the engine generates the rest
        scorer.begin_ended(replicas.part(plan.progress.rollouts))
        with ExitStack() as files:
            observers: list[HarvestObserver] = [EarlyGrading(scorer, replicas.grades)]
            if replicas.leads:
                recorder = Recorder(_file(folder), self.recipe.rollout.unrecorded_columns)
                observers.append(files.enter_context(recorder))
            return harvest(self.engine, plan, observers)

    def _find_recorded(self, step: Step) -> None:
        """Find what an earlier attempt at the step recorded, and set aside what other weights generated."""
        # with staleness weights are synced during a harvest, so tokens may be newer than its beginning
        newest = math.inf if self.recipe.rollout.staleness else step.policy_version
        oldest = {key: origin.oldest_version for key, origin in self.carried.resumed.items()}
        folder = self.streams / step.name
        agree(lambda: reader.set_aside_stale(folder, step.policy_version, newest, oldest))
        self._recorded_step, self._recorded_files = step.number, agree(lambda: reader.recorded_files(folder))

    def _plan(self, step: Step, prompts: list[Prompt]) -> HarvestPlan:
        """Return the plan for this replica's ``prompts``: new rollouts, and recorded and partial ones."""
        replicas = self.session.replicas
        prompt_ids = {prompt.prompt_id for prompt in prompts}
        resumed = {key: origin for key, origin in self.carried.resumed.items() if key[0] in prompt_ids}
        folder = self.streams / step.name
        progress = reader.read_progress(folder, prompts, self.recipe, resumed, self._recorded_files)
        recipe, budget = self.recipe, self.recipe.rollout.tokens_per_step
        if budget is not None:  # one replica's
            changes = {"tokens_per_step": max(1, budget // replicas.count)}
            recipe = recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update=changes)})
        return HarvestPlan(
            prompts,
            recipe,
            self.session.tokenizer.eos_token_ids,
            seed=harvest_seed(self.recipe.seed, step.number),
            progress=progress,
            keeps_columns=replicas.keeps,
            marker=self.marker,
            kind=self.kind,
            conversations=self.conversations and replace(self.conversations, kept=folder),
        )

    def score(self, step: Step, harvested: Batch) -> Batch:
        """Grade and record; learn which rollouts are suspended, and where forks paid."""
        graded = super().score(step, harvested)
        self.carried = self.carried.suspend(graded.rollouts, RolloutOrigin(step.number, step.policy_version))
        position = graded.data_position
        # checkpoints keep the position, so what later steps continue goes into it
        if position is not None and self.recipe.rollout.carry_over:
            position |= self.carried.position()
        if self.placed is not None:
            # skeletons suffice: every rank learns the same places
            whole, _ = leave_out(graded.rollouts, self.recipe.reward)
            self.placed.learn(whole, harvest_seed(self.recipe.seed, step.number))
            if position is not None:
                position[PLACED] = self.placed.seen
        return graded

    def record(self, step: Step, graded: Sequence[Rollout]) -> None:
        # a leader writes its file even without grades: it tells readers that the step is scored
        if graded or self.session.replicas.leads:
            record_grades(_file(self.streams / step.name), graded)

    def evaluate(
        self, benchmark: BenchmarkRecipe, responses: Path, earlier: EvaluationResult | None
    ) -> EvaluationResult:
        session, replicas = self.session, self.session.replicas
        manifest = agree(lambda: subject(benchmark, self.recipe, self.engine.policy_version))
        if earlier is not None and agree(lambda: earlier.is_of(manifest)):
            return earlier
        asked, sampling = problems(session, benchmark), self.recipe.of_benchmark(benchmark)
        folder = responses / agree(lambda: folder_name(manifest, asked, self.recipe))
        if files := agree(lambda: reader.ungraded_files(folder)):
            session.progress.say(f"{benchmark.name}: goes on from the responses in {folder}")
        share = replicas.share(asked)
        plan = HarvestPlan(
            share,
            sampling,
            session.tokenizer.eos_token_ids,
            seed=self.recipe.seed + EVALUATION_SEED,
            progress=reader.read_progress(folder, share, sampling, files=files, columns=()),
            keeps_columns=lambda prompt, index: False,  # no evaluation reads them
            conversations=self.conversations and replace(self.conversations, own_seeds=True),
        )
        # benchmarks may have a temperature of their own; training's comes back whatever happens
        self.engine.sample_as(sampling.rollout)
        try:
            harvested, _ = self._generate(plan, folder)
        finally:
            self.engine.sample_as(self.recipe.rollout)
        # each rank scores the problems that it grades
        groups = replicas.part(harvested)
        session.scorer.score(groups)
        if groups:
            record_grades(_file(folder), groups)
        result = result_of(manifest, asked, groups, self.recipe, gather)
        # all ranks have gathered, so each has read these files and recorded what it generated
        agree(lambda: reader.remove_open_tracks(files, {problem.prompt_id for problem in asked}))
        return result

    # ---- weights ------------------------------------------------------------------------------------

    def sleep(self) -> None:
        self.engine.sleep()

    def update_weights(self, policy: Policy) -> Metrics:
        with self.session.stage("sync", self.patience) as seconds:
            self.engine.wake()
            with policy.memory.weights.resident():  # vLLM reads those of padded layers after the last one
                self.engine.update_weights(policy.weights(), policy.version)
            if self.recipe.rollout.engine == "server" and self.recipe.rollout.comparable:
                check_servers(policy.compare(gather(self.engine.probe())), self.session.job)
        return seconds


class OneHarvest(Generator):
    """Rollouts of given prompts, harvested in a single step. ``kind``: their maker; None: the recipe's."""

    def __init__(
        self, session: Session, streams: Path, prompts: list[Prompt], kind: ProbeSampling | None = None,
        synced: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(session, streams, synced)
        self.given, self.kind, self.placed = prompts, kind, None

    def prompts(self, step: Step) -> list[Prompt]:
        return [] if step.batch_metrics else self.given


def _file(folder: Path) -> Path:
    """Return this rank's file of rollouts."""
    return folder / f"rank-{dist.get_rank()}.arrow"


def problems(session: Session, benchmark: BenchmarkRecipe) -> list[Prompt]:
    """Return all problems of a benchmark, the same on every rank."""
    recipe, tokenizer = session.recipe, session.tokenizer
    return agree(lambda: read_benchmark(benchmark, recipe.data, tokenizer, tools(recipe)))

"""State that lives as long as a run: its folder, its progress and its records."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from megatron_eqlen.evaluation.result import EvaluationResult, compare, read_results, write_results
from megatron_eqlen.files import CheckpointError, step_name
from megatron_eqlen.hf.config import ModelConfig, read_config
from megatron_eqlen.metrics import (
    EFFECTIVE_PER_GPU_SECOND,
    HARVEST_FLOPS,
    HARVEST_GENERATED_TOKENS,
    OBJECTIVE_EFFECTIVE_SAMPLES,
    OBJECTIVE_UNITS,
    PACKING_TOKENS,
    TIME_CHECKPOINT,
    TIME_ENGINE_IDLE,
    TIME_GPU_HOURS,
    TIME_STEP,
    TIME_TRAIN,
    TIME_TRAINER_IDLE,
    TOTAL_FLOPS,
    TOTAL_GENERATED_TOKENS,
    TRAIN_FLOPS,
    TRAIN_SKIPPED_UPDATES,
    TRAIN_TOKENS_PER_SECOND,
    UPDATES,
    over_ranks,
)
from megatron_eqlen.objectives.build import build_minibatches
from megatron_eqlen.plan.flops import achieved
from megatron_eqlen.processes import distributed, failures
from megatron_eqlen.processes.distributed import agree, gather
from megatron_eqlen.processes.timeline import ENGINE, TRAINER, Span
from megatron_eqlen.recipe.budget import COSTS, Budget, Spent
from megatron_eqlen.recipe.inputs import local_path
from megatron_eqlen.report.metrics import FILE as METRICS
from megatron_eqlen.report.metrics import MetricsWriter, read_metrics
from megatron_eqlen.report.model_card import write_model_card
from megatron_eqlen.report.page import PageWriter, write_page
from megatron_eqlen.report.run_folder import RunFolder
from megatron_eqlen.report.samples import Samples, samples
from megatron_eqlen.report.trackers import start_trackers
from megatron_eqlen.run.generation import Rollouts
from megatron_eqlen.run.session import Session
from megatron_eqlen.run.step import Step
from megatron_eqlen.training import checkpoint
from megatron_eqlen.training.agreement import MismatchError
from megatron_eqlen.training.policy import Policy
from megatron_eqlen.training.profiler import Profiler, snapshot_when_out_of_memory
from megatron_eqlen.types import Metrics, TokenTree


class Run:
    """A training run, as every rank sees it; rank 0 writes. A run locks its folder."""

    def __init__(self, session: Session) -> None:
        self.session, self.recipe = session, session.recipe
        self.folder = RunFolder(self.recipe)
        if distributed.is_rank0():
            hold = self.folder.open(self.recipe)
            session.enter(session.events.writing(self.folder.path, hold.check))
        failures.keep_in(self.folder.path)
        session.watchdog.add_facts(lambda: f"step {self.begun}")
        session.watch(self.folder.hang)
        self.profiler = Profiler(self.folder.profile, self.recipe.profile)
        if self.recipe.profile.out_of_memory:
            self._watch_memory()
        self.writer: MetricsWriter | None = None
        self.page = PageWriter(self.folder.path)
        self.spent = Spent()
        """Budget spent on the completed steps."""
        self.begun = 0
        """Number of steps begun; several may be under way."""
        self.saved = 0
        """Steps taken when the newest checkpoint was begun."""
        self.saving: checkpoint.Saving | None = None
        """Checkpoint that is being written."""
        self.saving_seconds = 0.0
        """Seconds that beginning this checkpoint took."""
        self.position: dict[str, Any] | None = None
        """Contents of the loaded checkpoint except the policy."""
        self.stopping = False
        """True if the run ends after this step: the file STOP was found, or ``stopped_by`` names the reason.
        """
        self.stopped_by: str | None = None
        self.step_ended = 0.0
        """End of the newest step, in seconds of ``time.perf_counter``."""
        self.idle_steps = 0
        """Number of steps without an update, on rank 0."""
        self.before: list[EvaluationResult] = []
        """Results of the evaluation before the first step."""
        self.newest: list[EvaluationResult] = []
        self.disagrees = False
        """The newest step's token about which trainer and engine disagree most."""

    def _watch_memory(self) -> None:
        if torch.cuda.is_available():
            self.session.enter(snapshot_when_out_of_memory(self.folder.profile))
        else:
            self.session.progress.warn("profile.out_of_memory: true has no effect without a GPU")

    # ---- beginning and end --------------------------------------------------------------------------

    def was_asked_to_stop(self) -> bool:
        """Return True if the file STOP was there before the run could begin; it is removed then."""
        if not agree(self.folder.stop.exists):
            return False
        if distributed.is_rank0():
            self.folder.stop.unlink()
            self.session.events.note("stopped", step=self.steps, text="before it began")
            self.session.progress.say(
                f"stopped before it began, as {self.folder.stop} asked; the same command starts it"
            )
        return True

    def load(self, policy: Policy) -> None:
        """Load the newest checkpoint into the policy and this run, or leave both at the start. Raises
        CheckpointError if a checkpoint was saved and none is there, NonFiniteError if a weight is not finite;
        reports missing records."""
        self.position = checkpoint.load(self.folder.checkpoints, policy)
        policy.check_weights()
        if self.position is None:
            if fault := agree(self.folder.lost_checkpoints):
                raise CheckpointError(fault)
        else:
            self.spent = _spent_until(self.position, self.recipe.budget)
            self.saved = self.begun = self.steps
            self.session.events.note("resumed", step=self.steps)
        if distributed.is_rank0():
            self._compare_with_records()

    def _compare_with_records(self) -> None:
        """Report disagreements with the records of the steps before this start."""
        records = read_metrics(self.folder.path)
        recorded = {record["step"] for record in records}
        self.idle_steps = sum(record.get(UPDATES) == 0 for record in records if record["step"] <= self.steps)
        if self.position is None and recorded:
            self.session.progress.say(f"no checkpoint was saved yet: {len(recorded)} steps are trained again")
        missing = [step for step in range(1, self.steps + 1) if step not in recorded]
        if missing:
            self.session.progress.warn(
                f"{self.folder.path / METRICS} has no record of {len(missing)} of {self.steps} steps (the "
                f"first: step {missing[0]}): the run continues, and reports and comparisons lack them"
            )

    def resume(self, rollouts: Rollouts) -> None:
        """Continue from the loaded position."""
        if self.position is not None:
            rollouts.go_to(self.position["data"])
        if not self.complete:
            rollouts.check(first=self.steps)
        if distributed.is_rank0():
            if not self.complete:
                self.folder.reopen()
            trackers = start_trackers(self.folder.path, self.steps, self.recipe)
            self.writer = MetricsWriter(self.folder.path, self.steps, trackers)
            self.session.enter(self.writer)
        self.session.progress.resume(self.spent)

    @property
    def steps(self) -> int:
        """Number of completed steps."""
        return self.spent.steps

    @cached_property
    def model(self) -> ModelConfig:
        return read_config(local_path(self.recipe.model))

    def has_next_step(self) -> bool:
        """True if another step is to be taken."""
        return not self.complete and not self.stopping

    @property
    def complete(self) -> bool:
        return self.recipe.budget.ended_by(self.spent) is not None

    def export(self, policy: Policy) -> None:
        """Export the trained model as a Hugging Face folder, and its adapters as a PEFT folder."""
        if self.recipe.lora.rank and not agree(self.folder.adapter.exists):
            self._check_held()
            with self.session.stage("export"):
                policy.export_adapters(self.folder.adapter)
        if not agree(self.folder.export.exists):
            self._check_held()
            with self.session.stage("export"):
                policy.export(self.folder.export)

    def report(self, rollouts: Rollouts) -> None:
        """Write report.html and print its path, as the last line of the run. Raises MismatchError if the
        mismatch ended the run."""
        if distributed.is_rank0():
            if count := len(rollouts.suspended):
                self.session.progress.say(
                    f"{count} rollouts are suspended at the end: their finished parts have been trained, "
                    "the rest has not; a run with more steps resumes with them"
                )
            if warning := _warn_of_idle(self.idle_steps, self.steps):
                self.session.progress.warn(warning)
            if after := _seconds([s for s in self.session.timeline.spans if s.began >= self.step_ended]):
                self.session.progress.say(f"after the last step: {after}")
            if self.folder.export.exists():
                write_model_card(self.folder.path)
            self.session.progress.finish(write_page(self.folder.path), self._learned())
        if self.stopped_by and not self.complete:
            raise MismatchError(
                f"{self.stopped_by}: stopped after step {self.steps}, with a checkpoint "
                f"(rollout.mismatch.then: stop); the same command resumes the run, and "
                "rollout.mismatch may change"
            )

    # ---- a step -------------------------------------------------------------------------------------

    def begin(self, policy: Policy) -> Step:
        """Return the next step, still empty."""
        self.begun += 1
        self.profiler.begin(self.begun)
        return Step(self.begun - 1, policy.version)

    def build_trees(self, step: Step) -> tuple[Step, list[list[TokenTree]]]:
        """Return the step with its minibatches of token trees, with advantages and weights; the same on every
        rank."""
        with self.session.stage("trees") as seconds:
            version = step.policy_version if self.recipe.rollout.trains_older else None
            minibatches, metrics = build_minibatches(step.rollouts, self.recipe, version, gather)
        generated = step.metrics.get(HARVEST_GENERATED_TOKENS)
        if generated:
            effective = 1000 * metrics[OBJECTIVE_EFFECTIVE_SAMPLES] / generated
            metrics["objective/effective_per_1k_tokens"] = effective
        return step.log(metrics | seconds), minibatches

    def update(self, step: Step, policy: Policy, minibatches: list[list[TokenTree]]) -> Step:
        """Train on ``minibatches``; a step without any update is reported on the screen."""
        with self.session.stage("train") as seconds:
            metrics = policy.update(minibatches)
        trained = metrics.get(PACKING_TOKENS, 0.0) * self.recipe.loss.epochs
        speed = trained / seconds[TIME_TRAIN]
        step = step.log(metrics | seconds | {TRAIN_TOKENS_PER_SECOND: speed})
        if not metrics[UPDATES]:
            self.session.progress.warn(f"step {step.number + 1} trained nothing: {_why_not(step)}")
        return step

    def park(self, policy: Policy) -> Metrics:
        """Free the accelerator's memory for the engine."""
        with self.session.stage("park") as seconds:
            freed = policy.park()
        return freed | seconds

    def unpark(self, policy: Policy) -> Metrics:
        """Load the parked memory again."""
        with self.session.stage("unpark") as seconds:
            policy.unpark()
        return seconds

    def report_mismatch(self, disagreement: str | None, worst: tuple[float, str]) -> None:
        """Warn that trainer and engine disagree, unless they did in the step before, and end the run after
        this step where the recipe says so. ``worst``: see ``Policy.worst``."""
        before, self.disagrees = self.disagrees, disagreement is not None
        if disagreement is None or before:
            return
        difference, place = worst
        self.session.progress.warn(f"{disagreement}; most, by {difference:.3g}, in {place}")
        if self.recipe.rollout.mismatch.then == "stop":
            self.stopped_by = disagreement

    def evaluate_if_due(self, step: Step, rollouts: Rollouts) -> Step:
        """Evaluate within the step where the recipe says so."""
        every = self.recipe.evaluation.every
        if not every or (step.number + 1) % every:
            return step
        step = step.log(self.evaluate(step_name(step.number + 1), rollouts))
        if distributed.is_rank0():
            self.page.update()
        return step

    def end(self, step: Step) -> None:
        """Count the step, and write its metrics."""
        self.profiler.end(step.number + 1)
        now, timeline = time.perf_counter(), self.session.timeline
        taken = now - step.started
        worked = taken - step.metrics.get("time/evaluate", 0.0)
        self._check_held()
        reached = achieved(self.recipe, self.model, step.metrics, distributed.gpu_name())
        self.spent = Spent(
            step.number + 1,
            self.spent.gpu_hours + agree(lambda: worked) * self.recipe.gpus / 3600,
            self.spent.generated_tokens + step.metrics.get(HARVEST_GENERATED_TOKENS, 0.0),
            self.spent.flops + reached[HARVEST_FLOPS] + reached[TRAIN_FLOPS],
        )
        self.stopping = agree(self.folder.stop.exists) or self.stopped_by is not None
        totals = {
            TIME_GPU_HOURS: self.spent.gpu_hours,
            TOTAL_GENERATED_TOKENS: self.spent.generated_tokens,
            TOTAL_FLOPS: self.spent.flops,
        }
        effective = step.metrics.get(OBJECTIVE_EFFECTIVE_SAMPLES, 0.0)
        speed = {
            TIME_STEP: taken,
            TIME_ENGINE_IDLE: timeline.idle(ENGINE, step.started, now),
            TIME_TRAINER_IDLE: timeline.idle(TRAINER, step.started, now),
            EFFECTIVE_PER_GPU_SECOND: effective / (taken * self.recipe.gpus),
        }
        ranks = over_ranks(gather([step.metrics]))
        metrics = step.metrics | reached | ranks | speed | totals
        self.step_ended = now
        if self.writer is not None:
            self.writer.write(self.steps, metrics, self._samples(step))
        self.session.events.note("step", step=self.steps)
        self.idle_steps += metrics.get(UPDATES) == 0
        self.session.progress.step(self.steps, metrics)

    def _samples(self, step: Step) -> Samples | None:
        """Return samples of the step's rollouts for trackers, if the recipe asks for them. On rank 0."""
        every = self.recipe.report.samples_every
        if not every or self.steps % every:
            return None
        return samples(self.folder.streams / step.name, self.recipe, self.session.tokenizer.decode)

    def checkpoint_if_due(self, step: Step, policy: Policy) -> None:
        """Save what the next step starts from: every few steps, at the end, and when asked to stop.

        Nothing is saved after a skipped update while steps remain: the weights may be the cause of its
        non-finite numbers, and a new checkpoint would push out an older, good one.
        """
        every = self.recipe.checkpoint.every
        due = self.steps // every > self.saved // every or not self.has_next_step()
        if due and policy.skipped_in_a_row and not self.complete:
            self.session.progress.say(f"no checkpoint after step {self.steps}: its last update was skipped")
        elif due:
            self._save(step, policy)
        if self.stopping and distributed.is_rank0():
            self.folder.stop.unlink(missing_ok=True)  # served; the same command resumes the run
            text = self.stopped_by or f"as {self.folder.stop} asked"
            self.session.events.note("stopped", step=self.steps, text=text)

    def finish_checkpoint(self) -> Metrics:
        """Put a checkpoint that is being written in force, before the next update changes the tensors it is
        read from."""
        if self.saving is None:
            return {}
        self._check_held()
        with self.session.stage("checkpoint") as seconds:
            metrics = self.saving.finish()
        self.saving = None
        if distributed.is_rank0():
            self.session.events.note("saved", step=self.saved)
            self.folder.remove_old_streams(self.recipe, self.saved)
            self.page.update()
        return metrics | {TIME_CHECKPOINT: seconds[TIME_CHECKPOINT] + self.saving_seconds}

    def _save(self, step: Step, policy: Policy) -> None:
        costs = {key: getattr(self.spent, key) for key in COSTS}
        position = {"data": agree(lambda: step.data_position), **costs}
        options = self.recipe.checkpoint
        with self.session.stage("checkpoint") as seconds:
            self.saving = checkpoint.begin(
                self.folder.checkpoints, self.steps, policy, position, options.keep
            )
        self.saved, self.saving_seconds = self.steps, seconds[TIME_CHECKPOINT]
        if not options.background or not self.has_next_step():
            self.finish_checkpoint()

    def _check_held(self) -> None:
        """Check, before anything is put in force, that no later try of this job has taken the run over."""
        agree(lambda: self.folder.hold and self.folder.hold.check())

    # ---- evaluation ---------------------------------------------------------------------------------

    def evaluate(self, label: str, rollouts: Rollouts) -> Metrics:
        """Evaluate all benchmarks with the engine's weights; a result file that exists is not made again."""
        path = self.folder.evaluation(label)
        self.newest, metrics = evaluate(self.session, rollouts, path, label, self.before)
        if label == "before":
            self.before = self.newest
        return metrics

    def _learned(self) -> str:
        """Return the accuracies before and after, ``arithmetic 43.9% -> 89.1%``; empty if the run is not
        complete."""
        earlier = {result.benchmark: result.scores.mean() for result in self.before}
        return ", ".join(
            f"{result.benchmark} {100 * earlier[result.benchmark]:.1f}% -> {100 * result.scores.mean():.1f}%"
            for result in (self.newest if self.complete else ())
            if result.benchmark in earlier
        )


def _spent_until(position: dict[str, Any], budget: Budget) -> Spent:
    """Return what a checkpoint's run had spent. Raises CheckpointError if it does not say how much of a
    limited quantity was spent, because it was written before that was counted."""
    for key, limit in budget.limits():
        if key in COSTS and key not in position:
            raise CheckpointError(
                f"{key}: {limit:g} limits this run, but its checkpoint does not say how much was spent before"
            )
    return Spent(position["step"], **{key: position.get(key, 0.0) for key in COSTS})


def _why_not(step: Step) -> str:
    """Return why no update was taken in ``step``."""
    if skipped := step.metrics[TRAIN_SKIPPED_UPDATES]:
        return f"{skipped:.0f} updates were skipped, see the warnings above"
    units = step.metrics[OBJECTIVE_UNITS]
    if not units:
        return "it has nothing to compare: no response ended within rollout.max_response_length"
    return f"none of its {units:.0f} comparison units has unequal rewards"


def _seconds(spans: Sequence[Span]) -> str:
    """Return ``checkpoint 3.1 s, evaluate 12.0 s, export 2.2 s``: the stages of a run's end, which no step's
    record holds."""
    took = dict.fromkeys(("checkpoint", "evaluate", "export"), 0.0)
    for span in spans:
        if span.stage in took:
            took[span.stage] += span.ended - span.began
    return ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in took.items() if seconds)


def _warn_of_idle(idle: int, steps: int) -> str:
    """Return a warning if ``idle`` of ``steps`` steps trained nothing, else an empty text."""
    if idle and idle == steps:
        return "no step trained anything; the weights are those that the run started from"
    return f"{idle} of {steps} steps trained nothing" if idle else ""


def evaluate(
    session: Session, rollouts: Rollouts, path: Path, label: str, before: Sequence[EvaluationResult] = ()
) -> tuple[list[EvaluationResult], Metrics]:
    """Evaluate all benchmarks and write the results to ``path``; if ``path`` exists, read it instead.

    ``before``: results of an earlier evaluation to compare with, if any.
    """
    results: list[EvaluationResult] = []
    metrics: Metrics = {}
    if rollouts.benchmarks and agree(path.exists):
        results = read_results(path)
    elif rollouts.benchmarks:
        with session.stage("evaluate", session.recipe.rollout.request_timeout) as metrics:
            results = [rollouts.evaluate(benchmark) for benchmark in rollouts.benchmarks]
        if distributed.is_rank0():
            write_results(path, results)
    for result in results:
        metrics |= result.metrics()
        accuracy = f"{result.benchmark} avg@{result.samples} {result.accuracy}"
        session.progress.say(f"{label}: {accuracy}{_change(result, before)}")
    return results, metrics


def _change(result: EvaluationResult, before: Sequence[EvaluationResult]) -> str:
    """Return the paired change since an earlier result on the same questions, as text; empty if there is
    none."""
    questions = result.manifest["question_ids"]
    for earlier in before:
        if earlier.manifest["question_ids"] == questions and earlier.manifest != result.manifest:
            return f", {compare(earlier, result).points}"
    return ""

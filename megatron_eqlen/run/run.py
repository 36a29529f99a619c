"""A training run: its folder, its budget, and the verbs of the loop."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist

from megatron_eqlen import metrics as m
from megatron_eqlen.files import step_name
from megatron_eqlen.objectives.build import build_minibatches
from megatron_eqlen.plan.flops import achieved
from megatron_eqlen.processes import distributed, failures
from megatron_eqlen.processes.distributed import agree, gather
from megatron_eqlen.processes.timeline import ENGINE, TRAINER
from megatron_eqlen.recipe.budget import COSTS, Spent
from megatron_eqlen.recipe.contents import is_whole, keep, written
from megatron_eqlen.recipe.inputs import keep_inputs
from megatron_eqlen.report.diagnosis import STEPS, diagnose
from megatron_eqlen.report.metrics import FILE as METRICS
from megatron_eqlen.report.metrics import Columns, MetricsWriter, read_newest
from megatron_eqlen.report.page import PageWriter
from megatron_eqlen.report.trackers import Trackers
from megatron_eqlen.run.checkpoints import Checkpoints, check_held
from megatron_eqlen.run.evaluations import Evaluations
from megatron_eqlen.run.rollouts import Rollouts
from megatron_eqlen.run.run_folder import RunFolder
from megatron_eqlen.run.session import Session
from megatron_eqlen.run.step import Step
from megatron_eqlen.sampling.profile import gain_metrics
from megatron_eqlen.training.agreement import MismatchError, disagreement
from megatron_eqlen.training.policy import Policy, Updated
from megatron_eqlen.training.profiler import Profiler
from megatron_eqlen.types import UNSCORED, Metrics, TokenTree


class Run:
    """A training run, as every rank sees it; rank 0 writes. A run locks its folder."""

    def __init__(self, session: Session, until: int | None = None) -> None:
        """``until``: steps after which it pauses."""
        self.session, self.recipe, self.until = session, session.recipe, until
        self.folder = RunFolder(self.recipe)
        if distributed.is_rank0():
            # the lock comes first: nothing is written to a folder that another process holds
            hold = self.folder.open(self.recipe)
            session.enter(session.events.writing(self.folder.path, hold.check))
            keep_inputs(self.folder.path, self.recipe)
            self.folder.write_recipe(self.recipe)
        session.keep_date(self.folder.path)
        # from here on errors and hangs leave their records in the run's folder
        failures.keep_in(self.folder.path)
        session.watch(self.folder.hang)
        self.profiler = Profiler(self.folder.profile, self.recipe.profile)
        self.page = PageWriter(self.folder.path)
        self.checkpoints = Checkpoints(session, self.folder, self.page)
        self.evaluations = Evaluations(session, self.folder)
        self.writer: MetricsWriter | None = None
        """Writer of the steps' metrics, to ``metrics.jsonl`` and trackers; on rank 0 alone."""
        self.spent = Spent()
        """Budget spent on the completed steps."""
        self.begun = 0
        """Number of steps begun; several may be under way."""
        self.position: dict[str, Any] | None = None
        """Contents of the loaded checkpoint except the policy."""
        self.diagnosed: Collection[str] = ()
        """Kinds of faults found in the newest step; each is reported once while it lasts."""
        self.disagrees = False
        """True if trainer and engine disagreed in the newest step."""
        self.stopping = False
        """True if the run ends after this step: the file STOP is there, or ``stopped_by`` says why."""
        self.stopped_by: str | None = None

    # ---- beginning and end --------------------------------------------------------------------------

    def was_asked_to_stop(self) -> bool:
        """Return True if the file STOP was there before the run could begin; it is removed then."""
        if not agree(self.folder.stop.exists):
            return False
        if distributed.is_rank0():
            self.folder.stop.unlink()
            self.session.events.note("stopped", text="before it began")
            why = f"stopped before it began, as {self.folder.stop} asked"
            self.session.progress.say(f"{why}; the same command starts it")
        return True

    def load(self, policy: Policy) -> None:
        """Load the newest checkpoint, if any, and report missing records. Raises as ``Checkpoints.load``."""
        self.position = self.checkpoints.load(policy)
        if self.position is not None:
            self.spent = Spent(self.position["step"], **{key: self.position[key] for key in COSTS})
            self.begun = self.steps
            self.session.events.note("resumed", step=self.steps)
        if distributed.is_rank0():
            self._report_gaps()

    def _report_gaps(self) -> None:
        """Report steps that are trained again, and those of the completed steps without a record."""
        recorded = {*Columns(self.folder.path, ["train/updates"]).steps.astype(int).tolist()}
        if self.position is None and recorded:
            self.session.progress.say(f"no checkpoint was saved: {len(recorded)} steps are trained again")
        if missing := [step for step in range(1, self.steps + 1) if step not in recorded]:
            lost = f"no record of {len(missing)} of {self.steps} steps (the first: step {missing[0]})"
            so = "the run continues, and reports and comparisons lack them"
            self.session.progress.warn(f"{self.folder.path / METRICS} has {lost}: {so}")

    def resume(self, rollouts: Rollouts) -> None:
        """Continue from the loaded position."""
        if self.position is not None:
            rollouts.go_to(self.position["data"])
        if self.has_next_step():
            rollouts.check(self.steps, self.until or self.recipe.steps)
            if distributed.is_rank0():
                self.folder.reopen()
        if distributed.is_rank0():
            trackers = Trackers(self.folder.path, self.steps, self.session.job)
            self.writer = MetricsWriter(self.folder.path, self.steps, trackers)
            self.session.enter(self.writer)
        self.session.progress.resume(self.spent)

    @property
    def steps(self) -> int:
        """Number of completed steps."""
        return self.spent.steps

    def has_next_step(self) -> bool:
        return not self.complete and not self.stopping and self.steps != self.until

    @property
    def complete(self) -> bool:
        # steps that are trained again, up to ``until``, may cost more than the run's limits allow
        return self.until is None and self.recipe.budget.ended_by(self.spent) is not None

    def export(self, policy: Policy) -> None:
        """Export the model as a Hugging Face folder, and its adapters as a PEFT folder, where missing."""
        check_held(self.folder)
        adapters = {self.folder.adapter: policy.export_adapters} if self.recipe.lora.rank else {}
        for folder, export in {self.folder.export: policy.export, **adapters}.items():
            # the same command may be given again after a whole export
            if agree(lambda folder=folder: is_whole(folder)):
                continue
            with self.session.stage("export"):
                # what lies there is not what this run recorded as its export: keep it under another name
                agree(lambda folder=folder: self.folder.set_aside(folder))
                export(folder)
                agree(lambda folder=folder: keep(self.folder.path, {f"RUN/{folder.name}": written(folder)}))

    def report(self, rollouts: Rollouts) -> None:
        """Write report.html and print its path. Raises MismatchError if the mismatch ended the run."""
        if distributed.is_rank0():
            if count := len(rollouts.carried.suspended):
                more = "a run with more steps resumes with them"
                self.session.progress.say(f"{count} rollouts are suspended and not trained; {more}")
            # of all starts of the run, so read from its record
            if idle := int((Columns(self.folder.path, ["train/updates"])["train/updates"] == 0).sum()):
                same = ": the weights are those that the run started from" * (idle == self.steps)
                self.session.progress.warn(f"{idle} of {self.steps} steps trained nothing{same}")
            learned = self.evaluations.learned() if self.complete else ""
            self.session.progress.finish(self.page.write(), learned)
        # last, on every rank: page and checkpoint are written by now
        if self.stopped_by and not self.complete:
            stop = f"stopped after step {self.steps} (rollout.mismatch.then: stop)"
            again = "the same command resumes it, and rollout.mismatch may change"
            raise MismatchError(f"{self.stopped_by}: {stop}; {again}")

    # ---- a step -------------------------------------------------------------------------------------

    def begin(self, policy: Policy) -> Step:
        """Return the next step, still empty."""
        self.begun += 1
        self.profiler.begin(self.begun)
        return Step(self.begun - 1, policy.version)

    def build_trees(self, step: Step) -> tuple[Step, list[list[TokenTree]]]:
        """Return the step with its minibatches of token trees, weighted; the same on every rank."""
        with self.session.stage("trees") as seconds:
            version = step.policy_version if self.recipe.rollout.trains_older else None
            minibatches, metrics = build_minibatches(
                step.rollouts, self.session.job, version, gather, dist.get_rank()
            )
        if generated := step.metrics.get("harvest/generated_tokens"):
            effective = metrics["objective/effective_samples"]
            metrics["objective/effective_per_1k_tokens"] = 1000 * effective / generated
        return step.log(metrics | seconds), minibatches

    def update(self, step: Step, policy: Policy, minibatches: list[list[TokenTree]]) -> tuple[Step, Updated]:
        with self.session.stage("train") as seconds:
            updated = policy.update(minibatches, step.drawn)
        # every epoch computes all rows again
        trained = updated.metrics.get("packing/tokens", 0.0) * self.recipe.loss.epochs
        speed = trained / seconds["time/train"]
        return step.log(updated.metrics | seconds | {"train/tokens_per_second": speed}), updated

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

    def report_mismatch(self, updated: Updated, rollouts: Rollouts) -> None:
        """Warn if trainer and engine newly disagree, and end the run after the step if the recipe says so."""
        fault = disagreement(updated.mismatch, self.recipe.rollout) if rollouts.from_engine else None
        before, self.disagrees = self.disagrees, fault is not None
        if fault is None or before:
            return
        worst = updated.worst
        self.session.progress.warn(f"{fault}; most, by {worst.difference:.3g}, in {worst.place}")
        if self.recipe.rollout.mismatch.then == "stop":
            self.stopped_by = fault

    def evaluate_if_due(self, step: Step, rollouts: Rollouts) -> Step:
        """Evaluate within the step where the recipe says so."""
        every, number = self.recipe.evaluation.every, step.number + 1
        if not every or number % every:
            return step
        step = step.log(self.evaluations.evaluate(step_name(number), rollouts, number))
        if distributed.is_rank0():
            self.page.update()
        return step

    def end(self, step: Step) -> None:
        """Count the step, and write its metrics."""
        self.profiler.end(step.number + 1)
        now, timeline = time.perf_counter(), self.session.timeline
        taken = now - step.started
        # the budget does not pay for evaluations
        worked = taken - step.metrics.get("time/evaluate", 0.0)
        # once another start owns the folder, not even this step's metrics are written
        check_held(self.folder)
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        reached = achieved(self.session.job, step.metrics, device)
        # rank 0's clock counts for all ranks: the budget must end in the same step on each
        self.spent = Spent(
            step.number + 1,
            self.spent.gpu_hours + agree(lambda: worked) * self.recipe.gpus / 3600,
            self.spent.generated_tokens + step.metrics.get("harvest/generated_tokens", 0.0),
            self.spent.flops + reached["harvest/flops"] + reached["train/flops"],
        )
        # ranks that look for STOP themselves could see it in different steps
        self.stopping = agree(self.folder.stop.exists) or self.stopped_by is not None
        totals = {name: getattr(self.spent, cost) for cost, name in m.COST_METRICS.items()}
        effective = step.metrics.get("objective/effective_samples", 0.0)
        speed = {
            "time/step": taken,
            "time/engine_idle": timeline.idle(ENGINE, step.started, now),
            "time/trainer_idle": timeline.idle(TRAINER, step.started, now),
            "objective/effective_per_gpu_second": effective / (worked * self.recipe.gpus),
        }
        # computed from sums over all batches of the step, which are complete only now
        step = step.log(gain_metrics(step.metrics))
        ranks = m.over_ranks(gather([step.metrics]))
        metrics = step.metrics | reached | ranks | speed | totals
        if self.writer is not None:
            self.writer.write(self.steps, metrics)
        self.session.events.note("step", step=self.steps)
        self.session.progress.step(self.steps, metrics)
        if distributed.is_rank0():
            self._warn_of_faults(step)

    def _warn_of_faults(self, step: Step) -> None:
        """Warn of each kind of fault once while it lasts, and again if it comes back."""
        faults = dict(diagnose(self.folder.path, self.recipe, read_newest(self.folder.path, STEPS)))
        for kind in (kind for kind in faults if kind not in self.diagnosed):
            nothing = " trained nothing" * (not step.metrics["train/updates"] and kind != UNSCORED)
            self.session.progress.warn(f"step {self.steps}{nothing}: {faults[kind]}")
        self.diagnosed = faults.keys()

    def checkpoint_if_due(self, step: Step, policy: Policy) -> None:
        """Save what the next step starts from: every few steps, at the end, and when asked to stop; not after
        a skipped update while steps remain, since faulty weights would push out a good checkpoint."""
        every, last = self.recipe.checkpoint.every, not self.has_next_step()
        # not `steps % every == 0`: what was due after a skipped update is saved a step later
        due = last or self.steps // every > self.checkpoints.saved // every
        if due and policy.skipped_in_a_row and not self.complete:
            self.session.progress.say(f"no checkpoint after step {self.steps}: its last update was skipped")
        elif due:
            self.checkpoints.save(self.spent, step.data_position, policy, last)
        if self.stopping and distributed.is_rank0():
            self.folder.stop.unlink(missing_ok=True)  # served; the same command resumes the run
            text = self.stopped_by or f"as {self.folder.stop} asked"
            self.session.events.note("stopped", step=self.steps, text=text)

"""The main loop: the stages of training, and the values that each hands to the next.

    begin ─► collect ─► build_trees ─► update ─► update_weights ─► evaluate ─► end ─► checkpoint
      ▲      rollouts   token trees    policy    engine            every N            │
      └───────────────────────────────── the next step ───────────────────────────────┘

Trainer and engine share GPUs: the engine sleeps while the trainer has its memory, and the trainer is parked
while the engine is awake (``recipe/phases.py``). With ``rollout.staleness`` rollouts are collected while
earlier steps train (``ahead.py``). ``Session``, ``Policy`` and ``Rollouts`` live as long as the process, a
``Run`` as long as its folder, a ``Step`` from ``begin`` to ``end``.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from megatron_eqlen.data.prompts import PromptSource
from megatron_eqlen.evaluation.result import responses_of
from megatron_eqlen.files import write_text
from megatron_eqlen.job import Job
from megatron_eqlen.processes import distributed, events
from megatron_eqlen.processes.hold import Hold
from megatron_eqlen.recipe import BenchmarkRecipe
from megatron_eqlen.recipe.inputs import keep_inputs
from megatron_eqlen.recipe.load import RECIPE, dump
from megatron_eqlen.report.diagnosis import unforked
from megatron_eqlen.run.ahead import Ahead
from megatron_eqlen.run.demonstrations import Demonstrations
from megatron_eqlen.run.evaluations import evaluate_all, leaderboard
from megatron_eqlen.run.generation import Generator, OneHarvest, problems
from megatron_eqlen.run.prompts import start_prompts, try_rewards
from megatron_eqlen.run.replay import Replay
from megatron_eqlen.run.rollouts import Rollouts
from megatron_eqlen.run.run import Run
from megatron_eqlen.run.session import Session
from megatron_eqlen.run.step import Step
from megatron_eqlen.training.policy import Policy


def train(job: Job, replay: Path | None = None, until: int | None = None) -> None:
    """Train as the job's recipe says, from the newest checkpoint of its run folder if there is one.
    ``replay``: recorded streams, in place of an engine. ``until``: steps after which to stop and export."""
    if replay is not None:
        _require_sampling(job, "--replay")
    with Session(job) as session:
        run = Run(session, until)
        if run.was_asked_to_stop():
            return
        # a wrong data file, benchmark or grader ends the run here, before the model is loaded
        prompts = None if replay else start_prompts(session)
        if prompts is not None:
            try_rewards(session, prompts)
        policy = Policy(job)
        run.load(policy)
        run.park(policy)  # the engine is built where it will live: in the memory that the trainer leaves free
        rollouts = start_rollouts(session, run.folder.streams, replay, prompts)
        rollouts.sleep()  # the first sync needs the room of its KV cache
        # the rollouts exist only now, so only now can they go to the checkpoint's position
        run.resume(rollouts)
        rollouts.update_weights(policy)
        run.evaluations.evaluate("before", rollouts, run.steps)
        while run.has_next_step():
            step = rollouts.collect(run.begin(policy))
            step, trees = run.build_trees(step)
            rollouts.sleep()
            # the checkpoint of the step before was written during the harvest; the update changes its tensors
            step = step.log(run.checkpoints.finish())
            step = step.log(run.unpark(policy))
            step, updated = run.update(step, policy, trees)
            step = step.log(run.park(policy))
            run.report_mismatch(updated, rollouts)
            step = step.log(rollouts.update_weights(policy))
            step = run.evaluate_if_due(step, rollouts)
            run.end(step)
            run.checkpoint_if_due(step, policy)
            del step, trees  # free these arrays before the next step's are made
        # a run that STOP ended is neither evaluated nor exported: the same command resumes it
        if run.steps == until:
            run.export(policy)
        elif run.complete:
            run.evaluations.evaluate("after", rollouts, run.steps)
            # the export needs the room of the KV cache
            rollouts.sleep()
            run.export(policy)
        run.report(rollouts)


def harvest_only(job: Job, out: Path, benchmark: BenchmarkRecipe | None = None) -> None:
    """Record one step's scored rollouts, or those of a ``benchmark``, under ``out``, with the weights that
    the recipe starts from. A harvest that was cut off is completed."""
    _require_sampling(job, "eqlen harvest")
    with Session(job) as session:
        hold: Hold | None = None  # until this function ends
        if distributed.is_rank0():
            out.mkdir(parents=True, exist_ok=True)
            hold = Hold(out)
            keep_inputs(out, job.recipe)
            write_text(out / RECIPE, dump(job.recipe))
            events.append(out, "harvest")
        session.keep_date(out)
        if benchmark is not None:
            generator = OneHarvest(session, out, problems(session, benchmark))
        else:
            generator = Generator(session, out, synced=False, source=start_prompts(session))
        step = generator.collect(Step(number=0, policy_version=0))
        if hold is not None:
            # a later start of the same SLURM job may have taken the folder over
            hold.check()
        for _, why in unforked(job.recipe, step.metrics):
            session.progress.warn(why)
        session.progress.say(f"{len(step.rollouts)} rollouts in {out / step.name}")


def evaluate_only(job: Job, out: Path, run: Path) -> None:
    """Evaluate the model at ``model.path``, write the results to ``out`` and print a table. ``run``: folder
    whose first start dates the prompts (``Session.keep_date``), or a recipe's file: today."""
    with Session(job) as session:
        if distributed.is_rank0():
            responses_of(out).mkdir(parents=True, exist_ok=True)
            session.enter(closing(Hold(responses_of(out))))
        session.keep_date(run)
        results, metrics = evaluate_all(session, Generator(session, out.parent, synced=False), out, "model")
        session.progress.say(leaderboard(results, metrics["time/evaluate"] * distributed.world_size()))


def _require_sampling(job: Job, option: str) -> None:
    if job.recipe.supervised:
        raise ValueError(f"{option}: objective: sft samples and records no rollouts")


def start_rollouts(
    session: Session, streams: Path, replay: Path | None, prompts: PromptSource | None
) -> Rollouts:
    """Return the source of the recipe's rollouts, recorded under ``streams``."""
    if replay is not None:
        if session.recipe.evaluation.benchmarks:
            session.progress.say("--replay starts no engine: no benchmark is evaluated")
        return Replay(session, replay)
    if not session.recipe.generates:
        return Demonstrations(session, prompts, None)
    generator = Generator(session, streams, source=prompts)
    for overlap in prompts.overlaps(generator.benchmarks) if prompts else ():
        session.progress.warn(overlap)
    if session.recipe.supervised:
        return Demonstrations(session, prompts, generator)
    return Ahead(generator) if session.recipe.rollout.staleness else generator

"""One function per ``eqlen`` command. Heavy modules are imported where needed: others start at once."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_eqlen.engines.server.gate import authorization
from megatron_eqlen.files import refuse_existing, refuse_unwritable, step_name, streams_of
from megatron_eqlen.job import Job, answering, load
from megatron_eqlen.objectives.checks import remarks
from megatron_eqlen.processes.collector import importing
from megatron_eqlen.processes.interrupts import Interrupts, watch
from megatron_eqlen.recipe import Recipe, RecipeError
from megatron_eqlen.recipe.contents import changed, is_whole
from megatron_eqlen.recipe.inputs import missing_inputs, pinned
from megatron_eqlen.recipe.load import RECIPE, dump, load_run
from megatron_eqlen.recipe.yaml_values import to_yaml
from megatron_eqlen.run.run_folder import BEGAN, IMPORTED, RunFolder, check_harvest


def train(arguments: argparse.Namespace) -> int:
    recipe = load(arguments.recipe, arguments.overrides)
    if arguments.dry_run and not (arguments.start or arguments.replay):
        return _print_plan(Job(recipe), arguments.all)
    if arguments.dry_run or arguments.all:
        raise ValueError("expected --all only with --dry-run, and --dry-run without --from and --replay")
    job = Job(recipe := pinned(recipe, recipe.run_folder))
    folder = RunFolder(recipe)
    folder.check(recipe)
    # The process that starts the ranks, and rank 0 again, which finds it done.
    if arguments.start and os.environ.get("RANK", "0") == "0":
        folder.begin_from(arguments.start, recipe)
    from megatron_eqlen.report.status import is_complete  # imports what `eqlen plan` has no use for

    if is_complete(folder.path, recipe):
        # a command that asked for more, and failed before its first step, has left its own recipe
        if not is_complete(folder.path, load_run(folder.path)):
            folder.write_recipe(recipe)
        print(f"{folder.path}: complete; see {folder.report}")
        return 0
    if recipe.rollout.engine == "server" and not arguments.replay:
        authorization()  # without a secret, refuse before anything is loaded
    return _on_ranks(job, lambda loop: loop.train(job, arguments.replay), folder.stop)


def plan(arguments: argparse.Namespace) -> int:
    from megatron_eqlen.cli.submit import load_with_servers

    recipe = load_with_servers(arguments.recipe, arguments.overrides, arguments.servers)
    return _print_plan(Job(recipe), arguments.all, arguments.servers)


def submit(arguments: argparse.Namespace) -> int:
    from megatron_eqlen.cli.submit import Submission

    submission = Submission(arguments.recipe, arguments.overrides, arguments.servers, arguments.sbatch)
    if arguments.dry_run:
        print(submission.script(), end="")
        if missing := missing_inputs(submission.recipe):
            print(f"WARNING: {missing}", file=sys.stderr)
        return 0
    return submission.submit()


def check(arguments: argparse.Namespace) -> int:
    with importing():
        import megatron_eqlen.models.config  # noqa: F401  before a check imports Megatron-Core alone
    from megatron_eqlen.check import CHECKS, check
    from megatron_eqlen.check.finding import Check, Finding, Place

    def start(place: Place) -> Finding | None:
        if place.job is None:
            return None
        _refuse(place.job)
        return Finding("ok", f"{place.folder} can begin or resume")

    recipe = load(arguments.recipe, arguments.overrides) if arguments.recipe else None
    checks = [*CHECKS, Check("start", start, in_short=False, of_inputs=True)]
    job = Job(pinned(recipe, recipe.run_folder)) if recipe else None
    return check(job, arguments.short, checks)


def _refuse(job: Job) -> None:
    """Raise ValueError for what training would refuse, as far as this machine can tell."""
    import torch

    from megatron_eqlen.check.machine import refuse_unfit
    from megatron_eqlen.models.config import transformer_config

    recipe = job.recipe
    RunFolder(recipe).check(recipe)
    if recipe.rollout.engine == "server":
        authorization()
    job.check_layout()
    # A login node has no GPU: what follows depends on the machine that trains.
    if recipe.cluster.device == "cpu" or torch.cuda.is_available():
        refuse_unfit(recipe.cluster)
        dtype = getattr(torch, recipe.model.dtype)
        transformer_config(job.model, recipe.parallel, dtype, **job.megatron.model)
        # Servers read their options themselves.
        if (rollout := recipe.rollout).vllm and recipe.colocated:
            from megatron_eqlen.engines.lifecycle import configuration, contained

            # vLLM checks its options as for one GPU, since no other rank is here.
            alone = rollout.model_copy(update={"tensor_parallel": 1})
            with contained():
                configuration(str(job.folder), alone, recipe.model.dtype, recipe.longest_context, recipe.seed)


def recipe(arguments: argparse.Namespace) -> int:
    from megatron_eqlen.cli.translate import translate
    from megatron_eqlen.files import write_text

    translation = translate(arguments.trainer, arguments.file, arguments.words)
    text = translation.text(f"{arguments.trainer}'s {arguments.file.name}")
    if arguments.out is None:
        print(text, end="")
        return 0
    refuse_existing(arguments.out)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    write_text(arguments.out, text)
    # What became of each key of theirs, which the file has as comments above the keys.
    comments = (line for line in text.splitlines(keepends=True) if line.startswith("#"))
    print("".join(line[2:] or "\n" for line in comments), end="")
    return 0


def new(arguments: argparse.Namespace) -> int:
    from megatron_eqlen.cli.new import write

    print(write(arguments.kind, arguments.module))
    return 0


def _print_plan(job: Job, everything: bool, server_nodes: int = 0) -> int:
    """Print the keys of a recipe that differ from their defaults, or ``everything``, and its plan."""
    from megatron_eqlen.objectives.registry import with_defaults
    from megatron_eqlen.plan.text import describe

    plan, changed = describe(job, server_nodes), job.recipe.model_dump(mode="json", exclude_defaults=True)
    print(dump(with_defaults(job)) if everything else to_yaml(changed), plan, sep="\n")
    for remark in filter(None, (missing_inputs(job.recipe), *remarks(job))):
        print(f"WARNING: {remark}")
    return 0


def harvest(arguments: argparse.Namespace) -> int:
    recipe, benchmark = load(arguments.recipe, arguments.overrides), None
    if arguments.benchmark is not None:
        recipe, benchmark = answering(recipe, arguments.benchmark)
    job = Job(pinned(recipe, arguments.out))
    check_harvest(arguments.out, job.recipe)
    return _on_ranks(job, lambda loop: loop.harvest_only(job, arguments.out, benchmark))


def evaluate(arguments: argparse.Namespace) -> int:
    recipe, model, out = arguments.recipe, arguments.model, arguments.out
    # A run folder stands for its recipe, its exported model and a file for the result.
    if recipe.is_dir():
        model, out = model or recipe / "export", out or recipe / "evaluated.json"
        if not (arguments.model or is_whole(model)):
            wrong = ", ".join(changed(model)[:3]) if model.exists() else ""
            why = "the run has not ended" if (recipe / RECIPE).exists() else f"the folder has no {RECIPE}"
            found = f"other files than the run wrote: {wrong}" if wrong else f"none: {why}"
            raise ValueError(f"{model}: expected the run's model, found {found}; name a model by --model")
        recipe /= RECIPE
    if model and (named := [word for word in arguments.overrides if word.startswith("model.path=")]):
        raise ValueError(f"{named[0]}: --model names another model, {model}: name one of them, by --model")
    # a revision is that of the recipe's own model
    other = [f"model.path={model}", "model.revision=null"] if model else []
    asked = load(recipe, [*other, *arguments.overrides], recipe.parent if arguments.recipe.is_dir() else None)
    if not asked.evaluation.benchmarks:
        raise ValueError(f"{recipe}: evaluation.benchmarks: expected what to evaluate, found none")
    # what it trains with is not read, and need not be here
    without = {"data": asked.data.model_copy(update={"sources": []}), "teacher": type(asked.teacher)()}
    job = Job(pinned(asked.model_copy(update=without)))
    if out is None:
        raise ValueError("--out: expected a result file (a run folder has a default)")
    refuse_existing(out)
    refuse_unwritable(out.parent)
    return _on_ranks(job, lambda loop: loop.evaluate_only(job, out, arguments.recipe))


def probe(arguments: argparse.Namespace) -> int:
    from megatron_eqlen.run.probe import ProbeFolder, ProbeOptions, Target
    from megatron_eqlen.run.probe import probe as continue_rollouts

    run: Path = arguments.run
    names = ("run", "step", "at", "samples", "budget", "seed", "force")
    job = Job(pinned(load(run / RECIPE, run=run), run))
    target = Target(job, ProbeOptions(**{name: getattr(arguments, name) for name in names}))
    folder = ProbeFolder(target, arguments.out or run / "probes" / step_name(arguments.step))
    # Ranks that this command starts run it again, and print nothing.
    if "RANK" not in os.environ:
        print(target.cost(), flush=True)
        if arguments.dry_run:
            return 0
    if os.environ.get("RANK", "0") == "0":
        refuse_unwritable(folder.out)
        folder.prepare()
    # Weights between two checkpoints are trained again from the recorded steps.
    if target.steps and not is_whole(folder.weights):
        again = folder.training
        status = _on_ranks(again, lambda loop: loop.train(again, target.streams, target.steps))
        if status or "RANK" in os.environ:  # ranks that another command started: it goes on
            return status
    return _on_ranks(folder.sampling, lambda _: continue_rollouts(folder))


def convert(arguments: argparse.Namespace) -> int:
    from megatron_eqlen.cli.convert import main

    return main(arguments.direction, arguments.arguments)


def report(arguments: argparse.Namespace) -> int:
    from megatron_eqlen.report.page import write_page, write_step_page
    from megatron_eqlen.report.recorded import recorded_advice

    if arguments.step is not None:
        print(write_step_page(arguments.run, *arguments.step))
        return 0
    print(write_page(arguments.run))
    if advice := recorded_advice(arguments.run, load_run(arguments.run))[1]:
        print(advice)
    return 0


def status(arguments: argparse.Namespace) -> int:
    from megatron_eqlen.report.status import print_status

    print_status(arguments.run)
    return 0


def compare(arguments: argparse.Namespace) -> int:
    for run in arguments.runs:
        run.stat()  # raises FileNotFoundError
    if arguments.out is None and (arguments.over or arguments.charts):
        raise ValueError("--over and --charts say what is drawn: expected --out FOLDER, too")
    from megatron_eqlen.experiments.compare import compare_runs

    compare_runs(arguments.runs, arguments.baseline, arguments.out, arguments.over, arguments.charts)
    return 0


def sweep(arguments: argparse.Namespace) -> int:
    from megatron_eqlen.cli import sweep as command

    if arguments.jobs > 1 and (arguments.dry_run or arguments.tables):
        raise ValueError(f"--jobs: {arguments.jobs} at a time, but --dry-run and --tables run nothing")
    plan = command.read(arguments.sweep, arguments.overrides)
    if arguments.dry_run:
        print(command.description(plan), *command.submissions(plan), sep="\n")
        return 0
    return command.tables(plan) if arguments.tables else command.run(plan, arguments.jobs)


def inspect(arguments: argparse.Namespace) -> int:
    for path in filter(None, (arguments.streams, arguments.model)):
        path.stat()  # raises FileNotFoundError
    from rich.console import Console

    from megatron_eqlen.report.text import print_rollouts, recipe_of

    streams = streams_of(arguments.streams)
    recipe = load(arguments.recipe) if arguments.recipe else recipe_of(streams)
    model = arguments.model or (recipe and Job(recipe).folder)
    if model is None or not model.exists():
        lacks = f"no model in {model}" if model else f"no run's {RECIPE} above it"
        raise ValueError(f"{streams}: {lacks}: name the tokenizer's folder by --model")
    print_rollouts(streams, model, arguments.limit, recipe, Console(highlight=False), arguments.json)
    return 0


def _on_ranks(job: Job, work: Callable[[Any], None], stop: Path | None = None) -> int:
    """Call ``work`` with the module ``run.loop`` in this process if it is a rank (or the only one), else in
    ranks started here. ``stop``: the file that asks the run to stop. A layout that cannot start is refused
    before any process is."""
    with importing():
        from megatron_eqlen.check.machine import refuse_unfit

    # Once, before the ranks start, which then find all in the cache.
    job.fetch()
    job.check_layout()
    refuse_unfit(job.recipe.cluster)
    return _start(job.recipe, work, Interrupts(stop))


def _start(recipe: Recipe, work: Callable[[Any], None], interrupts: Interrupts) -> int:
    from megatron_eqlen.processes.lifeline import die_with_launcher, taking_along

    die_with_launcher()
    # Older STOP files are not for this command.
    os.environ.setdefault(BEGAN, str(IMPORTED))
    with taking_along():
        # Several ranks on this machine, and no launcher above: they run the same command, and find RANK set.
        # So does a single one where a program has called ``main``, which may call it again.
        if "RANK" not in os.environ and (recipe.world_size > 1 or sys.argv[0] == "eqlen"):
            if recipe.cluster.nodes > 1:
                why = f"cluster.nodes: {recipe.cluster.nodes} nodes are started by a launcher"
                raise RecipeError(f"{why}: `eqlen submit`, or torchrun on every node")
            with importing():
                from megatron_eqlen.processes.launch import launch
            return launch(recipe.cluster.processes_per_node, sys.argv[1:], interrupts)
        if "RANK" not in os.environ:  # the launcher handles the signals of its ranks
            watch(interrupts)
        with importing():
            from megatron_eqlen.run import loop
        work(loop)
    return 0

"""The ``eqlen`` command: reads the arguments, starts the ranks where needed, and calls one verb."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from megatron_eqlen import failures, layout
from megatron_eqlen.interrupts import Interrupts, watch
from megatron_eqlen.quiet import quiet
from megatron_eqlen.recipe import Recipe, RecipeError
from megatron_eqlen.recipe_checks import check_inputs
from megatron_eqlen.recipe_load import dump, load
from megatron_eqlen.run_folder import RunFolder

OVERRIDES_HELP = "override a recipe key, for example objective=dapo loss.kl_coef=0"


def main(argv: list[str] | None = None) -> int:
    """Run one ``eqlen`` command; returns its exit status. User mistakes end with one line on stderr."""
    arguments = _parse(argv)
    quiet()
    try:
        return arguments.command(arguments)
    except Exception as error:
        expected = failures.is_expected(error)
        if failures.record(error):  # the launcher tells it
            return 2 if expected else 1
        if not expected:
            raise
        rank = f"rank {os.environ['RANK']}: " if os.environ.get("RANK", "0") != "0" else ""
        print(f"eqlen {arguments.name}: {rank}{failures.words(error)}", file=sys.stderr)
        return 2


def _parse(argv: list[str] | None) -> argparse.Namespace:
    """Overrides may stand before, between and after options; argparse alone takes only the first of them.
    What follows ``--`` is for sbatch."""
    parser = _parser()
    words = sys.argv[1:] if argv is None else argv
    end = words.index("--") if words[:1] == ["submit"] and "--" in words else len(words)
    arguments, rest = parser.parse_known_args(words[:end])
    arguments.sbatch = words[end + 1 :]
    strange = [text for text in rest if text.startswith("-") or "=" not in text]
    if strange or (rest and "overrides" not in arguments):
        parser.error(f"{arguments.name}: unrecognized arguments: {' '.join(strange or rest)}")
    if rest:
        arguments.overrides += rest
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="eqlen",
        description="Reinforcement learning of reasoning models on equal-length pairs.",
        epilog="EQLEN_TRACEBACK=1 shows an error's traceback, EQLEN_VERBOSE=1 the output of libraries.",
    )
    commands = parser.add_subparsers(dest="name", required=True, metavar="COMMAND")

    train = _add(commands, "train", _train, "train as a recipe says; the same command resumes a run")
    _add_recipe(train)
    train.add_argument(
        "--dry-run", action="store_true", help="print the resolved recipe and its plan, then stop"
    )
    train.add_argument(
        "--replay",
        type=Path,
        metavar="STREAMS",
        help="train on recorded rollouts (a run's streams/ folder), no engine",
    )

    plan = _add(commands, "plan", _plan, "print what a recipe needs: layout, memory, tokens, sbatch command")
    _add_recipe(plan)

    submit = _add(commands, "submit", _submit, "train a recipe as a SLURM job; what follows -- is for sbatch")
    _add_recipe(submit)
    submit.add_argument(
        "--servers",
        type=int,
        default=0,
        metavar="NODES",
        help="generate on vLLM servers, on nodes of their own",
    )
    submit.add_argument("--dry-run", action="store_true", help="print the batch script and submit nothing")

    check = _add(commands, "check", _check, "what is installed and works here, and what a recipe lacks")
    check.add_argument("recipe", type=Path, nargs="?", help="recipe file (YAML); default: none in particular")
    check.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=OVERRIDES_HELP)
    check.add_argument("--short", action="store_true", help="what takes seconds; print what is not ok")

    harvest = _add(commands, "harvest", _harvest, "generate and score one step's rollouts, no trainer")
    _add_recipe(harvest)
    harvest.add_argument("--out", type=Path, required=True, help="folder for the recorded rollouts")

    evaluate = _add(commands, "evaluate", _evaluate, "evaluate a model on the recipe's benchmarks")
    _add_recipe(evaluate)
    evaluate.add_argument("--model", type=Path, help="Hugging Face folder (default: the recipe's model.path)")
    evaluate.add_argument("--out", type=Path, required=True, help="result file (JSON)")

    convert = _add(commands, "convert", _convert, "convert a model between Hugging Face and Megatron")
    convert.add_argument("direction", choices=("hf-to-megatron", "megatron-to-hf"))
    convert.add_argument("arguments", nargs=argparse.REMAINDER, help="see `eqlen convert DIRECTION --help`")

    report = _add(commands, "report", _report, "write a run folder's report.html again")
    report.add_argument("run", type=Path, help="run folder")
    report.add_argument(
        "--serve", action="store_true", help="show a page instead that follows the run, on this machine only"
    )
    report.add_argument("--port", type=int, help="of that page (default 8423; 0: any that is free)")

    status = _add(commands, "status", _status, "where a run stands: step, stage, rate, alive or dead")
    status.add_argument("run", type=Path, help="run folder")
    status.add_argument("--json", action="store_true", help="print everything as JSON")

    compare = _add(commands, "compare", _compare, "print runs side by side: accuracy, difference, efficiency")
    compare.add_argument("runs", type=Path, nargs="+", help="run folders, or folders that contain some")
    compare.add_argument(
        "--baseline", help="baseline method (default: the first in the table after the base)"
    )
    compare.add_argument(
        "--interval",
        choices=("headline", "paper", "t"),
        default="headline",
        help="headline: resamples seeds and problems; paper and t: seeds only, problems held fixed",
    )
    compare.add_argument("--json", type=Path, metavar="FILE", help="write the tables there, too")

    _add_sweep(commands)

    inspect = _add(commands, "inspect", _inspect, "print recorded rollouts as text")
    inspect.add_argument(
        "streams", type=Path, help="a run's streams/ folder, one of its steps, or an .arrow file"
    )
    inspect.add_argument(
        "--model", type=Path, required=True, help="Hugging Face folder whose tokenizer decodes"
    )
    inspect.add_argument(
        "--recipe", type=Path, help="recipe they were trained with (default: recipe.yaml of their run)"
    )
    inspect.add_argument("--limit", type=int, default=5, help="rollouts to print (default 5)")
    inspect.add_argument(
        "--worst",
        action="store_true",
        help="print the token of each step about which trainer and engine disagree most, the worst first",
    )
    return parser


def _add(commands: argparse._SubParsersAction, name: str, verb: object, text: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text, description=text)
    parser.set_defaults(command=verb)
    return parser


def _add_sweep(commands: argparse._SubParsersAction) -> None:
    about = "run recipes x methods x seeds at equal cost, then make tables and figures; resumes like train"
    sweep = _add(commands, "sweep", _sweep, about)
    sweep.add_argument("sweep", type=Path, help="sweep file (YAML), for example recipes/paper_tables.yaml")
    sweep.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="override recipe keys of all runs")
    sweep.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at a time (default 1)")
    instead = sweep.add_mutually_exclusive_group()
    instead.add_argument("--dry-run", action="store_true", help="print the runs and what they may spend")
    instead.add_argument("--tables", action="store_true", help="only make tables of the runs that have ended")
    instead.add_argument("--slurm", action="store_true", help="print the script that submits all to SLURM")
    instead.add_argument("--cell", metavar="NAME", help="print a run's arguments of eqlen train, one a line")
    sweep.add_argument(
        "--into",
        type=Path,
        metavar="FILE.md",
        help="put the tables into this document, too, between the lines that docs/results.md has",
    )
    sweep.add_argument("--submit", action="store_true", help="with --slurm: run that script")


def _add_recipe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", type=Path, help="recipe file (YAML)")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=OVERRIDES_HELP)


def _train(arguments: argparse.Namespace) -> int:
    recipe = load(arguments.recipe, arguments.overrides)
    if arguments.dry_run:
        return _print_plan(recipe)
    folder = RunFolder(recipe)
    folder.check(recipe)
    if folder.ended(recipe):
        print(f"{folder.path}: complete; see {folder.report}")
        return 0

    def work() -> None:
        from megatron_eqlen.loop import train

        train(recipe, arguments.replay)

    return _on_ranks(recipe, work, folder.stop)


def _plan(arguments: argparse.Namespace) -> int:
    return _print_plan(load(arguments.recipe, arguments.overrides))


def _submit(arguments: argparse.Namespace) -> int:
    from megatron_eqlen.submit import Submission

    submission = Submission(arguments.recipe, arguments.overrides, arguments.servers, arguments.sbatch)
    if arguments.dry_run:
        print(submission.script(), end="")
        return 0
    return submission.submit()


def _check(arguments: argparse.Namespace) -> int:
    from megatron_eqlen.check import check

    recipe = load(arguments.recipe, arguments.overrides) if arguments.recipe else None
    return check(recipe, arguments.short)


def _print_plan(recipe: Recipe) -> int:
    from megatron_eqlen.objectives.registry import with_defaults
    from megatron_eqlen.plan import describe

    plan = describe(recipe)
    print(dump(with_defaults(recipe)))
    print(plan)
    return 0


def _harvest(arguments: argparse.Namespace) -> int:
    recipe = load(arguments.recipe, arguments.overrides)

    def work() -> None:
        from megatron_eqlen.loop import harvest_only

        harvest_only(recipe, arguments.out)

    return _on_ranks(recipe, work)


def _evaluate(arguments: argparse.Namespace) -> int:
    overrides = [*arguments.overrides, *([f"model.path={arguments.model}"] if arguments.model else [])]
    recipe = load(arguments.recipe, overrides)

    def work() -> None:
        from megatron_eqlen.loop import evaluate_only

        evaluate_only(recipe, arguments.out)

    return _on_ranks(recipe, work)


def _convert(arguments: argparse.Namespace) -> int:
    from megatron_eqlen import convert_command

    directions = {
        "hf-to-megatron": convert_command.hf_to_megatron,
        "megatron-to-hf": convert_command.megatron_to_hf,
    }
    return directions[arguments.direction](arguments.arguments)


def _report(arguments: argparse.Namespace) -> int:
    if arguments.serve:
        from megatron_eqlen.live.server import PORT, serve

        serve(arguments.run, PORT if arguments.port is None else arguments.port)
        return 0
    if arguments.port is not None:
        raise ValueError("--port: expected with --serve")
    from megatron_eqlen.report.page import write_page

    print(write_page(arguments.run))
    return 0


def _status(arguments: argparse.Namespace) -> int:
    from megatron_eqlen.live.status import print_status

    print_status(arguments.run, arguments.json)
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    from megatron_eqlen.report.compare import compare_runs

    compare_runs(arguments.runs, arguments.baseline, arguments.interval, arguments.json)
    return 0


def _sweep(arguments: argparse.Namespace) -> int:
    from megatron_eqlen.sweep import command

    plan = command.read(arguments.sweep, arguments.overrides)
    if arguments.submit and not arguments.slurm:
        raise ValueError("--submit: expected with --slurm")
    if arguments.dry_run:
        return command.describe(plan)
    if arguments.slurm:
        return command.to_slurm(plan, arguments.sweep, arguments.overrides, arguments.submit)
    if arguments.cell:
        return command.cell(plan, arguments.cell)
    if arguments.tables:
        return command.tables(plan, arguments.into)
    return command.run(plan, arguments.jobs, into=arguments.into)


def _inspect(arguments: argparse.Namespace) -> int:
    from megatron_eqlen.report.text import print_rollouts, print_worst

    recipe = load(arguments.recipe) if arguments.recipe else None
    show = print_worst if arguments.worst else print_rollouts
    show(arguments.streams, arguments.model, arguments.limit, recipe)
    return 0


def _on_ranks(recipe: Recipe, work: Callable[[], None], stop: Path | None = None) -> int:
    """Do ``work`` in this process if it is a rank (or the only one), else in ranks started here. ``stop``:
    the file that asks it to stop.

    A layout that cannot start is refused here, before any process is started.
    """
    from megatron_eqlen.hf.config import read_config  # imports Megatron-Core

    check_inputs(recipe)
    layout.check(recipe, read_config(recipe.model.path))
    return _start(recipe, work, Interrupts(stop))


def _start(recipe: Recipe, work: Callable[[], None], interrupts: Interrupts) -> int:
    from megatron_eqlen.launch import launch
    from megatron_eqlen.lifeline import die_with_launcher

    die_with_launcher()
    if _needs_launch(recipe):
        return launch(recipe.cluster.processes_per_node, sys.argv[1:], interrupts)
    if "RANK" in os.environ:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # it is for the launcher, who ends its ranks
    else:
        watch(interrupts)
    work()
    return 0


def _needs_launch(recipe: Recipe) -> bool:
    """Whether this process must start the ranks itself: several on this machine and no launcher above."""
    if "RANK" in os.environ or recipe.world_size == 1:
        return False
    if recipe.cluster.nodes > 1:
        raise RecipeError(
            f"cluster.nodes: {recipe.cluster.nodes} nodes are started by a launcher: `eqlen submit`, or "
            f"torchrun on every node"
        )
    return True


if __name__ == "__main__":
    sys.exit(main())

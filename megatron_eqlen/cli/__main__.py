"""The ``eqlen`` command: its arguments and exit status. The work is in ``commands``."""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
from pathlib import Path

from megatron_eqlen.processes import interrupts

Verbs = argparse._SubParsersAction

OVERRIDES_HELP = "override a recipe key, for example objective=dapo loss.kl_coef=0"


def main(argv: list[str] | None = None) -> int:
    """Run one ``eqlen`` command and return its exit status. User mistakes end with one line on stderr, Ctrl-C
    with one line and status 130."""
    while (free := os.open(os.devnull, os.O_RDWR)) <= 2:  # a standard stream that was closed
        pass
    os.close(free)
    sys.stdout, sys.stderr = sys.stdout or open(1, "w"), sys.stderr or open(2, "w")  # noqa: SIM115
    interrupts.begin()  # before the other imports, which take long enough for Ctrl-C
    try:
        return _run(argv)
    except KeyboardInterrupt:
        return interrupts.end()


def _run(argv: list[str] | None) -> int:
    from megatron_eqlen.processes.bytecode import keep_bytecode

    keep_bytecode()
    from megatron_eqlen.processes import failures
    from megatron_eqlen.processes.quiet import quiet

    arguments = _parse(argv)
    quiet()
    try:
        from megatron_eqlen.cli import commands

        status = getattr(commands, arguments.name)(arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        if not _reader_left():
            raise
        return 128 + signal.SIGPIPE
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # rich's console has handled it
            return 128 + signal.SIGPIPE
        raise
    except Exception as error:
        expected = failures.is_expected(error)
        if failures.record(error):  # the launcher reports it
            return 2 if expected else 1
        if not expected:
            raise
        rank = f"rank {os.environ['RANK']}: " if os.environ.get("RANK", "0") != "0" else ""
        print(f"eqlen {arguments.name}: {rank}{failures.words(error)}", file=sys.stderr)
        return 2


def _reader_left() -> bool:
    """Return True if nobody reads this command's output any more (``eqlen inspect ... | head``)."""
    output = select.poll()
    output.register(sys.stdout, 0)
    if not output.poll(0):  # errors are always reported
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the interpreter's own flush
    return True


def _parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the arguments. Overrides may stand before, between and after options (argparse alone accepts only
    the first group); arguments after ``--`` are for sbatch."""
    parser = _parser()
    words = sys.argv[1:] if argv is None else argv
    end = words.index("--") if words[:1] == ["submit"] and "--" in words else len(words)
    arguments, rest = parser.parse_known_args(words[:end])
    arguments.sbatch = words[end + 1 :]
    strange = [text for text in rest if text.startswith("-") or "=" not in text]
    if strange or (rest and "overrides" not in arguments):
        hint = _as_override(rest) if "overrides" in arguments else ""
        parser.error(f"{arguments.name}: unrecognized arguments: {' '.join(strange or rest)}{hint}")
    if rest:
        arguments.overrides += rest
    return arguments


def _as_override(rest: list[str]) -> str:
    """Return the end of a message about options that are recipe keys: ``--steps 3`` means ``steps=3``."""
    from megatron_eqlen.recipe.keys import all_keys

    for word, after in zip(rest, [*rest[1:], "VALUE"], strict=True):
        key, equals, value = word.removeprefix("--").replace("-", "_").partition("=")
        if word.startswith("--") and tuple(key.split(".")) in all_keys():
            value = word.partition("=")[2] if equals else "VALUE" if after.startswith("-") else after
            return f" (a recipe key is given without dashes: {key}={value})"
    return ""


def _parser() -> argparse.ArgumentParser:
    from importlib.metadata import version

    parser = argparse.ArgumentParser(
        prog="eqlen",
        description="Reinforcement learning of reasoning models on equal-length pairs.",
        epilog="EQLEN_TRACEBACK=1 shows an error's traceback, EQLEN_VERBOSE=1 the output of libraries.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {version('megatron-eqlen')}")
    verbs = parser.add_subparsers(dest="name", required=True, metavar="COMMAND")
    _add_training(verbs)
    _add_parts(verbs)
    _add_results(verbs)
    _add_sweep(verbs)
    _add_inspect(verbs)
    return parser


def _add_training(verbs: Verbs) -> None:
    train = _add(verbs, "train", "train as a recipe says; the same command resumes a run")
    _add_recipe(train)
    train.add_argument(
        "--dry-run", action="store_true", help="print what differs from defaults, and the plan, then stop"
    )
    train.add_argument("--all", action="store_true", help="with --dry-run: print every key")
    train.add_argument(
        "--replay",
        type=Path,
        metavar="STREAMS",
        help="train on recorded rollouts (a run's streams/ folder), no engine",
    )

    train.add_argument(
        "--from",
        dest="start",
        metavar="RUN@STEP",
        help="begin after a step of another run, from its checkpoint",
    )

    plan = _add(verbs, "plan", "print what a recipe needs: layout, memory, tokens, sbatch command")
    _add_recipe(plan)
    plan.add_argument("--all", action="store_true", help="print every key, not only what differs")

    submit = _add(verbs, "submit", "train a recipe as a SLURM job; what follows -- is for sbatch")
    _add_recipe(submit)
    submit.add_argument(
        "--servers",
        type=int,
        default=0,
        metavar="NODES",
        help="generate on vLLM servers, on nodes of their own",
    )
    submit.add_argument("--dry-run", action="store_true", help="print the batch script and submit nothing")

    recipe = _add(verbs, "recipe", "write a recipe from another trainer's configuration (docs/from_verl.md)")
    recipe.add_argument(
        "file",
        type=Path,
        help="launch script (bash runs it in the sandbox), resolved YAML, saved arguments, or TRL's Python",
    )
    recipe.add_argument("words", nargs="*", metavar="NAME=VALUE", help="a script's environment and arguments")
    recipe.add_argument(
        "--from",
        dest="trainer",
        required=True,
        metavar="TRAINER[@VERSION]",
        help="verl, trl, slime or open-r1; what the file leaves out has the defaults of that version",
    )
    recipe.add_argument("--out", type=Path, metavar="FILE", help="recipe file to write (default: print)")

    check = _add(verbs, "check", "what is installed and works here, and what a recipe lacks")
    check.add_argument("recipe", type=Path, nargs="?", help="recipe file (YAML); default: none in particular")
    check.add_argument("overrides", nargs="*", default=[], metavar="KEY=VALUE", help=OVERRIDES_HELP)
    check.add_argument("--short", action="store_true", help="what takes seconds; print what is not ok")


def _add_parts(verbs: Verbs) -> None:
    """Add the commands that do a part of training, or prepare it."""
    harvest = _add(verbs, "harvest", "generate and score one step's rollouts, no trainer")
    _add_recipe(harvest)
    harvest.add_argument("--out", type=Path, required=True, help="folder for the recorded rollouts")

    evaluate = _add(verbs, "evaluate", "evaluate a model on the recipe's benchmarks")
    _add_recipe(evaluate, "recipe file (YAML), or a run folder")
    evaluate.add_argument(
        "--model", type=Path, help="Hugging Face folder or name (default: model.path, or RUN/export)"
    )
    evaluate.add_argument("--out", type=Path, help="result file (default for a run: RUN/evaluated.json)")

    probe = _add(verbs, "probe", "continue a run's recorded responses anew: what each sentence changed")
    probe.add_argument("run", type=Path, help="run folder, or a folder of `eqlen harvest`")
    probe.add_argument("--step", type=_positive, required=True, metavar="N", help="step that recorded them")
    probe.add_argument(
        "--at", default="sentences", help="places: sentences, forks, every:TOKENS, or tokens as 10,20"
    )
    probe.add_argument("--samples", type=_positive, default=8, help="continuations of a place (default 8)")
    probe.add_argument(
        "--budget", type=_positive, metavar="TOKENS", help="tokens to generate (default: 4 times the step's)"
    )
    probe.add_argument("--seed", type=int, default=0, help="another gives other responses and draws")
    probe.add_argument("--out", type=Path, metavar="FOLDER", help="default: RUN/probes/step-N")
    probe.add_argument("--dry-run", action="store_true", help="print what it would cost")

    convert = _add(verbs, "convert", "convert a model between Hugging Face and Megatron")
    convert.add_argument("direction", choices=("hf-to-megatron", "megatron-to-hf"))
    convert.add_argument("arguments", nargs=argparse.REMAINDER, help="see `eqlen convert DIRECTION --help`")


def _add_results(verbs: Verbs) -> None:
    report = _add(verbs, "report", "write a run folder's report.html again")
    report.add_argument("run", type=Path, help="run folder")
    report.add_argument(
        "--step",
        type=_steps,
        metavar="N[-M]",
        help="write rollouts-N.html instead: all rollouts of these steps",
    )

    status = _add(verbs, "status", "where a run stands: step, stage, rate, alive or dead")
    status.add_argument("run", type=Path, help="run folder")

    compare = _add(verbs, "compare", "print runs side by side: accuracy, difference, efficiency")
    compare.add_argument("runs", type=Path, nargs="+", help="run folders, or folders that contain some")
    compare.add_argument(
        "--baseline", help="baseline method (default: the first in the table after the base)"
    )
    compare.add_argument(
        "--out", type=Path, metavar="FOLDER", help="write tables.md, tables.json and curves (SVG) there"
    )
    compare.add_argument("--over", choices=("steps", "gpu_hours", "generated_tokens", "flops"), help="x axis")
    compare.add_argument("--charts", nargs="+", metavar="TITLE", help="curves to draw (default: all)")


def _add_sweep(verbs: Verbs) -> None:
    about = "run recipes x methods x seeds at equal cost, then make tables and figures; resumes like train"
    sweep = _add(verbs, "sweep", about)
    sweep.add_argument("sweep", type=Path, help="sweep file (YAML), for example recipes/paper_tables.yaml")
    sweep.add_argument(
        "overrides", nargs="*", default=[], metavar="KEY=VALUE", help="override recipe keys of all runs"
    )
    sweep.add_argument("--jobs", type=_positive, default=1, metavar="N", help="runs at a time (default 1)")
    instead = sweep.add_mutually_exclusive_group()
    instead.add_argument("--dry-run", action="store_true", help="print runs, budgets, and eqlen submit lines")
    instead.add_argument("--tables", action="store_true", help="only make tables of the runs that have ended")


def _add_inspect(verbs: Verbs) -> None:
    inspect = _add(verbs, "inspect", "print recorded rollouts as text")
    inspect.add_argument(
        "streams", type=Path, help="a run, its streams/ folder, one of its steps, or an .arrow file"
    )
    inspect.add_argument(
        "--model", type=Path, help="Hugging Face folder whose tokenizer decodes (default: the run's)"
    )
    inspect.add_argument(
        "--recipe", type=Path, help="recipe they were trained with (default: recipe.yaml of their run)"
    )
    inspect.add_argument("--limit", type=_positive, default=5, help="rollouts to print (default 5)")


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"expected a number from 1 on, found {text!r}")
    return int(text)


def _steps(text: str) -> tuple[int, int]:
    """Return the first and the last of ``12`` or ``10-12``."""
    first, _, last = text.partition("-")
    if not (first.isdecimal() and (last or first).isdecimal() and 0 < int(first) <= int(last or first)):
        raise argparse.ArgumentTypeError(f"expected a step as 12, or steps as 10-12, found {text!r}")
    return int(first), int(last or first)


def _add(verbs: Verbs, name: str, text: str) -> argparse.ArgumentParser:
    """Add the command that runs the function ``name`` of ``commands``."""
    return verbs.add_parser(name, help=text, description=text)


def _add_recipe(parser: argparse.ArgumentParser, about: str = "recipe file (YAML)") -> None:
    parser.add_argument("recipe", type=Path, help=about)
    parser.add_argument("overrides", nargs="*", default=[], metavar="KEY=VALUE", help=OVERRIDES_HELP)


if __name__ == "__main__":
    sys.exit(main())

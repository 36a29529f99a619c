"""The ``eqlen`` command: its arguments and exit status. The work is in ``commands``."""

from __future__ import annotations

import argparse
import io
import os
import select
import signal
import sys
from pathlib import Path
from typing import Any

from megatron_eqlen.processes import interrupts


def main(argv: list[str] | None = None) -> int:
    """Run one ``eqlen`` command; return its status: 2 for user mistakes, 130 for Ctrl-C (one line each)."""
    # With descriptor 1 closed, the next file that is opened would get it, and what is printed.
    while (free := os.open(os.devnull, os.O_RDWR)) <= 2:  # a standard stream that was closed
        pass
    os.close(free)
    sys.stdout, sys.stderr = sys.stdout or open(1, "w"), sys.stderr or open(2, "w")  # noqa: SIM115
    # In a locale without UTF-8, too: a character that it lacks would end a run.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")
    interrupts.begin()  # before the other imports, which take long enough for Ctrl-C
    # Ranks get the same command. The name without a path says that a program has called this.
    before, sys.argv = sys.argv, sys.argv if argv is None else ["eqlen", *argv]
    try:
        return _run(argv)
    except KeyboardInterrupt:
        return interrupts.end()
    finally:
        sys.argv = before


def _run(argv: list[str] | None) -> int:
    from megatron_eqlen.processes.cores import share_cores
    from megatron_eqlen.processes.quiet import keep_bytecode, quiet

    keep_bytecode()
    share_cores()
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # PYTORCH_ALLOC_CONF would win; rows differ in length
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    from megatron_eqlen.processes import failures

    arguments = _parse(argv)
    quiet()
    try:
        from megatron_eqlen.cli import commands

        status = getattr(commands, arguments.name)(arguments)
        # Here, so that a reader that has left is noticed before Python's own flush.
        sys.stdout.flush()
        return status
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # rich's console has handled it
            return 128 + signal.SIGPIPE
        raise
    except Exception as error:
        # A broken pipe may lead to another process than the reader of this output.
        if isinstance(error, BrokenPipeError) and _reader_left():
            return 128 + signal.SIGPIPE
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
    """Parse the arguments. Overrides may stand before, between and after options, unlike in argparse."""
    parser = _parser()
    words = sys.argv[1:] if argv is None else argv
    # Only ``submit`` hands arguments on to another program.
    end = words.index("--") if words[:1] == ["submit"] and "--" in words else len(words)
    arguments, rest = parser.parse_known_args(words[:end])
    arguments.sbatch = words[end + 1 :]
    # The rest are overrides, unless they look like options or have no value.
    strange = [text for text in rest if text.startswith("-") or "=" not in text]
    if strange or (rest and "overrides" not in arguments):
        hint = _as_override(rest) if "overrides" in arguments else ""
        parser.error(f"{arguments.name}: unrecognized arguments: {' '.join(strange or rest)}{hint}")
    if rest:
        arguments.overrides = [*arguments.overrides, *rest]
    return arguments


def _as_override(rest: list[str]) -> str:
    """Return the end of a message about options that are recipe keys: ``--steps 3`` means ``steps=3``."""
    from megatron_eqlen.recipe.keys import all_keys

    for word, after in zip(rest, [*rest[1:], "VALUE"], strict=True):
        # ``--loss.kl-coef=0`` and ``--loss.kl_coef 0`` are both ``loss.kl_coef=0``.
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
    for command, (about, arguments) in COMMANDS.items():
        verb = verbs.add_parser(command, help=about, description=about)
        # A sweep's flags exclude each other; its other arguments do not.
        instead = verb.add_mutually_exclusive_group() if command == "sweep" else verb
        for name, (what, options) in arguments.items():
            place = instead if options is FLAG else verb
            place.add_argument(name, help=what or None, **options)
    return parser


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


FILE, NUMBER, FLAG = {"type": Path}, {"type": _positive}, {"action": "store_true"}
INTO, RUN = FILE | {"metavar": "FOLDER"}, {"run": ("run folder", FILE)}
SERVERS = ("generate on vLLM servers, on nodes of their own", NUMBER | {"default": 0, "metavar": "NODES"})
OVERRIDES = {"nargs": "*", "default": [], "metavar": "KEY=VALUE"}
RECIPE = {
    "recipe": ("recipe file (YAML)", FILE),
    "overrides": ("override a recipe key, for example objective=dapo loss.kl_coef=0", OVERRIDES),
}
# fmt: off
COMMANDS: dict[str, tuple[str, dict[str, tuple[str, dict[str, Any]]]]] = {
    "train": ("train as a recipe says; the same command resumes a run", RECIPE | {
        "--dry-run": ("print what differs from defaults, and the plan, then stop", FLAG),
        "--all": ("with --dry-run: print every key", FLAG),
        "--replay": ("train on recorded rollouts (a run's streams/ folder), no engine",
                     FILE | {"metavar": "STREAMS"}),
        "--from": ("begin after a step of another run, from its checkpoint",
                   {"dest": "start", "metavar": "RUN@STEP"}),
    }),
    "plan": ("print what a recipe needs: layout, memory, tokens, sbatch command", RECIPE | {
        "--all": ("print every key, not only what differs", FLAG),
        "--servers": SERVERS,
    }),
    "submit": ("train a recipe as a SLURM job; what follows -- is for sbatch", RECIPE | {
        "--servers": SERVERS,
        "--dry-run": ("print the batch script and submit nothing", FLAG),
    }),
    "recipe": ("write a recipe from another trainer's configuration (docs/from_verl.md)", {
        "file": ("launch script (bash runs it in the sandbox), resolved YAML, saved arguments, or TRL's "
                 "Python", FILE),
        "words": ("a script's environment and arguments", {"nargs": "*", "metavar": "NAME=VALUE"}),
        "--from": ("verl, trl, slime or open-r1; what the file leaves out has the defaults of that version",
                   {"dest": "trainer", "required": True, "metavar": "TRAINER[@VERSION]"}),
        "--out": ("recipe file to write (default: print)", FILE | {"metavar": "FILE"}),
    }),
    "new": ("write a file of your own that works, and its test, into this folder (docs/extending.md)", {
        "kind": ("", {"choices": ("reward", "environment", "objective", "reader")}),
        "module": ("name of the file, without .py", {"metavar": "NAME"}),
    }),
    "check": ("what is installed and works here, and what a recipe lacks", RECIPE | {
        "recipe": ("recipe file (YAML); default: none in particular", FILE | {"nargs": "?"}),
        "--short": ("what takes seconds; print what is not ok", FLAG),
    }),
    "harvest": ("generate and score one step's rollouts, no trainer", RECIPE | {
        "--out": ("folder for the recorded rollouts", FILE | {"required": True}),
        "--benchmark": ("answers to this benchmark of the recipe, sampled as its evaluation does",
                        {"metavar": "NAME"}),
    }),
    "evaluate": ("evaluate a model on the recipe's benchmarks", RECIPE | {
        "recipe": ("recipe file (YAML), or a run folder", FILE),
        "--model": ("Hugging Face folder or name (default: model.path, or RUN/export)", FILE),
        "--out": ("result file (default for a run: RUN/evaluated.json)", FILE),
    }),
    "probe": ("continue a run's recorded responses again: what each sentence changed", {
        "run": ("run folder, or a folder of `eqlen harvest`", FILE),
        "--step": ("step that recorded them", NUMBER | {"required": True, "metavar": "N"}),
        "--at": ("places: sentences, forks, every:TOKENS, or tokens as 10,20", {"default": "sentences"}),
        "--force": ("text that ends a response's thinking, put in at each place: accuracy over length",
                    {"metavar": "TEXT"}),
        "--samples": ("continuations of a place (default 8)", NUMBER | {"default": 8}),
        "--budget": ("tokens to generate (default: 4 times the step's)", NUMBER | {"metavar": "TOKENS"}),
        "--seed": ("another gives other responses and draws", {"type": int, "default": 0}),
        "--out": ("default: RUN/probes/step-N", INTO),
        "--dry-run": ("print what it would cost", FLAG),
    }),
    "convert": ("convert a model between Hugging Face and Megatron", {
        "direction": ("", {"choices": ("hf-to-megatron", "megatron-to-hf")}),
        "arguments": ("see `eqlen convert DIRECTION --help`", {"nargs": argparse.REMAINDER}),
    }),
    "report": ("write a run folder's report.html again", RUN | {
        "--step": ("write rollouts-N.html instead: all rollouts of these steps",
                   {"type": _steps, "metavar": "N[-M]"}),
    }),
    "status": ("where a run stands: step, stage, rate, alive or dead", RUN),
    "compare": ("print runs side by side: accuracy, difference, efficiency", {
        "runs": ("run folders, or folders that contain some", FILE | {"nargs": "+"}),
        "--baseline": ("baseline method (default: the first in the table after the base)", {}),
        "--out": ("write tables.md, tables.json and curves (SVG) there", INTO),
        "--over": ("x axis", {"choices": ("steps", "gpu_hours", "generated_tokens", "flops")}),
        "--charts": ("curves to draw (default: all)", {"nargs": "+", "metavar": "TITLE"}),
    }),
    "sweep": ("run recipes x methods x seeds at equal cost, then make tables and figures; "
              "resumes like train", {
        "sweep": ("sweep file (YAML), for example recipes/paper_tables.yaml", FILE),
        "overrides": ("override recipe keys of all runs", OVERRIDES),
        "--jobs": ("runs at a time (default 1)", NUMBER | {"default": 1, "metavar": "N"}),
        "--dry-run": ("print runs, budgets, and eqlen submit lines", FLAG),
        "--tables": ("only make tables of the runs that have ended", FLAG),
    }),
    "inspect": ("print recorded rollouts as text", {
        "streams": ("a run, its streams/ folder, one of its steps, or an .arrow file", FILE),
        "--model": ("Hugging Face folder whose tokenizer decodes (default: the run's)", FILE),
        "--recipe": ("recipe they were trained with (default: recipe.yaml of their run)", FILE),
        "--limit": ("rollouts to print (default 5)", NUMBER | {"default": 5}),
        "--json": ("print a line of JSON for each", FLAG),
    }),
}
# fmt: on
"""Text and arguments of each command; ``commands`` has its function. A sweep's flags exclude each other."""


if __name__ == "__main__":
    sys.exit(main())

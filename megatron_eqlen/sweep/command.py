"""The ways to call ``eqlen sweep``, one function each; each returns an exit status."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_eqlen.recipe.checks import check_inputs
from megatron_eqlen.sweep import slurm, text
from megatron_eqlen.sweep.cells import Plan
from megatron_eqlen.sweep.display import Display
from megatron_eqlen.sweep.runner import Runner, Start, start_process
from megatron_eqlen.sweep.schema import load_sweep


def read(path: Path, overrides: Sequence[str]) -> Plan:
    """Read the sweep's runs. Raises RecipeError for a file that is no sweep."""
    return Plan(load_sweep(path), overrides)


def describe(plan: Plan) -> int:
    print(text.describe(plan))
    return 0


def run(plan: Plan, jobs: int, start: Start = start_process, into: Path | None = None) -> int:
    """Run unfinished runs here, ``jobs`` at a time, and write the tables, also into the document ``into``;
    return 1 if a run failed."""
    for cell in plan.firsts:
        check_inputs(plan.some_recipe(cell))
    display = Display(plan)
    try:
        failed = Runner(plan, jobs, display, start).run()
    finally:
        display.close()
    tables(plan, into)
    return 1 if failed else 0


def to_slurm(plan: Plan, file: Path, overrides: Sequence[str], submit: bool) -> int:
    """Print the script that submits the sweep, or run it."""
    if submit:
        return slurm.submit(plan, file, overrides)
    print(slurm.script(plan, file, overrides), end="")
    return 0


def cell(plan: Plan, name: str) -> int:
    """Print the arguments of ``eqlen train`` for a run, one a line."""
    run = plan.cell(name)
    limits = plan.limits(run)
    if limits is None:
        raise ValueError(f"{name} may spend what the runs of {plan.sweep.reference} did: not all have ended")
    print(run.recipe_file, *run.overrides, *limits, sep="\n")
    return 0


def tables(plan: Plan, into: Path | None = None) -> int:
    """Write the tables and figures of the runs that have ended, and print the tables."""
    from megatron_eqlen.sweep import results

    text, *others = results.write(plan)
    if into is not None:
        results.write_into(into, plan.sweep.path)
    print(text.read_text(encoding="utf-8"))
    print("see", ", ".join(map(str, others)))
    return 0

"""The ways to call ``eqlen sweep``, one function each; each returns an exit status."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from megatron_eqlen.experiments.cells import Cell, Plan
from megatron_eqlen.experiments.runner import Runner
from megatron_eqlen.experiments.schema import OF_RUNS, load_sweep
from megatron_eqlen.recipe.budget import UNITS
from megatron_eqlen.recipe.inputs import fetch, pinned


def read(path: Path, overrides: Sequence[str]) -> Plan:
    """Read the sweep's runs. Raises RecipeError for a file that is no sweep, or a run that is invalid."""
    plan = Plan(load_sweep(path), overrides)
    plan.recipes()
    return plan


def run(plan: Plan, jobs: int) -> int:
    """Run unfinished runs here, ``jobs`` at a time, and write the tables; return 1 if a run failed."""
    for recipe in plan.recipes():
        fetch(pinned(recipe))  # the runs inherit the commits
    failed = Runner(plan, jobs).run()
    tables(plan)
    return 1 if failed else 0


def tables(plan: Plan) -> int:
    """Write the tables and figures of the runs that have ended, and print the tables."""
    from megatron_eqlen.experiments.results import write_results

    text, paths = write_results(plan)
    print(text)
    print("\nsee", ", ".join(map(str, paths)))
    return 0


def submissions(plan: Plan) -> Iterator[str]:
    """Yield ``eqlen submit`` commands of unfinished runs; a comment on those without a known budget."""
    waiting = 0
    for cell in plan.cells:
        if (limits := plan.limits(cell)) is None:
            waiting += 1
        elif not cell.ended(limits):
            yield shlex.join(["eqlen", "submit", cell.recipe_file, *cell.overrides, *limits])
    if waiting:
        yield f"# {waiting} runs wait for those of {plan.sweep.reference}: ask again when these have ended"


def description(plan: Plan) -> str:
    """Return the plan as text."""
    sweep = plan.sweep
    fewer = ", some with fewer" if sweep.fewer_seeds else ""
    lines = [
        f"sweep       {sweep.name}: {len(sweep.recipes)} recipes x {len(sweep.methods)} methods x "
        f"{len(sweep.seeds)} seeds{fewer} = {len(plan.cells)} runs in {sweep.path}"
    ]
    if sweep.reference is not None:
        capped = f", at most {sweep.max_steps} steps" if sweep.max_steps else ""
        lines.append(
            f"equal       each may spend as many {UNITS[sweep.match]} as {sweep.reference} did, on average "
            f"over its seeds{capped}"
        )
    # ``groupby`` needs neighbours: cells are in the order of recipes, then methods.
    for file, cells in groupby(plan.cells, key=lambda cell: cell.recipe_file):
        lines += ["", f"recipe      {file}", *_recipe(plan, [*cells])]
    return "\n".join(lines)


def _recipe(plan: Plan, cells: list[Cell]) -> list[str]:
    lines = []
    for _, group in groupby(cells, key=lambda cell: cell.method):
        seeds = [*group]
        lines.append(f"  {seeds[0].method:<22} {_limit(plan, seeds)}")
        made = [override for override in seeds[0].overrides if override.partition("=")[0] not in OF_RUNS]
        lines.append(f"  {'':<22}   {shlex.join(made) or 'as the recipe says'}")
    return lines


def _limit(plan: Plan, cells: list[Cell]) -> str:
    """Return how a method's runs end, and how many have ended."""
    if (limits := plan.limits(cells[0])) is None:
        return f"{UNITS[plan.sweep.match]} as {plan.sweep.reference}"
    done = sum(cell.ended(limits) for cell in cells)
    ended = f"; {done} of {len(cells)} runs have ended" if done else ""
    return cells[0].recipe(limits).budget.describe() + ended

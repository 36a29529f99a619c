"""Output of ``eqlen sweep --dry-run``: the runs, their overrides and budgets, and the total cost."""

from __future__ import annotations

import shlex
from itertools import groupby

from megatron_eqlen.plan.flops import planned_flops
from megatron_eqlen.plan.model import model_config
from megatron_eqlen.plan.speed import speeds
from megatron_eqlen.plan.workload import workload
from megatron_eqlen.recipe.budget import UNITS
from megatron_eqlen.report.format import compact
from megatron_eqlen.sweep.cells import Cell, Plan


def describe(plan: Plan) -> str:
    """Return the plan as text. Raises RecipeError for a run whose recipe is invalid."""
    sweep = plan.sweep
    lines = [
        f"sweep       {sweep.name}: {len(sweep.recipes)} recipes x {len(sweep.methods)} methods x "
        f"{len(sweep.seeds)} seeds = {len(plan.cells)} runs in {sweep.path}"
    ]
    if sweep.reference is not None:
        capped = f", at most {sweep.max_steps} steps" if sweep.max_steps else ""
        lines.append(
            f"equal       each may spend as many {UNITS[sweep.match]} as {sweep.reference} did, on average "
            f"over its seeds{capped}"
        )
    for file, cells in groupby(plan.cells, key=lambda cell: cell.recipe_file):
        lines += ["", f"recipe      {file}", *_recipe(plan, [*cells])]
    return "\n".join(lines)


def _recipe(plan: Plan, cells: list[Cell]) -> list[str]:
    lines = []
    for _, group in groupby(cells, key=lambda cell: cell.method):
        seeds = [*group]
        lines.append(f"  {seeds[0].method:<22} {_limit(plan, seeds)}")
        made = [override for override in seeds[0].overrides if not override.startswith(("seed=", "run_dir="))]
        lines.append(f"  {'':<22}   {shlex.join(made) or 'as the recipe says'}")
    return [*lines, _cost(plan, cells)]


def _limit(plan: Plan, cells: list[Cell]) -> str:
    """Return how a method's runs end, and how many have ended."""
    plan.some_recipe(cells[0])
    limits = plan.limits(cells[0])
    if limits is None:
        return f"{UNITS[plan.sweep.match]} as {plan.sweep.reference}"
    done = sum(cell.ended(limits) for cell in cells)
    return cells[0].recipe(limits).budget.describe() + (
        f"; {done} of {len(cells)} runs have ended" if done else ""
    )


def _cost(plan: Plan, cells: list[Cell]) -> str:
    """Return the estimated cost of a reference run, times the number of runs; other budgets are not known in
    advance."""
    first = plan.some_recipe(cells[0])
    if plan.sweep.reference is None or first.steps is None:
        return "estimate    none: it needs a reference with steps"
    model, work = model_config(first), workload(first)
    flops = first.steps * planned_flops(first, model, work)
    hours = [
        f"{speed.gpu.name} {compact(first.steps * speed.seconds * first.gpus / 3600)}"
        for speed in speeds(first, model, work)
    ]
    return (
        f"estimate    a run of {plan.sweep.reference}: {flops:.2g} FLOPs"
        + (f", GPU hours: {', '.join(hours)}" if hours else "")
        + f"; x {len(cells)} runs (not measured; `eqlen plan` says what is assumed)"
    )

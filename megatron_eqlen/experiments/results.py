"""Tables and figures of a sweep, from the folders of its runs that have ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatron_eqlen.experiments.cells import Plan
from megatron_eqlen.experiments.compare import METHOD, Table, budget_notes, make_table, markdown, write
from megatron_eqlen.experiments.run_groups import BASE, Group, read_run
from megatron_eqlen.experiments.schema import SweepRecipe, TableRecipe

DEFAULT = [TableRecipe(title="Accuracy"), TableRecipe(title="Efficiency", kind="efficiency")]


def write_results(plan: Plan) -> tuple[str, list[Path]]:
    """Write tables and figures into the sweep's folder; return the tables and the files' paths. Raises
    ValueError if no run has ended, or if the sweep names a chart that does not exist."""
    sweep, groups = plan.sweep, ended_groups(plan)
    if not groups:
        raise ValueError(f"{sweep.path}: expected runs that have ended, found none")
    tables = [_table(sweep, table, groups) for table in sweep.tables or DEFAULT]
    labelled = [replace(group, method=sweep.label(group.method)) for group in groups]
    notes = [*_missing(sweep, groups), *budget_notes(labelled)]
    shown = sweep.figures or sweep.methods
    drawn = [drawn for group, drawn in zip(groups, labelled, strict=True) if group.method in shown]
    axis = sweep.match if sweep.reference is not None else None
    return markdown(tables, notes), write(sweep.path, tables, notes, drawn, axis, sweep.charts)


def ended_groups(plan: Plan) -> list[Group]:
    """Return the groups of ended runs by recipe, their model: the base, then methods in the sweep's order."""
    groups = []
    for recipe in plan.sweep.recipes:
        model = Path(recipe).stem
        methods = []
        for method in plan.sweep.methods:
            cells = [cell for cell in plan.cells if (cell.model, cell.method) == (model, method)]
            # A run may have ended only if its budget is known.
            budgets = [(cell, limits) for cell in cells if (limits := plan.limits(cell)) is not None]
            if runs := [read_run(c.folder, c.recipe(of)) for c, of in budgets if c.trained(of)]:
                methods.append(Group(model, method, runs))
        # The base is measured by any method's runs before their first step.
        measured = [run for group in methods for run in group.runs if run.before]
        groups += [Group(model, BASE, measured)] if measured else []
        groups += methods
    return groups


def _table(sweep: SweepRecipe, table: TableRecipe, groups: Sequence[Group]) -> Table:
    recipes = table.recipes or [Path(recipe).stem for recipe in sweep.recipes]
    methods = table.methods or [BASE, *sweep.methods]
    chosen = [
        replace(group, method=sweep.label(method))
        for method in methods
        for group in groups
        if group.method == method and group.model in recipes
    ]
    made = make_table(table.title, table.kind, chosen, sweep.label(methods[0]), table.benchmarks)
    return made if made.rows else replace(made, rows=[{METHOD: "none has ended"}])


def _missing(sweep: SweepRecipe, groups: Sequence[Group]) -> list[str]:
    """Return notes on seeds that have not ended."""
    notes = []
    for model in [Path(recipe).stem for recipe in sweep.recipes]:
        methods: dict[tuple[int, int], list[str]] = {}
        for method in sweep.methods:
            ended = sum(len(g.runs) for g in groups if (g.model, g.method) == (model, method))
            counts = ended, len(sweep.seeds_of(model, method))
            # Methods with equal counts share a note.
            methods.setdefault(counts, []).append(sweep.label(method))
        notes += [
            f"Seeds that have ended on {model}, {ended} of {expected}: " + "; ".join(labels)
            for (ended, expected), labels in methods.items()
            if ended < expected
        ]
    return notes

"""Tables and figures of a sweep, from the folders of its runs that have ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatron_eqlen.files import write_between, write_text
from megatron_eqlen.paper import drift
from megatron_eqlen.paper.figures import ends, figures, sheet
from megatron_eqlen.paper.tables import (
    METHOD,
    accuracies,
    differences,
    efficiency,
    learned,
    learning_taxes,
    pairs,
)
from megatron_eqlen.recipe.budget import UNITS
from megatron_eqlen.report import tables as formats
from megatron_eqlen.report.charts import Chart
from megatron_eqlen.report.compare import budget_notes
from megatron_eqlen.report.run_groups import BASE, Group, read_run
from megatron_eqlen.report.tables import Column, Table
from megatron_eqlen.sweep.cells import Plan
from megatron_eqlen.sweep.schema import SummaryRecipe, SweepRecipe, TableRecipe

ABOUT = (
    "± is half the 95% bootstrap interval over seeds with the problems held fixed, as in the paper; brackets "
    "are the 95% bootstrap interval over seeds and problems."
)
ABOUT_DIFFERENCE = (
    "Points above {}: mean [95% t interval, paired over seeds, problems held fixed] / the smallest "
    "difference that as many seeds would have shown in 80% of experiments."
)
ABOUT_BANDS = "Lines are means over a method's seeds, bands reach from the lowest seed to the highest."
START, END = "<!-- tables of a sweep -->", "<!-- end of the tables -->"
"""Lines of a document that enclose the tables."""
ABOUT_DRIFT = "Means over seeds of the change from before training to after it, with 95% t intervals."
DRIFT = "drift.svg"
"""Figure of the tables of kind ``drift``."""
FIGURES, SUMMARY, PICTURES = "figures-", "summary-", "pictures"
"""Prefixes of the figures' file names; name of the folder beside a document that holds copies of them."""
FORMATS = {"txt": formats.text, "md": formats.markdown, "tex": formats.latex}


def groups(plan: Plan) -> list[Group]:
    """Return the groups of runs that have ended, by recipe: the base, then the methods in the sweep's
    order."""
    found = []
    for recipe in plan.sweep.recipes:
        model = Path(recipe).stem
        methods = []
        for method in plan.sweep.methods:
            cells = [cell for cell in plan.cells if (cell.model, cell.method) == (model, method)]
            runs = [
                read_run(cell.folder)
                for cell in cells
                if (limits := plan.limits(cell)) is not None and cell.ended(limits)
            ]
            if runs:
                methods.append(Group(model, method, runs))
        every = [run for group in methods for run in group.runs]
        found += [Group(model, BASE, every)] if any(run.before for run in every) else []
        found += methods
    return found


def tables(sweep: SweepRecipe, found: Sequence[Group]) -> list[Table]:
    """Return the tables that the sweep names, with rows in its order."""
    return [_table(sweep, table, found) for table in sweep.tables or _default(sweep)]


def _default(sweep: SweepRecipe) -> list[TableRecipe]:
    return [TableRecipe(title="Accuracy"), TableRecipe(title="Efficiency", kind="efficiency")]


def _table(sweep: SweepRecipe, table: TableRecipe, found: Sequence[Group]) -> Table:
    recipes = table.recipes or [Path(recipe).stem for recipe in sweep.recipes]
    methods = table.methods or [BASE, *sweep.methods]
    chosen = [
        group for method in methods for group in found if group.method == method and group.model in recipes
    ]
    names = {method: BASE if method == BASE else sweep.label(method) for method in methods}
    named = [Group(group.model, names[group.method], group.runs) for group in chosen]
    baseline, control = names[methods[0]], recipes[-1]
    notes = {
        "difference": [ABOUT_DIFFERENCE.format(baseline)],
        "learned": [ABOUT_DIFFERENCE.format(f"the same method on {sweep.called(control)}")],
        "drift": [ABOUT_DRIFT],
    }
    makers = {
        "accuracy": lambda: accuracies(named, table.benchmarks),
        "difference": lambda: differences(named, baseline, table.benchmarks),
        "learned": lambda: learned(named, control, table.benchmarks),
        "efficiency": lambda: efficiency(named),
        "training": lambda: ends(named),
        "pairs": lambda: pairs(named),
        "learning_tax": lambda: learning_taxes(named),
        "drift": lambda: drift.drifts(named),
    }
    rows = [{_called(sweep, column): value for column, value in row.items()} for row in makers[table.kind]()]
    return Table(table.title, rows or [{METHOD: "none has ended"}], notes.get(table.kind, []))


def _about(sweep: SweepRecipe, found: Sequence[Group]) -> list[str]:
    """Return notes on all tables: seeds that have not ended, unequal budgets, and what intervals are."""
    labelled = [
        Group(sweep.called(group.model), sweep.label(group.method), group.runs)
        for group in found
        if group.method != BASE
    ]
    return [*_missing(sweep, found), *budget_notes(labelled), ABOUT]


def _missing(sweep: SweepRecipe, found: Sequence[Group]) -> list[str]:
    notes = []
    for model in [Path(recipe).stem for recipe in sweep.recipes]:
        methods: dict[tuple[int, int], list[str]] = {}
        for method in sweep.methods:
            counts = _count(found, model, method), len(sweep.seeds_of(model, method))
            methods.setdefault(counts, []).append(sweep.label(method))
        notes += [
            f"Seeds that have ended on {sweep.called(model)}, {ended} of {expected}: " + "; ".join(labels)
            for (ended, expected), labels in methods.items()
            if ended < expected
        ]
    return notes


def _called(sweep: SweepRecipe, column: Column) -> Column:
    return column if isinstance(column, str) else (sweep.called(column[0]), sweep.called(column[1]))


def _count(found: Sequence[Group], model: str, method: str) -> int:
    """Return the number of runs of a method on a model."""
    return sum(len(group.runs) for group in found if (group.model, group.method) == (model, method))


def write(plan: Plan) -> list[Path]:
    """Write the tables as text, Markdown, LaTeX and JSON, and for each model a sheet of
    figures, into the sweep's folder.

    Raises ValueError if no run has ended, or if the summary names a chart that does not exist.
    """
    found = groups(plan)
    if not found:
        raise ValueError(f"{plan.sweep.path}: expected runs that have ended, found none")
    made, about = tables(plan.sweep, found), _about(plan.sweep, found)
    folder = plan.sweep.path
    paths = [folder / f"tables.{ending}" for ending in (*FORMATS, "json")]
    for ending, of in FORMATS.items():
        comment = "% " if ending == "tex" else ""
        text = "\n\n".join([*map(of, made), *(comment + note for note in about)])
        write_text(folder / f"tables.{ending}", text + "\n")
    write_text(folder / "tables.json", formats.as_json(made))
    paths += _picture_of_drift(plan.sweep, made)
    models = _figures(plan.sweep, found)
    for model, charts in models.items():
        axis = plan.sweep.match if plan.sweep.match in charts else "steps"
        title = f"{plan.sweep.called(model)}, over {UNITS[axis]}"
        paths.append(folder / f"{FIGURES}{model}.svg")
        write_text(paths[-1], sheet(title, charts[axis]))
        if plan.sweep.summary is not None:
            paths.append(folder / f"{SUMMARY}{model}.svg")
            write_text(paths[-1], sheet(title, _summary(plan.sweep, plan.sweep.summary, charts[axis])))
    return paths


def _picture_of_drift(sweep: SweepRecipe, made: Sequence[Table]) -> list[Path]:
    titles = [table.title for table in sweep.tables if table.kind == "drift"]
    shown = [
        (table.title, table.rows) for table in made if table.title in titles and drift.LENGTH in table.rows[0]
    ]
    if not shown:
        return []
    write_text(sweep.path / DRIFT, drift.picture(shown))
    return [sweep.path / DRIFT]


def write_into(document: Path, sweep: Path) -> None:
    """Put the Markdown and the figures of a sweep's folder into a document, replacing the text between START
    and END; the figures' files and the summary's go into the folder ``pictures`` beside it.

    Raises ValueError for a document without these lines.
    """
    made = (sweep / "tables.md").read_text(encoding="utf-8")
    (document.parent / PICTURES).mkdir(exist_ok=True)
    summaries = sorted(sweep.glob(f"{SUMMARY}*.svg"))
    for file in [*sweep.glob(DRIFT), *sorted(sweep.glob(f"{FIGURES}*.svg")), *summaries]:
        picture = f"{PICTURES}/{sweep.name}_{file.name}"
        write_text(document.parent / picture, file.read_text(encoding="utf-8"))
        about = ABOUT_DRIFT if file.name == DRIFT else ABOUT_BANDS
        if file not in summaries:
            made += f"\n![Figures of {sweep.name}]({picture})\n\n{about}\n"
    write_between(document, START, END, made)


def _figures(sweep: SweepRecipe, found: Sequence[Group]) -> dict[str, dict[str, list[Chart]]]:
    """Return charts by model and by x axis."""
    methods = [group for group in found if group.method in (sweep.figures or sweep.methods)]
    return {
        model: figures(
            [Group(model, sweep.label(group.method), group.runs) for group in methods if group.model == model]
        )
        for model in dict.fromkeys(group.model for group in methods)
    }


def _summary(sweep: SweepRecipe, summary: SummaryRecipe, charts: Sequence[Chart]) -> list[Chart]:
    """Return the summary's charts, with the lines of its methods."""
    by_title, lines = {chart.title: chart for chart in charts}, {*map(sweep.label, summary.methods)}
    if unknown := [title for title in summary.charts if title not in by_title]:
        raise ValueError(f"summary.charts: expected some of {', '.join(by_title)}, found {unknown[0]!r}")
    return [
        replace(chart, series=[series for series in chart.series if series.name in lines])
        for chart in map(by_title.__getitem__, summary.charts)
    ]

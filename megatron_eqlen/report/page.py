"""A run's pages, made from the run folder's files alone.

    recipe.yaml, metrics.jsonl, events.jsonl, evaluation/*.json, streams/ ──► page.html.jinja ──► report.html
    streams/step-00000011/ ──► rollouts.html.jinja ──► rollouts-12.html

Facts that a page filters by lie open in it; the browser unpacks a rollout's text and columns when somebody
looks at it. Style, plots and their library are part of a page, whose content security policy forbids loading.
"""

from __future__ import annotations

import logging
import time
from functools import cache
from importlib import resources
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import jinja2

from megatron_eqlen.evaluation.result import evaluation_files, histories, read_evaluations
from megatron_eqlen.files import streams_of, write_text
from megatron_eqlen.job import Job
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.recipe.load import dump, load_run
from megatron_eqlen.record.reader import check_newest, scored_between, scored_steps, step_files
from megatron_eqlen.report.charts import COLOURS, METRICS, RARE, charts, facts, profile_chart
from megatron_eqlen.report.format import compact
from megatron_eqlen.report.metrics import Columns
from megatron_eqlen.report.recorded import RecordedStep, find_decoder, recorded_advice
from megatron_eqlen.report.status import RunStatus

PAGE = "report.html"
STEPS = 2
"""Number of newest graded steps whose rollouts are shown, besides the first step."""
EVALUATIONS = 20
"""Number of a benchmark's newest evaluations in the table, besides the first; the chart shows all."""
FREE = 100
"""A page is written while a run trains if all its pages take at most one ``FREE``th of the run's time."""

logger = logging.getLogger(__name__)


def write_page(run: Path) -> Path:
    """Write ``report.html`` into the folder ``run`` and return its path. Metrics, evaluations and streams may
    be missing. Raises ValueError without a recipe, or naming the file that cannot be read."""
    status, columns = RunStatus(run), Columns(run, METRICS)
    job = Job(recipe := status.recipe)
    evaluated = read_evaluations(evaluation_files(run / "evaluation", columns.last.get("step", 0)))
    benchmarks = histories(evaluated).values()
    decode, note = find_decoder(recipe.model)
    # a damaged record ends this before anything is drawn from it
    check_newest(streams := streams_of(run))
    newest = islice(scored_steps(streams, newest_first=True), STEPS)
    # the newest steps and the first one, each once
    shown = dict([*newest, *islice(scored_steps(streams), 1)])
    steps, rows = [], list[dict[str, Any]]()
    for number, folder in shown.items():
        step = RecordedStep(step_files(folder), job)
        steps.append((number + 1, step.verdicts()))
        telling = step.training.telling(step.rollouts)
        rows += [{"step": number + 1} | row for row in step.rows(telling, decode)]
    profile, advice = recorded_advice(run, recipe)
    drawn = charts(columns, evaluated)
    drawn += [profile_chart(profile)] if profile else []
    return _write(
        run / PAGE,
        "page.html.jinja",
        recipe,
        rows,
        library=_bokeh() if drawn else "",
        script=_own("page.js"),
        recipe_text=dump(recipe),
        facts_of_run=status.page(),
        outcomes=[[*history[:1], *history[1:][-1:]] for history in benchmarks],
        facts=facts(columns),
        rare=RARE,
        charts=list(enumerate(drawn)),
        advice=advice,
        data=[chart.data() for chart in drawn],
        evaluations=[row for history in benchmarks for row in [*history[:1], *history[1:][-EVALUATIONS:]]],
        steps=steps,
        note=note,
        last=columns.last,
    )  # fmt: skip


def write_step_page(run: Path, first: int, last: int) -> Path:
    """Write ``rollouts-12.html`` (``rollouts-10-12.html``) of the steps ``first`` to ``last`` (from 1) in the
    run; return its path. Raises ValueError for a step that is not recorded, or naming a damaged file."""
    job, folders = Job(load_run(run)), scored_between(streams_of(run), first, last)
    (decode, note), rows = find_decoder(job.recipe.model), list[dict[str, Any]]()
    for number, folder in enumerate(folders, first):
        step = RecordedStep(step_files(folder), job)
        rows += [{"step": number} | row for row in step.rows(step.rollouts, decode)]
    name = str(first) if first == last else f"{first}-{last}"
    path = run / f"rollouts-{name}.html"
    return _write(path, "rollouts.html.jinja", job.recipe, rows, step=name, note=note, script=_own("list.js"))


def write_probe_page(path: Path, step: int, found: dict[str, Any], recipe: Recipe) -> Path:
    """Write the page of what a probe of ``step`` (from 1) ``found`` (``probe.look``); return its path."""
    return _write(path, "probe.html.jinja", recipe, [], step=step, found=found)


def _write(path: Path, template: str, recipe: Recipe, rows: list[dict[str, Any]], **values: Any) -> Path:
    values |= {"title": f"{recipe.name} · {recipe.method} · seed {recipe.seed}", "rows": rows}
    values |= {"recipe": recipe, "style": _own("page.css"), "drawing": _own("rollouts.js")}
    write_text(path, _environment().get_template(template).render(values))
    return path


class PageWriter:
    """Writes a run's page while it trains, as often as that costs next to nothing. Damaged files warn."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._began = folder, time.monotonic()
        self._taken, self._longest = 0.0, 1.0

    def update(self) -> None:
        """Write the page, unless that would take more than a ``FREE``th of the time since the start."""
        began = time.monotonic()
        if FREE * (self._taken + self._longest) > began - self._began:
            return
        self.write()
        took = time.monotonic() - began
        self._taken, self._longest = self._taken + took, max(self._longest, took)

    def write(self) -> Path:
        try:
            return write_page(self._folder)
        except ValueError as error:
            logger.warning("report.html is not written: %s", error)
            return self._folder / PAGE


def _own(name: str) -> str:
    return (resources.files("megatron_eqlen.report") / name).read_text(encoding="utf-8")


def _bokeh() -> str:
    """Return BokehJS. Bokeh itself is not imported, which takes longer than all else."""
    origin = getattr(find_spec("bokeh"), "origin", None)
    assert origin is not None, "pyproject.toml requires it"
    scripts = Path(origin).parent / "server/static/js"
    return "\n".join((scripts / f"{name}.min.js").read_text("utf-8") for name in ("bokeh", "bokeh-api"))


@cache
def _environment() -> jinja2.Environment:
    """Return the environment of the pages' templates, compiled once; a missing value is an error."""
    made: Any = jinja2.Environment(
        loader=jinja2.PackageLoader("megatron_eqlen.report", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals["colours"] = COLOURS
    made.filters.update(compact=compact, percent="{:.1%}".format)
    return made

"""A run's page: one static file, ``report.html``, made from the run folder's files alone.

recipe.yaml, metrics.jsonl, events.jsonl, evaluation/*.json, streams/ ──► page.html.jinja ──► report.html

The file needs nothing from elsewhere: style, plots and their library are part of it, and its content security
policy forbids a browser to load anything.
"""

from __future__ import annotations

import logging
import time
from importlib import resources
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import jinja2

from megatron_eqlen.files import write_text
from megatron_eqlen.recipe.load import dump
from megatron_eqlen.report.charts import METRICS, charts, facts, profile_chart
from megatron_eqlen.report.drawing import COLOURS, draw, timeline
from megatron_eqlen.report.evaluations import evaluation_files, histories, read_evaluations
from megatron_eqlen.report.format import compact, percent, shorten
from megatron_eqlen.report.metrics import Columns
from megatron_eqlen.report.recorded import RecordedStep, find_decoder, recorded_advice
from megatron_eqlen.report.status import RunStatus
from megatron_eqlen.rollout.record.reader import check_newest, scored_steps, step_files

PAGE = "report.html"
STEPS = 2
"""Number of newest graded steps whose rollouts are shown, besides the first step."""
EVALUATIONS = 20
"""Number of a benchmark's newest evaluations in the table, besides the first; the chart shows all."""
FREE = 100
"""A page is written while a run trains if all its pages take at most one ``FREE``th of the run's time."""

logger = logging.getLogger(__name__)


def write_page(run: Path) -> Path:
    """Write ``report.html`` into the folder ``run`` and return its path.

    Metrics, evaluations and streams may be missing. Raises ValueError if the folder holds no recipe, or
    naming the file that cannot be read.
    """
    status, columns = RunStatus(run), Columns(run, METRICS)
    recipe = status.recipe
    evaluated = read_evaluations(evaluation_files(run / "evaluation", columns.last.get("step", 0)))
    benchmarks = histories(evaluated).values()
    decoder = find_decoder(recipe.model)
    check_newest(run / "streams")
    newest = islice(scored_steps(run / "streams", newest_first=True), STEPS)
    shown = dict([*newest, *islice(scored_steps(run / "streams"), 1)])
    steps = [(n + 1, RecordedStep(step_files(folder), recipe)) for n, folder in shown.items()]
    profile, advice = recorded_advice(run, recipe)
    drawn = charts(columns, evaluated) + ([profile_chart(profile)] if profile else [])
    html = environment().get_template("page.html.jinja").render(
        title=f"{recipe.name} · {recipe.method} · seed {recipe.seed}",
        style=own("page.css"),
        library=_bokeh() if drawn else "",
        script=own("page.js"),
        recipe=recipe,
        recipe_text=dump(recipe),
        rows=status.page(),
        outcomes=[[*rows[:1], *rows[1:][-1:]] for rows in benchmarks],
        facts=facts(columns),
        charts=list(enumerate(drawn)),
        advice=advice,
        data=[chart.data() for chart in drawn],
        timeline=timeline(list(status.state.steps)),
        evaluations=[row for rows in benchmarks for row in [*rows[:1], *rows[1:][-EVALUATIONS:]]],
        steps=[(number, step.verdicts(), step.telling(decoder.decode)) for number, step in steps],
        note=decoder.note,
        last=columns.last,
    )  # fmt: skip
    path = run / PAGE
    write_text(path, html)
    return path


class PageWriter:
    """Writes the page of the run in ``folder`` while it trains, as often as that costs next to nothing. If a
    damaged file in the folder forbids it, that is a warning."""

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
        """Write the page; return its path."""
        try:
            return write_page(self._folder)
        except ValueError as error:
            logger.warning("report.html is not written: %s", error)
            return self._folder / PAGE


def own(name: str) -> str:
    """Return a file of this folder."""
    return (resources.files("megatron_eqlen.report") / name).read_text(encoding="utf-8")


def _bokeh() -> str:
    """Return BokehJS. Bokeh itself is not imported, which takes longer than all else."""
    package = find_spec("bokeh")
    assert package is not None, "pyproject.toml requires it"
    assert package.origin is not None
    scripts = Path(package.origin).parent / "server/static/js"
    return "\n".join((scripts / f"{name}.min.js").read_text("utf-8") for name in ("bokeh", "bokeh-api"))


def environment() -> jinja2.Environment:
    """Return the environment of the pages' templates; a missing value is an error."""
    made: Any = jinja2.Environment(
        loader=jinja2.PackageLoader("megatron_eqlen.report", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals["colours"] = COLOURS
    made.filters.update(compact=compact, shorten=shorten, percent=percent, draw=draw)
    return made

"""A run's page: one static file, ``report.html``, made from the run folder's files alone.

recipe.yaml, metrics.jsonl, events.jsonl, evaluation/*.json, streams/ ──► page.html.jinja ──► report.html

The file needs nothing from elsewhere: style, plots and their library are part of it, and its content security
policy forbids a browser to load anything.
"""

from __future__ import annotations

import time
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import Any

import jinja2

from megatron_eqlen.files import write_text
from megatron_eqlen.recipe.load import dump, load_run
from megatron_eqlen.report.charts import COLOURS, METRICS, charts, facts, stages
from megatron_eqlen.report.drawing import draw, timeline
from megatron_eqlen.report.evaluations import outcomes, read_evaluations
from megatron_eqlen.report.format import compact, percent, points, shorten
from megatron_eqlen.report.metrics import Columns
from megatron_eqlen.report.recorded import Recorded, find_decoder, is_scored, recorded
from megatron_eqlen.report.run_state import read_state
from megatron_eqlen.report.status import page_rows

STEPS = 2
"""Number of newest graded steps whose rollouts are shown, besides the first step."""
FREE = 100
"""A page is written while a run trains if all its pages take at most one ``FREE``th of the run's time."""


def write_page(run: Path) -> Path:
    """Write ``report.html`` into the folder ``run`` and return its path.

    Metrics, evaluations and streams may be missing. Raises ValueError if the folder holds no recipe, or
    naming the file that cannot be read.
    """
    from megatron_eqlen.report.plots import library, plots  # imports Bokeh

    recipe, state, columns = load_run(run), read_state(run), Columns(run, METRICS)
    evaluated = read_evaluations(run / "evaluation", columns.last.get("step", 0))
    decoder = find_decoder(recipe.model)
    steps = [Recorded(folder, recipe) for folder in _shown(run / "streams")]
    drawn = [*charts(columns, evaluated), *filter(None, [stages(columns)])]
    script, elements = plots(drawn)
    html = _environment().get_template("page.html.jinja").render(
        title=f"{recipe.name} · {recipe.method} · seed {recipe.seed}",
        colours=COLOURS,
        style=(resources.files("megatron_eqlen.report") / "page.css").read_text(encoding="utf-8"),
        scripts=[library(), script] if script else [],
        recipe=recipe,
        recipe_text=dump(recipe),
        rows=page_rows(run, state),
        outcomes=outcomes(evaluated),
        facts=facts(columns, recipe.budget),
        charts=list(zip(drawn, elements, strict=True)),
        timeline=timeline(list(state.steps)),
        evaluations=evaluated,
        steps=[(step, step.verdicts(), step.views(decoder.decode)) for step in steps],
        note=decoder.note,
        last=columns.last,
    )  # fmt: skip
    path = run / "report.html"
    write_text(path, html)
    return path


class PageWriter:
    """Writes the page of the run in ``folder`` while it trains, as often as that costs next to nothing."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._began = folder, time.monotonic()
        self._taken, self._longest = 0.0, 1.0

    def update(self) -> None:
        """Write the page, unless that would take more than a ``FREE``th of the time since the start."""
        began = time.monotonic()
        if FREE * (self._taken + self._longest) > began - self._began:
            return
        write_page(self._folder)
        took = time.monotonic() - began
        self._taken, self._longest = self._taken + took, max(self._longest, took)


def _environment() -> jinja2.Environment:
    """Return the environment of the page's template; a missing value is an error."""
    made: Any = jinja2.Environment(
        loader=jinja2.PackageLoader("megatron_eqlen.report", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(compact=compact, shorten=shorten, percent=percent, points=points, draw=draw)
    return made


def _shown(streams: Path) -> list[Path]:
    """Return the newest steps that are harvested and graded, the newest first, then the first one."""
    newest = list(islice(filter(is_scored, recorded(streams, newest_first=True)), STEPS))
    first = list(islice(filter(is_scored, recorded(streams)), 1))
    return list(dict.fromkeys([*newest, *first]))

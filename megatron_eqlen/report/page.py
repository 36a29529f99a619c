"""A run's page: one static file, ``report.html``, made from the run folder's files alone.

recipe.yaml, metrics.jsonl, events.jsonl, evaluation/*.json, streams/ ──► page.html.jinja ──► report.html
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from megatron_eqlen.files import write_text
from megatron_eqlen.recipe.load import dump, load_run
from megatron_eqlen.report.charts import charts, facts, stages
from megatron_eqlen.report.drawing import timeline
from megatron_eqlen.report.evaluations import outcomes, read_evaluations
from megatron_eqlen.report.metrics import read_metrics
from megatron_eqlen.report.recorded import Recorded, find_decoder, is_scored, recorded
from megatron_eqlen.report.run_state import read_state
from megatron_eqlen.report.status import page_rows, status
from megatron_eqlen.report.template import environment

STEPS = 2
"""Number of newest graded steps whose rollouts are shown, besides the first step."""


def write_page(run: Path) -> Path:
    """Write ``report.html`` into the folder ``run`` and return its path.

    Metrics, evaluations and streams may be missing. Raises ValueError if the folder holds no recipe, or
    naming the file that cannot be read.
    """
    recipe, state, records = load_run(run), read_state(run), read_metrics(run)
    evaluated = read_evaluations(run / "evaluation", records[-1]["step"] if records else 0)
    found, decoder = status(run, state), find_decoder(recipe.model)
    steps = [Recorded(folder, recipe) for folder in _shown(run / "streams")]
    html = environment().get_template("page.html.jinja").render(
        title=f"{recipe.name} · {recipe.method} · seed {recipe.seed}",
        recipe=recipe,
        recipe_text=dump(recipe),
        status=found,
        rows=page_rows(found),
        outcomes=outcomes(evaluated),
        facts=facts(records, recipe.budget),
        charts=charts(records, evaluated),
        timeline=timeline(list(state.steps)),
        stages=stages(records),
        evaluations=evaluated,
        steps=[(step, step.verdicts(), step.views(decoder.decode)) for step in steps],
        note=decoder.note,
        last=records[-1] if records else None,
    )  # fmt: skip
    path = run / "report.html"
    write_text(path, html)
    return path


def _shown(streams: Path) -> list[Path]:
    """Return the newest steps that are harvested and graded, the newest first, then the first one."""
    newest = list(islice(filter(is_scored, recorded(streams, newest_first=True)), STEPS))
    first = list(islice(filter(is_scored, recorded(streams)), 1))
    return list(dict.fromkeys([*newest, *first]))

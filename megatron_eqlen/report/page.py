"""A run's page: one self-contained HTML file, made from the run folder's files alone.

recipe.yaml, metrics.jsonl, evaluation/*.json, streams/ ──► report.html
"""

from __future__ import annotations

from pathlib import Path

from megatron_eqlen.files import write_text
from megatron_eqlen.recipe_load import dump, load_run
from megatron_eqlen.report.curves import charts, facts, last_steps, stages
from megatron_eqlen.report.drawing import draw
from megatron_eqlen.report.evaluations import outcomes, read_evaluations
from megatron_eqlen.report.metrics import read_metrics
from megatron_eqlen.report.recorded import Recorded, find_decoder, recorded
from megatron_eqlen.report.template import template


def write_page(run_folder: Path) -> Path:
    """Write ``report.html`` into a run folder and return its path.

    Metrics, evaluations and streams may be missing. Raises ValueError if the folder holds no recipe, or
    naming the file that cannot be read.
    """
    recipe = load_run(run_folder)
    records = read_metrics(run_folder)
    done = records[-1]["step"] if records else 0
    evaluated = read_evaluations(run_folder / "evaluation", done)
    decoder = find_decoder(Path(recipe.model.path))
    streams = run_folder / "streams"
    ends = [next(recorded(streams, newest_first), None) for newest_first in (False, True)]
    steps = [Recorded(folder, recipe) for folder in dict.fromkeys(ends) if folder is not None]
    page = template("page.html.jinja", draw=draw).render(
        recipe=recipe,
        recipe_text=dump(recipe),
        records=records,
        evaluations=evaluated,
        outcomes=outcomes(evaluated),
        facts=facts(records, recipe.budget),
        charts=charts(records, evaluated),
        stages=[chart for chart in (stages(records), last_steps(records)) if chart is not None],
        steps=[(step, step.views(decoder.decode)) for step in steps],
        decoder_note=decoder.note,
    )
    path = run_folder / "report.html"
    write_text(path, page)
    return path

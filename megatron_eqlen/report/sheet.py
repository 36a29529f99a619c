"""Charts on one sheet, an SVG file for documents: pages hold charts themselves."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_eqlen.report.chart import HEIGHT, WIDTH, Chart
from megatron_eqlen.report.template import template

COLUMNS, MARGIN, GAP, LINE = 2, 20, 26, 16
"""Charts and names a row; pixels around the sheet, between charts, and of a row of names."""


def sheet(title: str, charts: Sequence[Chart]) -> str:
    """``charts`` in rows, below the names of their series, which all of them have in the same order."""
    names = [name for name, _ in charts[0].legend]
    assert all([name for name, _ in chart.legend] == names for chart in charts)
    top = MARGIN + (1 + -(-len(names) // COLUMNS)) * LINE + GAP
    places = [
        {
            "title": chart.title,
            "svg": chart.svg,
            "x": MARGIN + number % COLUMNS * (WIDTH + GAP),
            "y": top + number // COLUMNS * (HEIGHT + GAP),
        }
        for number, chart in enumerate(charts)
    ]
    return template("sheet.svg.jinja").render(
        title=title,
        names=names,
        places=places,
        width=2 * MARGIN + COLUMNS * WIDTH + (COLUMNS - 1) * GAP,
        height=places[-1]["y"] + HEIGHT + MARGIN,
        columns=COLUMNS,
        margin=MARGIN,
        pitch=WIDTH + GAP,
        line=LINE,
        chart_width=WIDTH,
        chart_height=HEIGHT,
    )

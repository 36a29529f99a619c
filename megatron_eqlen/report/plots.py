"""Charts as interactive plots inside a page, drawn by Bokeh: hover shows values, dragging zooms.

Chart ──► Bokeh figure ──► one script for all of them, an element for each

Bokeh is imported here alone, and this file only where a page is written. Text and grid of a plot take their
colours from the page's style sheet (``--bk-...``), so that they follow the browser's light or dark scheme.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from bokeh.embed import components
from bokeh.models import (
    BasicTicker,
    BoxZoomTool,
    ColumnDataSource,
    CustomJSTickFormatter,
    DataRange1d,
    HoverTool,
    ResetTool,
)
from bokeh.plotting import figure
from bokeh.resources import Resources

from megatron_eqlen.report.charts import COLOURS, Chart, Series

DASHES = ("solid", (8, 5), (2, 4), (10, 4, 2, 4))
"""Dashes of a chart's lines: lines that coincide show each other through the gaps."""
HEIGHT = 200
SMOOTH_FROM = 100
"""Number of points from which a line is drawn faintly, below its moving average."""
LARGE_NUMBERS = """
for (const [scale, unit] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]])
  if (Math.abs(tick) >= (scale > 1e3 ? 1 : 10) * scale) return +(tick / scale).toPrecision(4) + unit
return Math.abs(tick) < 1e-3 && tick ? tick.toExponential(1) : String(+tick.toPrecision(4))
"""


def library() -> str:
    """Return the script of Bokeh's own library, which a page holds once."""
    return "\n".join(Resources(mode="inline", components=["bokeh"]).js_raw)


def plots(charts: Sequence[Chart]) -> tuple[str, list[str]]:
    """Return the script that draws ``charts``, and the element of each."""
    if not charts:
        return "", []
    script, elements = components([_figure(chart) for chart in charts], wrap_script=False)
    return script, list(elements)


def _figure(chart: Chart) -> figure:
    plot = figure(
        height=HEIGHT,
        sizing_mode="stretch_width",
        tools=[BoxZoomTool(dimensions="width", visible=False), ResetTool()],
        toolbar_inner=True,
        output_backend="canvas",
        background_fill_alpha=0,
        border_fill_alpha=0,
        outline_line_color=None,
        x_axis_label=chart.x_name,
    )
    plot.toolbar.autohide, plot.toolbar.logo = True, None
    for axis in (plot.xaxis, plot.yaxis):
        axis.axis_line_color = axis.major_tick_line_color = axis.minor_tick_line_color = None
        axis.formatter = CustomJSTickFormatter(code=LARGE_NUMBERS)
        axis.ticker = BasicTicker(desired_num_ticks=5)
    if chart.x_name == "step":
        plot.xaxis.ticker = BasicTicker(desired_num_ticks=5, mantissas=[1, 2, 5], min_interval=1)
    source = ColumnDataSource(chart.columns())
    hovered = _bars(plot, chart, source) if chart.stacked else _lines(plot, chart, source)
    where = f"{chart.x_name} @x{{0.[00]}}" + (", @clock after the start" if chart.seconds else "")
    rows = [(series.name, f"@y{n}{{%.5g}}") for n, series in enumerate(chart.series)]
    formatters: Any = {f"@y{n}": "printf" for n in range(len(rows))}
    plot.add_tools(
        HoverTool(
            tooltips=[("", where), *rows], formatters=formatters, mode="vline", renderers=[hovered],
            point_policy="follow_mouse", attachment="horizontal", visible=False,
        )
    )  # fmt: skip
    return plot


def _lines(plot: figure, chart: Chart, source: ColumnDataSource) -> Any:
    """Draw a line for each series, with a band where it has intervals. Return what hover looks for: an
    invisible line with a point at each x."""
    for n, series in enumerate(chart.series):
        colour, known = COLOURS[_place(series, n)], _known(source, n)
        width = 2 if n or len(chart.series) == 1 else 3
        style: dict[str, Any] = {"color": colour, "line_dash": DASHES[n % 4], "line_width": width}
        if series.intervals:
            plot.varea("x", f"low{n}", f"high{n}", source=known, color=colour, alpha=0.22)
        if len(series.points) >= SMOOTH_FROM:
            plot.line("x", f"y{n}", source=known, color=colour, alpha=0.3)
            plot.line("x", f"smooth{n}", source=known, **style)
        else:
            plot.line("x", f"y{n}", source=known, **style)
        if len(series.points) < 10:
            plot.scatter("x", f"y{n}", source=known, size=5, color=colour)
    return plot.line("x", "hover", source=source, alpha=0)


def _known(source: ColumnDataSource, n: int) -> ColumnDataSource:
    """Return the points that series ``n`` has: its line spans gaps."""
    data: dict[str, Any] = dict(source.data)
    known = np.isfinite(data[f"y{n}"])
    if known.all():
        return source
    return ColumnDataSource(
        {
            name: data[name][known]
            for name in ("x", f"y{n}", f"smooth{n}", f"low{n}", f"high{n}")
            if name in data
        }
    )


def _bars(plot: figure, chart: Chart, source: ColumnDataSource) -> Any:
    """Draw bars, one series on top of the other. Return what hover looks for."""
    names = [f"y{n}" for n in range(len(chart.series))]
    colours = [COLOURS[_place(series, n)] for n, series in enumerate(chart.series)]
    xs: Any = source.data["x"]
    width = 0.84 * (xs[-1] - xs[0]) / max(len(xs) - 1, 1) or 0.84
    bars = plot.vbar_stack(names, x="x", width=width, color=colours, source=source)
    plot.y_range = DataRange1d(start=0)
    return bars[0]


def _place(series: Series, n: int) -> int:
    return (n if series.colour is None else series.colour) % len(COLOURS)

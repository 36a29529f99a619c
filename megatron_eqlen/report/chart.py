"""Charts as inline SVG: no script, no file beside the page; colours come from the page's style."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import accumulate

from megatron_eqlen.report.format import compact

WIDTH, HEIGHT = 360, 170
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 10, 22
MAX_POINTS = 240
"""More points than this are averaged in equal groups of neighbours: a chart has no more pixels."""
MAX_BARS = 90

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    name: str
    points: Sequence[Point]
    """(step, value), steps rising."""
    intervals: Sequence[Point] = field(default=())
    """(low, high) of each point; empty for none."""
    band: bool = False
    """Intervals are drawn as one band, without a mark at each point; else as a bar at each point."""


@dataclass(frozen=True)
class Chart:
    title: str
    legend: list[tuple[str, str]]
    """(series, its value at the end)."""
    svg: str


def line_chart(title: str, series: Sequence[Series], x_name: str = "step") -> str:
    """One or more series over their steps, or over what ``x_name`` says; empty text if there is no point. A
    series has the colour of its place, also where one before it has no points."""
    drawn = {number: _thinned(one) for number, one in enumerate(series) if one.points}
    if not drawn:
        return ""
    values = [y for one in drawn.values() for _, y in one.points]
    bounds = [bound for one in drawn.values() for interval in one.intervals for bound in interval]
    x_axis = _Axis([x for one in drawn.values() for x, _ in one.points], LEFT + 6, WIDTH - RIGHT - 6)
    y_axis = _Axis(values + bounds, HEIGHT - BOTTOM, TOP)
    lines = [f'<g class="c{n}">{_line(one, x_axis, y_axis, x_name)}</g>' for n, one in drawn.items()]
    return svg(title, [*_grid(x_axis, y_axis, whole=x_name == "step"), *lines])


def stacked_bars(title: str, series: Sequence[Series]) -> str:
    """One bar a step, the series on top of each other; all have the same steps. Empty text for no step."""
    if not series or not series[0].points:
        return ""
    series = [Series(one.name, averaged(one.points, MAX_BARS)) for one in series]
    steps = [x for x, _ in series[0].points]
    tops = [
        list(accumulate(values)) for values in zip(*([y for _, y in s.points] for s in series), strict=True)
    ]
    width = (WIDTH - LEFT - RIGHT) / len(steps)
    x_axis = _Axis(steps, LEFT + width / 2, WIDTH - RIGHT - width / 2)
    y_axis = _Axis([0.0, max(top[-1] for top in tops)], HEIGHT - BOTTOM, TOP)
    bars = []
    for number, one in enumerate(series):
        for (x, value), top in zip(one.points, tops, strict=True):
            y, low = y_axis.place(top[number]), y_axis.place(top[number] - value)
            label = f"<title>{escape(one.name)}, step {x:.0f}: {compact(value)} s</title>"
            left = x_axis.place(x) - width * 0.42
            bars.append(
                f'<rect class="c{number}" x="{left:.1f}" y="{y:.1f}" width="{width * 0.84:.1f}" '
                f'height="{low - y:.1f}">{label}</rect>'
            )
    return svg(title, [*_grid(x_axis, y_axis), *bars])


def averaged(points: Sequence[Point], most: int) -> list[Point]:
    """At most ``most`` points, each the mean of a run of neighbours."""
    size = math.ceil(len(points) / most)
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [
        (sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group)) for group in groups
    ]


class _Axis:
    """A linear map of values to pixels, with round ticks."""

    def __init__(self, values: Sequence[float], start: float, stop: float) -> None:
        low, high = min(values), max(values)
        if high - low <= 1e-12 * abs(high):
            margin = abs(high) * 0.1 or 1.0
            low, high = (low - margin if low else 0.0), high + margin
        self.low, self.high, self.start, self.stop = low, high, start, stop
        self.ticks = _round_ticks(low, high)

    def place(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.stop - self.start)


def _round_ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten within [low, high]."""
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(power * factor for factor in (1, 2, 5, 10) if (high - low) / (power * factor) <= most)
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _tick_label(tick: float) -> str:
    """Round ticks need no trailing zeros."""
    return f"{tick:.6g}" if tick == 0 or 1e-3 <= abs(tick) < 1e4 else compact(tick)


def _thinned(series: Series) -> Series:
    if len(series.points) <= MAX_POINTS or series.intervals:
        return series
    return Series(series.name, averaged(series.points, MAX_POINTS))


def _line(series: Series, x_axis: _Axis, y_axis: _Axis, x_name: str) -> str:
    places = [(x_axis.place(x), y_axis.place(y)) for x, y in series.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    if series.band:
        return (
            f'<title>{escape(series.name)}</title>{_band(series, x_axis, y_axis)}<polyline points="{path}"/>'
        )
    bars = "".join(
        f'<line class="interval" x1="{x:.1f}" x2="{x:.1f}" '
        f'y1="{y_axis.place(low):.1f}" y2="{y_axis.place(high):.1f}"/>'
        for (x, _), (low, high) in zip(places, series.intervals, strict=False)
    )
    marks = "".join(
        f'<circle cx="{px:.1f}" cy="{py:.1f}" r="{2 if len(places) <= 60 else 1}">'
        f"<title>{escape(series.name)}, {x_name} {_tick_label(x)}: {compact(y)}</title></circle>"
        for (px, py), (x, y) in zip(places, series.points, strict=True)
    )
    return f'{bars}<polyline points="{path}"/>{marks}'


def _band(series: Series, x_axis: _Axis, y_axis: _Axis) -> str:
    """Along the lower ends of the intervals, and back along the upper ones."""
    ends = [(x, low, high) for (x, _), (low, high) in zip(series.points, series.intervals, strict=True)]
    corners = [(x, low) for x, low, _ in ends] + [(x, high) for x, _, high in reversed(ends)]
    path = " ".join(f"{x_axis.place(x):.1f},{y_axis.place(y):.1f}" for x, y in corners)
    return f'<polygon class="band" points="{path}"/>'


def _grid(x_axis: _Axis, y_axis: _Axis, whole: bool = True) -> list[str]:
    """``whole``: only whole numbers stand below the x axis."""
    rows = [(tick, y_axis.place(tick)) for tick in y_axis.ticks]
    columns = [(tick, x_axis.place(tick)) for tick in x_axis.ticks if tick == round(tick) or not whole]
    return [
        *(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            for _, y in rows
        ),
        *(f'<text x="{LEFT - 6}" y="{y + 3:.1f}" class="y">{_tick_label(tick)}</text>' for tick, y in rows),
        *(f'<text x="{x:.1f}" y="{HEIGHT - 6}" class="x">{_tick_label(tick)}</text>' for tick, x in columns),
    ]


def svg(title: str, parts: Sequence[str], height: int = HEIGHT) -> str:
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">'
        f"{''.join(parts)}</svg>"
    )

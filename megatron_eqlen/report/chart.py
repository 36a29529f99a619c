"""Line charts as inline SVG: no script, no file beside the page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 360, 200
LEFT, RIGHT, TOP, BOTTOM = 48, 12, 30, 24


@dataclass(frozen=True)
class Series:
    name: str
    points: Sequence[tuple[float, float]]
    """(x, y), x rising."""
    intervals: Sequence[tuple[float, float]] = ()
    """(low, high) beside each point, drawn as bars; empty for none."""


def line_chart(title: str, series: Sequence[Series]) -> str:
    """An SVG of one or more series over a common x axis of steps; empty text if there is no point."""
    series = [one for one in series if one.points]
    if not series:
        return ""
    x_axis = _Axis([x for one in series for x, _ in one.points], LEFT, WIDTH - RIGHT)
    values = [y for one in series for _, y in one.points] + [
        y for one in series for ys in one.intervals for y in ys
    ]
    y_axis = _Axis(values, HEIGHT - BOTTOM, TOP)
    body = [f'<text class="title" x="{LEFT}" y="16">{escape(title)}</text>']
    body += [_grid_line(tick, y_axis) for tick in y_axis.ticks]
    body += [
        f'<text x="{x_axis.place(tick):.1f}" y="{HEIGHT - 8}" text-anchor="middle">{tick:g}</text>'
        for tick in x_axis.ticks
        if tick == round(tick)
    ]
    for number, one in enumerate(series):
        body.append(f'<g class="series-{number}">{_draw(one, x_axis, y_axis)}</g>')
    if len(series) > 1:
        body.append(_legend(series))
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{"".join(body)}</svg>'
    )


class _Axis:
    """A linear map of values to pixels with round ticks."""

    def __init__(self, values: Sequence[float], start: float, stop: float) -> None:
        low, high = min(values), max(values)
        if low == high:
            low, high = low - (abs(low) * 0.1 or 0.5), high + (abs(high) * 0.1 or 0.5)
        self.low, self.high, self.start, self.stop = low, high, start, stop
        self.ticks = _round_ticks(low, high)

    def place(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.stop - self.start)


def _round_ticks(low: float, high: float, wanted: int = 4) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten within [low, high]."""
    power = 10 ** math.floor(math.log10((high - low) / wanted))
    step = next(power * factor for factor in (1, 2, 5, 10) if (high - low) / (power * factor) <= wanted)
    first, last = math.ceil(low / step), math.floor(high / step)
    return [number * step for number in range(first, last + 1)]


def _grid_line(tick: float, axis: _Axis) -> str:
    y = axis.place(tick)
    return (
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text x="{LEFT - 6}" y="{y + 3:.1f}" text-anchor="end">{tick:.3g}</text>'
    )


def _draw(series: Series, x_axis: _Axis, y_axis: _Axis) -> str:
    places = [(x_axis.place(x), y_axis.place(y)) for x, y in series.points]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    marks = "".join(
        _mark(place, f"{series.name}, step {x:g}: {y:.4g}")
        for place, (x, y) in zip(places, series.points, strict=True)
    )
    bars = "".join(
        _vertical(x, y_axis.place(low), y_axis.place(high))
        for (x, _), (low, high) in zip(places, series.intervals, strict=False)
    )
    return f'{bars}<polyline points="{line}"/>{marks}'


def _mark(place: tuple[float, float], text: str) -> str:
    """A dot that shows ``text`` under the pointer."""
    return f'<circle cx="{place[0]:.1f}" cy="{place[1]:.1f}" r="2.2"><title>{escape(text)}</title></circle>'


def _vertical(x: float, y1: float, y2: float) -> str:
    return f'<line class="bar" x1="{x:.1f}" x2="{x:.1f}" y1="{y1:.1f}" y2="{y2:.1f}"/>'


def _legend(series: Sequence[Series]) -> str:
    parts = "".join(
        f'<tspan class="series-{n}" dx="8">{escape(one.name)}</tspan>' for n, one in enumerate(series)
    )
    return f'<text x="{WIDTH - RIGHT}" y="16" text-anchor="end">{parts}</text>'

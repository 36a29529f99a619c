"""Pictures to scale, as SVG without a style of its own: a rollout, and the activity of the last steps. Places
along the width are percentages, so that text keeps its size on a narrow screen.

In a rollout the trunk is one row, and under each B_i stands its leaf A_i. A_i and B_i begin at the same
position and are equally long, so leaves never overlap. A bar is an end of sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from megatron_eqlen.metrics import STAGES as ALL_STAGES
from megatron_eqlen.report.format import compact
from megatron_eqlen.report.metrics import Records
from megatron_eqlen.report.rollouts import RolloutView, SegmentView
from megatron_eqlen.report.run_state import STEPS

PROMPT, ROW, GAP = 4.0, 20, 8
"""Width of the prompt's box in percent; pixels of a row, and between rows."""

LANES = {
    "engine": ("harvest", "evaluate"),
    "graders": ("score",),
    "trainer": ("trees", "train", "sync", "checkpoint"),
}
STAGES = tuple(stage for lane in LANES.values() for stage in lane)
COLOURS = (
    "#3f7ad6", "#d9822b", "#379a72", "#a65bbd", "#c95567", "#8a8f98", "#4aa3b5", "#9a7350", "#9cab2a",
    "#e07fb4",
)  # fmt: skip
"""Colours of series and stages, that can be told apart on light and on dark ground."""
LEFT, LANE, BOTTOM = 14.0, 26, 20
"""Percent left of the spans; pixels of a lane, and below all of them."""


def stage_colour(stage: str) -> str:
    """Return the colour of a stage, the same in every picture."""
    order = [*STAGES, *(other for other in ALL_STAGES if other not in STAGES)]
    return COLOURS[order.index(stage) % len(COLOURS)]


def draw(rollout: RolloutView) -> str:
    """Draw a rollout; widths are tokens, colours the segments' roles."""
    rows = _rows(rollout)
    end = max((segment.inherited + segment.length for row in rows for segment in row), default=1)
    scale = (100 - PROMPT) / max(end, 1)
    parts = [_box("prompt", 0, 0, PROMPT, "q", "the prompt")]
    for number, row in enumerate(rows):
        parts += [_segment(segment, number, scale) for segment in row]
    return _svg("stream", rollout.title, parts, len(rows) * (ROW + GAP) or ROW)


def _rows(rollout: RolloutView) -> list[list[SegmentView]]:
    if not rollout.pairs:
        return [[segment] for segment in rollout.segments]
    trunk = [pair.b for pair in rollout.pairs] + rollout.segments
    return [trunk, [pair.a for pair in rollout.pairs]]


def _segment(segment: SegmentView, row: int, scale: float) -> str:
    left, top, width = PROMPT + segment.inherited * scale, row * (ROW + GAP), segment.length * scale
    fork = _line("fork", left, ROW, top) if row else ""
    reward = "" if segment.reward is None else f", reward {compact(segment.reward)}"
    title = f"{segment.label}: {segment.length} tokens{reward}"
    end = _line("end", left + width, top, top + ROW) if segment.end == "stop" else ""
    return fork + _box(segment.role, left, top, width, segment.label, title) + end


def _box(role: str, left: float, top: float, width: float, label: str, title: str) -> str:
    place = f'x="{left:.2f}%" y="{top}" width="{width:.2f}%" height="{ROW}"'
    return (
        f'<g><title>{escape(title)}</title><rect class="{role}" {place} rx="3"/>'
        f'<svg {place}><text x="6" y="14">{escape(label)}</text></svg></g>'
    )


def _line(kind: str, x: float, top: float, bottom: float) -> str:
    return f'<line class="{kind}" x1="{x:.2f}%" x2="{x:.2f}%" y1="{top}" y2="{bottom}"/>'


def timeline(records: Records) -> tuple[list[tuple[str, str, str]], str]:
    """Return (stage, its seconds, its colour) of the last ``STEPS`` steps, and their picture: a lane each for
    engine, graders and trainer, and a line at each step's end. Empty if no step has spans."""
    shown = [record for record in records if record["spans"]][-STEPS:]
    spans = [span for record in shown for span in record["spans"] if span["stage"] in STAGES]
    if not spans:
        return [], ""
    seconds = dict.fromkeys(STAGES, 0.0)
    for span in spans:
        seconds[span["stage"]] += span["ended"] - span["began"]
    first, last = min(span["began"] for span in spans), max(record["time"] for record in shown)
    scale, bottom = (97 - LEFT) / max(last - first, 1e-9), LANE * len(LANES)

    def place(moment: float) -> float:
        return LEFT + (moment - first) * scale

    parts = [
        f'<text x="0" y="{LANE * (number + 0.6):.0f}">{name}</text>' for number, name in enumerate(LANES)
    ]
    for record in shown:
        end = place(record["time"])
        parts.append(_line("step", end, 0, bottom))
        parts.append(f'<text x="{end:.2f}%" y="{bottom + 14}" class="ended">step {record["step"]}</text>')
    for span in spans:
        lane = next(number for number, stages in enumerate(LANES.values()) if span["stage"] in stages)
        left, right = place(span["began"]), place(span["ended"])
        parts.append(
            f'<rect fill="{stage_colour(span["stage"])}" x="{left:.2f}%" y="{LANE * lane + 4}" '
            f'width="{max(right - left, 0.1):.2f}%" height="{LANE - 8}">'
            f"<title>{span['stage']}: {compact(span['ended'] - span['began'])} s</title></rect>"
        )
    legend = [(stage, f"{compact(total)} s", stage_colour(stage)) for stage, total in seconds.items()]
    return legend, _svg("timeline", "who worked when in the last steps", parts, bottom + BOTTOM)


def _svg(kind: str, title: str, parts: Sequence[str], height: int) -> str:
    return (
        f'<svg class="{kind}" width="100%" height="{height}" role="img" '
        f'aria-label="{escape(title)}">{"".join(parts)}</svg>'
    )

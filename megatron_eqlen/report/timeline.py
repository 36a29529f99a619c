"""Who worked when in the last steps of a run, as a picture: a lane each for engine, graders and trainer."""

from __future__ import annotations

from html import escape

from megatron_eqlen.report.chart import LEFT, RIGHT, WIDTH, svg
from megatron_eqlen.report.format import compact
from megatron_eqlen.report.metrics import SPANS, Records

STEPS = 4
LANES = {
    "engine": ("harvest", "evaluate"),
    "graders": ("score",),
    "trainer": ("trees", "train", "sync", "checkpoint"),
}
STAGES = tuple(stage for lane in LANES.values() for stage in lane)
"""In the order of their colours."""
LANE, TOP, BOTTOM = 26, 8, 20


def timeline(title: str, records: Records) -> tuple[list[tuple[str, str]], str]:
    """Each stage with its seconds, and the picture of the last ``STEPS`` steps, whose ends are lines. Empty
    where no step has spans."""
    shown = [record for record in records if record.get(SPANS)][-STEPS:]
    spans = [span for record in shown for span in record[SPANS] if span["stage"] in STAGES]
    if not spans:
        return [], ""
    seconds = dict.fromkeys(STAGES, 0.0)
    for span in spans:
        seconds[span["stage"]] += span["ended"] - span["began"]
    first, last = min(span["began"] for span in spans), max(record["time"] for record in shown)
    scale = (WIDTH - LEFT - RIGHT) / max(last - first, 1e-9)

    def place(moment: float) -> float:
        return LEFT + (moment - first) * scale

    bottom = TOP + LANE * len(LANES)
    parts = [
        f'<text x="{LEFT - 6}" y="{TOP + LANE * (number + 0.6):.0f}" class="y">{name}</text>'
        for number, name in enumerate(LANES)
    ]
    for record in shown:
        x = f"{place(record['time']):.1f}"
        parts.append(f'<line class="grid" x1="{x}" x2="{x}" y1="{TOP}" y2="{bottom}"/>')
        parts.append(f'<text x="{x}" y="{bottom + 14}" class="x">{record["step"]}</text>')
    parts += [_bar(span["stage"], place(span["began"]), place(span["ended"]), span) for span in spans]
    legend = [(stage, f"{compact(total)} s") for stage, total in seconds.items()]
    return legend, svg(title, parts, bottom + BOTTOM)


def _bar(stage: str, left: float, right: float, span: dict[str, float]) -> str:
    lane = next(number for number, stages in enumerate(LANES.values()) if stage in stages)
    return (
        f'<rect class="c{STAGES.index(stage)}" x="{left:.1f}" y="{TOP + LANE * lane + 4}" '
        f'width="{max(right - left, 0.5):.1f}" height="{LANE - 8}">'
        f"<title>{escape(stage)}: {compact(span['ended'] - span['began'])} s</title></rect>"
    )

"""A rollout drawn to scale: the trunk in one row, and under each B_i its leaf A_i of the same length.

A_i and B_i begin at the same position and are equally long, so leaves never overlap. While a stream is
harvested, its two open tracks stand behind them. A bar is an end of sequence.
"""

from __future__ import annotations

from html import escape

from megatron_eqlen.report.format import compact
from megatron_eqlen.report.rollouts import RolloutView, SegmentView

WIDTH, PROMPT, ROW, GAP = 800, 30, 20, 8


def draw(rollout: RolloutView) -> str:
    """An SVG; widths are tokens, colours the segments' roles."""
    rows = _rows(rollout)
    end = max((one.inherited + one.length for row in rows for one in row), default=1)
    scale = (WIDTH - PROMPT - 2) / max(end, 1)
    parts = [_box("prompt", 0, 0, PROMPT - 2, "q", "the prompt")]
    for number, row in enumerate(rows):
        parts += [_segment(one, number, scale) for one in row]
    height = len(rows) * (ROW + GAP) or ROW
    return (
        f'<svg class="stream" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{escape(rollout.title)}">{"".join(parts)}</svg>'
    )


def _rows(rollout: RolloutView) -> list[list[SegmentView]]:
    if not rollout.pairs:
        return [[segment] for segment in rollout.segments + rollout.opened]
    trunk = [pair.b for pair in rollout.pairs] + rollout.segments + rollout.opened[:1]
    return [trunk, [pair.a for pair in rollout.pairs] + rollout.opened[1:]]


def _segment(segment: SegmentView, row: int, scale: float) -> str:
    left, top = PROMPT + segment.inherited * scale, row * (ROW + GAP)
    fork = ""
    if row:
        fork = f'<path class="fork" d="M{left:.1f} {ROW / 2} V{top + ROW / 2} h3"/>'
    reward = "" if segment.reward is None else f", reward {compact(segment.reward)}"
    title = f"{segment.label}: {segment.length} tokens{reward}"
    end = ""
    if segment.end == "stop":
        end = f'<path class="end" d="M{left + segment.length * scale - 2:.1f} {top} v{ROW}"/>'
    return fork + _box(segment.role, left, top, segment.length * scale, segment.label, title) + end


def _box(role: str, left: float, top: float, width: float, label: str, title: str) -> str:
    text = f'<text x="{left + 6:.1f}" y="{top + 14}">{escape(label)}</text>' if width > 8 * len(label) else ""
    return (
        f'<g><title>{escape(title)}</title><rect class="{role}" x="{left + 1:.1f}" y="{top}" '
        f'width="{max(width - 2, 1):.1f}" height="{ROW}" rx="3"/>{text}</g>'
    )

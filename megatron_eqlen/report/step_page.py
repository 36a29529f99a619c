"""All rollouts of some steps on one static page: ``eqlen report RUN --step 12``, or ``--step 10-12``.

Facts that the page filters by lie open in it. A rollout's text and columns of tokens are compressed, and
unpacked by the browser when somebody looks at that rollout.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from megatron_eqlen.files import write_text
from megatron_eqlen.recipe.load import load_run
from megatron_eqlen.report.page import environment, own
from megatron_eqlen.report.recorded import RecordedStep, find_decoder
from megatron_eqlen.report.rollouts import Decode, RolloutView, SegmentView
from megatron_eqlen.rollout.record.reader import scored_steps, step_files
from megatron_eqlen.sampling import KINDS
from megatron_eqlen.types import Node, Part, Rollout

DIGITS = 3
"""Decimal places of log-probs; advantages and weights have as many significant digits."""
CUT = 4
"""Most tokens that one character is made of."""


def write_step_page(run: Path, first: int, last: int) -> Path:
    """Write ``rollouts-12.html`` (``rollouts-10-12.html``) of the steps ``first`` to ``last`` (from 1)
    into the folder ``run``; return its path.

    Raises ValueError naming the steps that are recorded if one of these is not, or a file that is damaged.
    """
    recipe, folders = load_run(run), {n + 1: folder for n, folder in scored_steps(run / "streams")}
    if missing := [step for step in range(first, last + 1) if step not in folders]:
        raise ValueError(
            f"--step {missing[0]}: expected one of the recorded and graded steps of {run / 'streams'} "
            f"({_spans([*folders]) or 'there are none'}), found no such step"
        )
    decoder, rows = find_decoder(recipe.model), []
    for number in range(first, last + 1):
        step = RecordedStep(step_files(folders[number]), recipe)
        rows += [{"step": number} | row for row in rollout_rows(step, decoder.decode)]
    name = str(first) if first == last else f"{first}-{last}"
    path = run / f"rollouts-{name}.html"
    template = environment().get_template("rollouts.html.jinja")
    style, script = own("page.css"), own("rollouts.js")
    title = f"{recipe.name} · {recipe.method} · seed {recipe.seed}"
    page = template.render(
        title=title, step=name, rows=rows, note=decoder.note, style=style, script=script, recipe=recipe
    )
    write_text(path, page)
    return path


def rollout_rows(step: RecordedStep, decode: Decode) -> Iterator[dict[str, Any]]:
    """Yield each rollout of ``step`` as plain data: what the page filters by, and ``packed``."""
    token_text = cache(lambda token_ids: decode(np.array(token_ids, np.int32)))
    for rollout, seen in zip(step.rollouts, step.views(step.rollouts, decode), strict=True):
        grades = [part.grade for part in rollout.parts if part.grade is not None]
        detail = json.dumps(
            _detail(rollout, seen, step, token_text), ensure_ascii=False, separators=(",", ":")
        )
        yield {
            "prompt": rollout.prompt_id,
            "source": rollout.prompt.source or rollout.prompt_id.partition("/")[0],
            "title": seen.title,
            "question": seen.question[:160],
            "verdicts": sorted({grade.verdict for grade in grades}),
            "reward": _rounded(np.mean([grade.reward for grade in grades])) if grades else None,
            "length": max((length for _, length, _ in rollout.lines()), default=0),
            "gap": _gap(seen),
            "packed": base64.b64encode(zlib.compress(detail.encode(), 9)).decode(),
        }


def unpacked(packed: str) -> dict[str, Any]:
    """Return the ``question`` and ``parts`` of a rollout. A part has its place in the tree, facts, the
    text of each token, and ``columns`` with a number for each token, or one for all."""
    return json.loads(zlib.decompress(base64.b64decode(packed)))


def _gap(seen: RolloutView) -> float | None:
    """Return the largest difference of rewards within a pair, or without pairs of all parts."""
    sets = [[side.reward for side in pair] for pair in seen.pairs] or [[one.reward for one in seen.segments]]
    known = [[reward for reward in rewards if reward is not None] for rewards in sets]
    return max((_rounded(max(rewards) - min(rewards)) for rewards in known if rewards), default=None)


def _detail(rollout: Rollout, seen: RolloutView, step: RecordedStep, token_text: Any) -> dict[str, Any]:
    segments = {segment.label: segment for segment in seen.all_segments()}
    places = {part.number: place for place, part in enumerate(rollout.parts)}
    _, labels = KINDS[rollout.kind].labels(rollout)
    parts = [
        _part(part, segments[label], step.node_of(part), token_text) | {"parent": places.get(part.parent, -1)}
        for label, part in zip(labels, rollout.parts, strict=True)
    ]
    return {"question": seen.question, "parts": parts}


def _part(part: Part, segment: SegmentView, node: Node | None, token_text: Any) -> dict[str, Any]:
    generated = part.tokens.is_generated
    columns = {}
    if "logprobs" in part.tokens:
        columns["log-prob"] = np.round(part.tokens["logprobs"].astype(float), DIGITS)
    if node is not None:
        advantages = np.zeros(len(generated))
        advantages[generated] = node.advantage
        columns |= {"advantage": advantages, "weight": np.where(generated, node.weight, 0.0)}
    if "versions" in part.tokens:
        columns["version"] = part.tokens["versions"]
    if not generated.all():
        columns["given"] = ~generated
    return {
        "label": segment.label,
        "facts": [*segment.facts(), *([segment.use] if segment.use else [])],
        "role": segment.role,
        "start": segment.inherited,
        "ended": segment.end == "stop",
        "tokens": _texts(part.token_ids.tolist(), token_text),
        "columns": {name: _numbers(values) for name, values in columns.items()},
    }


def _texts(token_ids: list[int], token_text: Any) -> list[str]:
    """Return the text of each token. A character that several tokens make stands at the last of them."""
    texts, cut = list[str](), list[int]()
    for token in token_ids:
        cut.append(token)
        text = token_text(tuple(cut))
        whole = not text.endswith("\ufffd") or len(cut) == CUT
        texts.append(text if whole else "")
        cut = [] if whole else cut
    return texts


def _numbers(values: np.ndarray) -> float | list[float]:
    """Return one number if all are equal."""
    if len(values) and (values == values[0]).all():
        return _rounded(values[0].item())
    return [_rounded(value) for value in values.tolist()]


def _rounded(value: Any) -> float:
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else int(value)


def _spans(steps: list[int]) -> str:
    """Format rising numbers: ``1-3, 7``."""
    starts = [n for n in steps if n - 1 not in steps]
    ends = [n for n in steps if n + 1 not in steps]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))

"""Tables as rows of named values, written as text, Markdown, LaTeX or JSON.

A row is a dict from a column's name to its value; a column's name may have two levels, (model, benchmark).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from megatron_eqlen.evaluation.statistics import Interval
from megatron_eqlen.report.format import compact

Column = str | tuple[str, str]
WIDE = 5
"""Most columns that fit on a page of LaTeX."""
Rows = Sequence[dict[Any, Any]]


@dataclass(frozen=True)
class Accuracy:
    """Accuracy of a method over its seeds, as the paper prints it and with the interval that readers
    expect."""

    paper: Interval
    """Bootstrap over seeds, problems held fixed."""
    headline: Interval
    """Bootstrap over seeds and problems."""
    seeds: int

    @property
    def plus_minus(self) -> str:
        """``84.2±1.0``: half the width of the paper's interval."""
        return f"{100 * self.paper.mean:.1f}±{50 * (self.paper.high - self.paper.low):.1f}"

    @property
    def brackets(self) -> str:
        return f"[{100 * self.headline.low:.1f}, {100 * self.headline.high:.1f}]"


@dataclass(frozen=True)
class Difference:
    """Difference of two methods' accuracies, paired over their seeds."""

    interval: Interval
    detectable: float
    """Smallest difference that as many seeds would have shown in 80% of all experiments."""
    seeds: int

    def __str__(self) -> str:
        """Format the difference: ``+2.0 [-0.9, +4.9] / 4.1``, in points."""
        mean, low, high = (
            100 * value for value in (self.interval.mean, self.interval.low, self.interval.high)
        )
        return f"{mean:+.1f} [{low:+.1f}, {high:+.1f}] / {100 * self.detectable:.1f}"


@dataclass(frozen=True)
class Change:
    """Change of a quantity during runs, a mean over their seeds."""

    interval: Interval
    seeds: int

    def __str__(self) -> str:
        """Format the change: ``+12.3 [+8.1, +16.5]``; without an interval for a single seed."""
        mean, low, high = self.interval.mean, self.interval.low, self.interval.high
        return f"{mean:+.3g}" if self.seeds == 1 else f"{mean:+.3g} [{low:+.3g}, {high:+.3g}]"


@dataclass(frozen=True)
class Table:
    title: str
    rows: Rows
    notes: Sequence[str] = ()


def columns(rows: Rows) -> list[Column]:
    return list(dict.fromkeys(column for row in rows for column in row))


def best(rows: Rows) -> set[tuple[int, Column]]:
    """Return (row, column) of the highest accuracy of each column that has several."""
    found = set()
    for column in columns(rows):
        values = [row.get(column) for row in rows]
        means = {n: value.paper.mean for n, value in enumerate(values) if isinstance(value, Accuracy)}
        if len(means) > 1:
            found |= {(n, column) for n, mean in means.items() if mean == max(means.values())}
    return found


def text(table: Table) -> str:
    """Format a table as text, aligned by spaces."""
    lines = grid(table.rows)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = [
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip()
        for line in lines
    ]
    return "\n".join([table.title, "", *aligned, *_notes(table)])


def markdown(table: Table) -> str:
    """Format a table for GitHub, the best accuracy of a column in bold."""
    return "\n".join([f"### {table.title}", "", markdown_rows(table.rows), *_notes(table)])


def markdown_rows(rows: Rows) -> str:
    """Format the rows as a GitHub table without title and notes."""
    lines = grid(rows, lambda value, is_best: f"**{plain(value)}**" if is_best else plain(value))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    head, *body = lines
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
        for line in (head, ["-" * width for width in widths], *body)
    )


def latex(table: Table) -> str:
    """Format a table for LaTeX's booktabs, as the paper's: models above their benchmarks, the best in bold, a
    wide one scaled to the page (graphicx)."""
    names = columns(table.rows)
    _, *lines = grid(table.rows, _latex_value, _escaped)
    heads = [_heads(names)] if any(isinstance(name, tuple) for name in names) else []
    heads.append(" & ".join(rf"\textbf{{{_escaped(_leaf(name))}}}" for name in names) + r" \\")
    notes = [f"% {note}" for note in table.notes]
    parts = [
        *notes, r"\begin{table}[h]", r"\centering", rf"\begin{{tabular}}{{l{'c' * (len(names) - 1)}}}",
        r"\toprule", *heads, r"\midrule", *(" & ".join(line) + r" \\" for line in lines), r"\bottomrule",
        r"\end{tabular}", rf"\caption{{{_escaped(table.title)}.}}", r"\end{table}",
    ]  # fmt: skip
    if len(names) > WIDE:
        begin = len(notes) + 2
        parts.insert(begin, r"\resizebox{\columnwidth}{!}{%")
        parts.insert(-2, "}")
    return "\n".join(parts)


def as_json(tables: Sequence[Table]) -> str:
    """Format tables as JSON with all digits; a column of two levels is ``model benchmark``."""
    plain_tables = [
        {
            "title": table.title,
            "rows": [{_joined(name): _data(value) for name, value in row.items()} for row in table.rows],
            "notes": list(table.notes),
        }
        for table in tables
    ]
    return json.dumps(plain_tables, indent=1, ensure_ascii=False) + "\n"


def plain(value: Any) -> str:
    """Format a value: ``84.2±1.0 [80.3, 88.0]`` for an accuracy, ``–`` for None."""
    if isinstance(value, Accuracy):
        return f"{value.plus_minus} {value.brackets}" if value.seeds > 1 else f"{value.headline}"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return compact(value)
    return "–" if value is None else str(value)


def grid(
    rows: Rows,
    of: Callable[[Any, bool], str] = lambda value, is_best: plain(value),
    named: Callable[[str], str] = str,
) -> list[list[str]]:
    """Return head and rows as texts: ``named(column)``, and ``of(value, whether it is the column's
    best)``."""
    names, top = columns(rows), best(rows)
    body = [[of(row.get(name), (n, name) in top) for name in names] for n, row in enumerate(rows)]
    return [[named(_joined(name)) for name in names], *body]


def _joined(name: Column) -> str:
    return name if isinstance(name, str) else " ".join(name)


def _leaf(name: Column) -> str:
    return name if isinstance(name, str) else name[1]


def _heads(names: Sequence[Column]) -> str:
    """Return the row of models, each over its columns."""
    parts = []
    for model, under in groupby(names, key=lambda name: "" if isinstance(name, str) else name[0]):
        over = rf"\multicolumn{{{len([*under])}}}{{c}}{{\textbf{{{_escaped(model)}}}}}"
        parts.append(over if model else "")
    return " & ".join(parts) + r" \\"


def _latex_value(value: Any, is_best: bool) -> str:
    if not isinstance(value, Accuracy) or value.seeds < 2:
        return _escaped(plain(value))
    number = value.plus_minus.replace("±", r"$\pm$")
    return (rf"\textbf{{{number}}}" if is_best else number) + rf" {{\scriptsize {value.brackets}}}"


def _escaped(value: str) -> str:
    named = {"\\": "backslash", "~": "asciitilde", "^": "asciicircum", "<": "less", ">": "greater"}
    special = (
        {"–": "--", "±": r"$\pm$"}
        | {character: rf"\text{name}{{}}" for character, name in named.items()}
        | {character: f"\\{character}" for character in "&%$#_{}"}
    )
    return "".join(special.get(character, character) for character in value)


def _data(value: Any) -> Any:
    return asdict(value) if isinstance(value, Accuracy | Difference | Change) else value


def _notes(table: Table) -> list[str]:
    return ["", *table.notes] if table.notes else []

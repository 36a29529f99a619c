"""The results of a benchmark, as a table."""

from __future__ import annotations

from typing import Any

from megatron_eqlen.report.format import markdown_rows


def show(results: list[dict[str, Any]], title: str) -> None:
    """Print ``results``, one a line."""
    print(f"{title}\n\n{markdown_rows(results)}")

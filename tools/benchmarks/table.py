"""The results of a benchmark, as a table on the terminal and as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def show(results: list[dict[str, Any]], title: str, json_file: Path | None) -> None:
    """Print ``results``, dicts with the same keys, one a line; write them to ``json_file`` if given."""
    print(title)
    columns = list(results[0])
    cells = [columns] + [[_text(result[column]) for column in columns] for result in results]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    if json_file is not None:
        json_file.write_text(
            json.dumps({"title": title, "results": results}, indent=1) + "\n", encoding="utf-8"
        )


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)

"""The results of a benchmark, as a table on the terminal and as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_eqlen.report.compare import markdown_rows


def show(results: list[dict[str, Any]], title: str, json_file: Path | None) -> None:
    """Print ``results``, one a line; write them to ``json_file`` if given."""
    print(f"{title}\n\n{markdown_rows(results)}")
    if json_file is not None:
        json_file.write_text(json.dumps({"title": title, "results": results}, indent=1) + "\n")

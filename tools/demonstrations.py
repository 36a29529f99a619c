"""Chats in which a tool is called, and files of JSON lines, for tools that make tasks of agents."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_eqlen.files import replaced
from megatron_eqlen.hf.tokenizer import Turn


def called(name: str, arguments: dict[str, str], answer: str) -> list[Turn]:
    """Return a turn of the policy that calls a tool, and the tool's answer: turns of their own, so that the
    answer is not imitated."""
    call = json.dumps({"name": name, "arguments": arguments})
    return [
        {"role": "assistant", "content": f"<tool_call>{call}</tool_call>"},
        {"role": "tool", "content": answer},
    ]


def write_lines(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write ``rows`` as JSON lines; the file appears complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced(path) as partial:
        partial.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{path}: {len(rows)} rows")

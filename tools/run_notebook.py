#!/usr/bin/env python
"""Runs the cells of a notebook in order, as Jupyter does, and with ``--write`` keeps what they print.

tools/run_notebook.py docs/first_run.ipynb --write
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))


def run(notebook: dict[str, Any]) -> None:
    """Run the code cells in one namespace; the outputs of each become what it and its children print."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in (cell for cell in notebook["cells"] if cell["cell_type"] == "code"):
        code = ast.parse("".join(cell["source"]))
        last = code.body.pop() if isinstance(code.body[-1], ast.Expr) else None
        shown = None
        with tempfile.TemporaryFile() as printed:
            kept = os.dup(1)
            os.dup2(printed.fileno(), 1)
            try:
                exec(compile(code, "cell", "exec"), names)
                if isinstance(last, ast.Expr):
                    shown = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
            finally:
                sys.stdout.flush()
                os.dup2(kept, 1)
                os.close(kept)
                printed.seek(0)
                text = printed.read().decode()
                print(text, end="", flush=True)
        cell["outputs"] = []
        if text:
            lines = text.splitlines(keepends=True)
            cell["outputs"].append({"output_type": "stream", "name": "stdout", "text": lines})
        if shown is not None:
            data = {"text/plain": [repr(shown)]}
            result = {"output_type": "execute_result", "data": data, "metadata": {}, "execution_count": None}
            cell["outputs"].append(result)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--write", action="store_true", help="keep the outputs in the file")
    arguments = parser.parse_args()
    notebook = json.loads(arguments.file.read_text(encoding="utf-8"))
    run(notebook)
    if arguments.write:
        text = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
        arguments.file.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

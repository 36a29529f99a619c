"""``eqlen new``: files of a user's own from the templates of this folder."""

from __future__ import annotations

import ast
import keyword
import re
from importlib.util import find_spec
from pathlib import Path

from jinja2 import Template

from megatron_eqlen.files import refuse_existing, write_text


def write(kind: str, name: str) -> str:
    """Write ``NAME.py`` and ``test_NAME.py`` here; return the test's command and the recipe's lines. Raises
    ValueError for a name that cannot be imported, or that another module or file has."""
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name) or keyword.iskeyword(name):
        raise ValueError(f"NAME: expected a module's name, of letters, digits and _, found {name!r}")
    files = {Path(f"{name}.py"): kind, Path(f"test_{name}.py"): f"{kind}_test"}
    for file in (*files, Path(name)):  # Python prefers a package of that name
        refuse_existing(file)
    if known := find_spec(name):
        raise ValueError(f"NAME: expected a name of your own, found the module {name}: {known.origin}")
    for file, template in files.items():
        text = Path(__file__).with_name(f"{template}.py.jinja").read_text(encoding="utf-8")
        write_text(file, Template(text, keep_trailing_newline=True).render(name=name))
    said = ast.get_docstring(ast.parse(Path(f"{name}.py").read_text(encoding="utf-8"))) or ""
    return f"{name}.py, tried by: python -m pytest test_{name}.py\n\n{said}"

"""Templates of self-contained HTML pages: style, script and the chart library are part of the file.

Their content security policy names the style and the script by their hashes, so nothing else can run or load.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from functools import cache
from importlib import resources
from typing import Any

import jinja2

from megatron_eqlen.report.drawing import draw
from megatron_eqlen.report.format import compact, percent, points, shorten

FOLDER = resources.files("megatron_eqlen.report")


@cache
def style() -> str:
    return _text("uplot/uPlot.min.css") + "\n" + _text("page.css")


@cache
def script() -> str:
    return _text("uplot/uPlot.iife.min.js") + "\n" + _text("page.js")


@cache
def policy() -> str:
    """Return the content security policy: the page may load nothing, and ask only its own server."""
    return (
        f"default-src 'none'; script-src {_source(script())}; style-src {_source(style())}; img-src data:; "
        f"connect-src 'self'; base-uri 'none'; form-action 'none'"
    )


def environment(**filters: Callable) -> jinja2.Environment:
    """Return the environment for the templates of this folder; a missing value is an error."""
    made: Any = jinja2.Environment(
        loader=jinja2.PackageLoader("megatron_eqlen.report", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(
        compact=compact, shorten=shorten, percent=percent, points=points, draw=draw, **filters
    )
    made.globals.update(style=style, script=script, policy=policy)
    return made


def _text(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def _source(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

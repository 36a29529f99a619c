"""Pages are made of the templates beside this file; each is one file, and only the live one has a script."""

from __future__ import annotations

from collections.abc import Callable

import jinja2

from megatron_eqlen.report.format import compact, percent, points, shorten


def template(name: str, **filters: Callable) -> jinja2.Template:
    """The template called ``name``; a value that it lacks is an error."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("megatron_eqlen.report", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(compact=compact, shorten=shorten, percent=percent, points=points, **filters)
    return environment.get_template(name)

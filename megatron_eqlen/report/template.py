"""Pages are made of the templates beside this file; each page is one file without scripts."""

from __future__ import annotations

from collections.abc import Callable

import jinja2

from megatron_eqlen.report.format import compact


def template(name: str, **filters: Callable) -> jinja2.Template:
    """The template called ``name``; a value that it lacks is an error."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("megatron_eqlen.report", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(compact=compact, **filters)
    return environment.get_template(name)

"""Render the HTML pages from Jinja templates; every value is escaped, except a chart's own SVG.

A page is one file: its style and its charts stand inside, so it opens without network and runs no script.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment


def render_page(template: str, **values: Any) -> str:
    """The text of a page; `template` is a name in `templates/` without its `.html.jinja`."""
    return _environment().get_template(f"{template}.html.jinja").render(values)


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=PackageLoader("flatout.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )

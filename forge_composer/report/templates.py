"""The pages' templates: `page.html.jinja` of a package, filled in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined


def fill_page(package: str, *, filters: Mapping[str, Callable[..., Any]] | None = None, **values: Any) -> str:
    """The page of a package as text; what is not markup is escaped, and a missing value is an error."""
    environment = Environment(
        loader=PackageLoader(package, "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= filters or {}
    return environment.get_template("page.html.jinja").render(**values)

"""Fill the template of the report's page. Nothing reaches the page but as text, except for pictures drawn here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptkit.markup import text
from ckptkit.words import brief, format_bytes

GENERATOR = "ckptkit report"  # by which a page is known as ours


def fill_page(content: Mapping[str, Any]) -> str:
    """Return the page that `report.html` makes of the values in it."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("ckptkit", "."),
        autoescape=True,
        finalize=as_text,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    environment.filters |= {
        "brief": lambda number: "" if number is None else brief(number),
        "bytes": format_bytes,
        "grouped": lambda number: "" if number is None else f"{number:,}",
        "spaced": lambda name: name.replace("_", " "),
    }
    return environment.get_template("plugins/report/report.html").render(content, generator=GENERATOR)


def as_text(value: object) -> object:
    """Return a value as the page shows it: markup as it is, None as nothing, all else escaped."""
    return value if hasattr(value, "__html__") else "" if value is None else text(str(value))

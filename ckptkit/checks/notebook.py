"""Describe a layout in a line, and as a small HTML table that is legible on light and on dark pages."""

from __future__ import annotations

from itertools import islice

from ckptkit.checks.tree import Branch, fold
from ckptkit.layout import Layout
from ckptkit.markup import Markup, element
from ckptkit.words import count, format_bytes

_MOST_LINES = 60
_INDENT = 1.2  # em for each level


def describe(layout: Layout) -> str:
    """Return format, number of tensors, bytes and place."""
    tensors = count(len(layout.tensors), "tensor")
    return f"{layout.format} checkpoint, {tensors}, {format_bytes(layout.nbytes)}: {layout.root}"


def html_of(layout: Layout) -> str:
    """Return the same, and the tensors folded by module; of many, the first lines."""
    lines = list(islice(fold(layout.specs), _MOST_LINES + 1))
    more = "..." if len(lines) > _MOST_LINES else None
    rows = [row_of(line) for line in lines[:_MOST_LINES]]
    head = element(
        "tr", *(element("th", name, style=cell("left")) for name in ("module or tensor", "", "tensors", "size"))
    )
    table = element("table", element("thead", head), element("tbody", *rows))
    return element("div", element("div", describe(layout)), table, more)


def row_of(line: Branch) -> Markup:
    """Return a row of the table."""
    return element(
        "tr",
        element("td", line.label, style=f"{cell('left')};padding-left:{_INDENT * line.depth + 0.5:.1f}em"),
        element("td", str(line.spec or ""), style=cell("left")),
        element("td", f"{line.tensors:,}", style=cell("right")),
        element("td", format_bytes(line.nbytes), style=cell("right")),
    )


def cell(side: str) -> str:
    """Return how a cell looks; colors are the page's."""
    return f"text-align:{side}"

"""Write Markdown: paragraphs, tables, and the parts of a page that a program writes. Measures nothing.

A part lies between `<!-- NAME -->` and `<!-- end of NAME -->`, each on a line of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill

ROOT = Path(__file__).parents[1]
WIDTH = 120


def paragraph(text: str) -> str:
    """Return a text in lines of 120 columns, with an empty line after it."""
    return fill(" ".join(text.split()), WIDTH, break_long_words=False, break_on_hyphens=False) + "\n"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as a table, the first of them its head: numbers to the right, short rows filled up."""
    head, *body = rows
    return "\n".join([line(head), line(["---", *["---:"] * (len(head) - 1)]), *(line(row, len(head)) for row in body)])


def line(cells: Sequence[str], width: int = 0) -> str:
    """Return one row of a table, with at least `width` cells."""
    return f"| {' | '.join([*cells, *[''] * (width - len(cells))])} |"


def fill_part(page: str, name: str, content: str) -> str:
    """Return `page` with `content` as its part `name`. Raises ValueError if it has no such part, or two."""
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    if page.count(begin) != 1 or page.count(end) != 1:
        raise ValueError(f"the page has no part, or more than one, between `{begin.strip()}` and `{end}`")
    before, rest = page.split(begin)
    return f"{before}{begin}\n{content.strip()}\n\n{end}{rest.split(end)[1]}"


def read_part(path: Path, name: str) -> str:
    """Return the part `name` of the page at `path`."""
    return path.read_text().partition(f"<!-- {name} -->\n")[2].partition(f"<!-- end of {name} -->")[0]


def write_part(path: Path, name: str, content: str) -> None:
    """Write `content` as the part `name` of the page at `path`."""
    path.write_text(fill_part(path.read_text(), name, content))

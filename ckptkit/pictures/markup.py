"""Markup: elements of SVG and HTML. Whatever is not `Markup` is text, and escaped: names are not trusted."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

_WITHOUT_END = frozenset({"meta", "br"})  # of HTML; a `/>` means nothing there
_ALONE = frozenset({"rect", "line", "circle", "path"})  # of SVG


class Markup(str):
    """Text that is markup, made by `element` or by hand."""

    __slots__ = ()


Child = str | Iterable["Child"] | None


def element(name: str, /, *children: Child, **attributes: object) -> Markup:
    """An element. Of attributes, `class_` is `class`, `stroke_width` is `stroke-width`, and None is left out."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(written(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    inside = join(children)
    if name in _WITHOUT_END:
        return Markup(f"<{name}{given}>")
    if name in _ALONE and not inside:
        return Markup(f"<{name}{given}/>")
    return Markup(f"<{name}{given}>{inside}</{name}>")


def join(children: Iterable[Child]) -> Markup:
    """Children one after the other; None is nothing."""
    return Markup(
        "".join(text(child) if isinstance(child, str) else join(child) for child in children if child is not None)
    )


def text(content: str) -> Markup:
    """Text as markup: escaped, and what cannot be seen, or not be in XML at all, spelled out."""
    if isinstance(content, Markup):
        return content
    return Markup(escape("".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in content)))


def written(value: object) -> str:
    """The value of an attribute; of numbers two digits after the point."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)

"""Create elements of SVG and HTML. Every string that is not `Markup` is escaped, because names are not trusted."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from ckptkit.words import escape_control_characters

_SELF_CLOSING = frozenset({"rect", "line", "circle", "path"})  # SVG elements that are self-closing if empty


class Markup(str):
    """Text that is already markup, and is not escaped."""

    __slots__ = ()

    def __html__(self) -> str:
        """Return the markup itself; template engines escape objects without this method."""
        return self


Child = str | Iterable["Child"] | None


def element(name: str, /, *children: Child, **attributes: object) -> Markup:
    """Return an element. `class_` is the attribute `class`, `stroke_width` is `stroke-width`; None is left out.

    Floats have two decimals.
    """
    given = ""
    for key, value in attributes.items():
        if value is not None:
            text = f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
            given += f' {key.rstrip("_").replace("_", "-")}="{escaped_text(text)}"'
    inside = join_markup(children)
    return Markup(f"<{name}{given}/>" if name in _SELF_CLOSING and not inside else f"<{name}{given}>{inside}</{name}>")


def svg_image(title: str, view_box: str, *children: Child) -> Markup:
    """Return an SVG image with a `title` that shows the rectangle `view_box`: left, top, width, height."""
    return element(
        "svg",
        element("title", title),
        *children,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=view_box,
        role="img",
        aria_label=title,
    )


def join_markup(children: Iterable[Child]) -> Markup:
    """Concatenate children; None is skipped."""
    return Markup(
        "".join(
            escaped_text(child) if isinstance(child, str) else join_markup(child)
            for child in children
            if child is not None
        )
    )


def escaped_text(content: str) -> Markup:
    """Return text as markup: escaped, with invisible and invalid characters spelled out."""
    if isinstance(content, Markup):
        return content
    return Markup(escape(escape_control_characters(content)))

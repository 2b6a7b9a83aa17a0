"""Pages: one HTML file with everything in it. It fetches nothing and runs no script: its own policy forbids both."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ckptkit.pictures.markup import Child, Markup, element
from ckptkit.pictures.style import COLOURS, PICTURES

GENERATOR = "ckptkit report"  # how a page is known as ours
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"

_STYLE = Markup("""
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--ground);color:var(--ink);line-height:1.5;font-size:15px;
font-family:ui-sans-serif,system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans",sans-serif}
main{max-width:1120px;margin:0 auto;padding:40px 28px 56px}
header p{margin:4px 0 0;color:var(--soft);overflow-wrap:anywhere}
h1{font-size:27px;line-height:1.2;letter-spacing:-.02em;margin:0;font-weight:650;overflow-wrap:anywhere}
h2{font-size:17px;letter-spacing:-.01em;margin:0 0 4px;font-weight:620}
section{margin-top:44px}
section>p{margin:0 0 14px;color:var(--soft);max-width:74ch}
dl.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:1px;margin:28px 0 0;
background:var(--faint);border:1px solid var(--faint);border-radius:10px;overflow:hidden}
dl.facts div{background:var(--card);padding:12px 16px}
dt{color:var(--soft);font-size:12.5px}
dd{margin:0;font-size:21px;font-weight:600;letter-spacing:-.01em;font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
dd small{display:block;font-size:12.5px;font-weight:400;color:var(--soft);letter-spacing:0}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,430px),1fr));gap:16px}
.card{background:var(--card);border:1px solid var(--faint);border-radius:10px;padding:16px 18px;min-width:0}
.wide{overflow-x:auto}
.wide svg.map{min-width:760px}
.wide table{min-width:620px}
.card+.card,.card+details,details+.card{margin-top:16px}.charts .card{margin:0}
table{border-collapse:collapse;width:100%;font-size:13.5px;font-variant-numeric:tabular-nums}
th{font-weight:500;color:var(--soft);text-align:left;font-size:12.5px}
th,td{padding:5px 14px 5px 0;border-bottom:1px solid var(--faint);vertical-align:top}
tr:last-child td{border-bottom:0}
.n+:not(.n){padding-left:12px}
th:last-child,td:last-child{padding-right:0}
.line{white-space:nowrap}
.n{text-align:right;white-space:nowrap}
code{font-family:ui-monospace,"SF Mono",Menlo,Consolas,"DejaVu Sans Mono",monospace;font-size:12.5px;
overflow-wrap:anywhere}
.good{color:var(--good)}.bad{color:var(--bad)}.soft{color:var(--soft)}
.share{display:block;height:4px;border-radius:2px;background:var(--accent);margin:4px 0 0 auto;min-width:1px}
details{margin-top:14px;font-size:13.5px}
summary{cursor:pointer;color:var(--soft)}
details>*+*{margin-top:10px}
footer{margin-top:52px;padding-top:14px;border-top:1px solid var(--faint);color:var(--soft);font-size:12.5px}
@media (max-width:560px){main{padding:24px 16px 40px}h1{font-size:22px}section{margin-top:34px}.card{padding:12px}
.charts svg text{font-size:14px}.charts svg .spot text{font-size:11px}}
@media print{main{max-width:none;padding:0}body{background:none}section,.card{break-inside:avoid}
.wide{overflow:visible}.wide svg.map,.wide table{min-width:0}}
""")


@dataclass(frozen=True, slots=True)
class Fact:
    """One of the numbers on top: what it is, and a few words more."""

    label: str
    value: str
    more: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a page; `lead` says in a sentence or two what there is to see. `name` is its place's in the page."""

    name: str
    title: str
    lead: str
    body: tuple[Child, ...]


def draw_page(title: str, lines: Sequence[str], facts: Sequence[Fact], sections: Sequence[Section], foot: str) -> str:
    """A whole page. `lines` are what stands below the title."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("meta", name="generator", content=GENERATOR),
        element("title", title),
        element("style", COLOURS, PICTURES, _STYLE),
    )
    body = element(
        "main",
        element("header", element("h1", title), [element("p", line) for line in lines]),
        element("dl", [draw_fact(fact) for fact in facts], class_="facts"),
        [draw_section(section) for section in sections],
        element("footer", foot),
    )
    return f"<!doctype html>\n{element('html', head, element('body', body), lang='en')}\n"


def draw_fact(fact: Fact) -> Markup:
    """A number with its label."""
    more = element("small", fact.more) if fact.more else None
    return element("div", element("dt", fact.label), element("dd", fact.value, more))


def draw_section(section: Section) -> Markup:
    """A part of the page under its title."""
    lead = element("p", section.lead) if section.lead else None
    title = element("h2", section.title, id=f"{section.name}-title")
    return element("section", title, lead, section.body, id=section.name, aria_labelledby=f"{section.name}-title")


def card(*children: Child, name: str | None = None) -> Markup:
    """A frame, which scrolls sideways if what is in it does not fit; `name` says to those who cannot see what it is."""
    focus = {"role": "region", "tabindex": 0, "aria_label": name} if name else {}
    return element("div", *children, class_="card wide" if name else "card", **focus)


def charts(pictures: Iterable[Child]) -> Markup:
    """Pictures in frames, side by side where there is room."""
    return element("div", [card(picture) for picture in pictures], class_="charts")


def table(header: Sequence[str], rows: Iterable[Sequence[Child]], numbers: Sequence[int] = ()) -> Markup:
    """A table; the columns `numbers` are set to the right."""
    kinds = ["n" if i in numbers else None for i in range(len(header))]
    head = [element("th", cell, class_=kind, scope="col") for cell, kind in zip(header, kinds, strict=True)]
    body = [
        element("tr", [element("td", cell, class_=kind) for cell, kind in zip(row, kinds, strict=True)]) for row in rows
    ]
    return element("table", element("thead", element("tr", head)), element("tbody", body))


def fold_away(summary: str, *children: Child) -> Markup:
    """What is shown when asked for."""
    return element("details", element("summary", summary), *children)


def code(name: str) -> Markup:
    """The name of a tensor or file."""
    return element("code", name)


def share(fraction: float) -> Markup:
    """A bar below a number, as long as a share of the column."""
    return element("span", class_="share", style=f"width:{100 * fraction:.1f}%")

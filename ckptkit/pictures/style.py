"""Style: the colours and letters of pictures and pages, on light ground and on dark. CSS that fetches nothing."""

from __future__ import annotations

from ckptkit.pictures.markup import Markup

# Eight that are told apart with any eyes, and dark letters on them, on either ground; next to each other where many
# owners run from one end to the other.
OWNERS = ("#6aa9ec", "#4fb8b3", "#74bd7d", "#c9b84c", "#eba550", "#e58a76", "#dd8abf", "#a794e8")

COLOURS = Markup("""
:root{color-scheme:light dark;--ground:#fcfcfb;--card:#fff;--ink:#1a1e24;--soft:#59626e;--faint:#e3e5e8;--line:#c9cdd3;
--accent:#2459c7;--second:#b04a12;--band:#2459c72b;--band2:#b04a122b;--good:#16723f;--bad:#b3261e}
@media (prefers-color-scheme:dark){:root{--ground:#13161a;--card:#1a1e24;--ink:#e7e9ec;--soft:#9fa8b3;--faint:#2a3038;
--line:#434b56;--accent:#7ba8ff;--second:#f0a06c;--band:#7ba8ff33;--band2:#f0a06c33;--good:#6fcf97;--bad:#ff8f86}}
""")

PICTURES = Markup("""
svg{display:block;width:100%;height:auto;font-family:ui-sans-serif,system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
svg text{fill:var(--soft);font-size:11px;font-variant-numeric:tabular-nums}
svg .name{fill:var(--ink);font-family:ui-monospace,"SF Mono",Menlo,Consolas,"DejaVu Sans Mono",monospace}
svg .head{font-weight:600}
svg .title{fill:var(--ink);font-size:13px;font-weight:600}
svg .strong{fill:var(--ink)}
svg text.on{fill:#10141a}
svg .grid{stroke:var(--faint)}
svg .axis{stroke:var(--line)}
svg .mean{stroke:var(--soft);stroke-dasharray:3 3}
svg .part{stroke:var(--card);stroke-width:1}
svg .part:hover{stroke:var(--ink)}
svg .curve{fill:none;stroke-width:1.6;stroke-linejoin:round;stroke-linecap:round}
svg .a{stroke:var(--accent)}svg .b{stroke:var(--second)}svg .dot.a{fill:var(--accent)}svg .dot.b{fill:var(--second)}
svg .band{stroke:none}svg .band.a{fill:var(--band)}svg .band.b{fill:var(--band2)}
svg .bad{stroke:var(--bad)}svg text.bad{fill:var(--bad);stroke:none}
svg .saved{fill:var(--accent)}svg .unfinished{fill:var(--card);stroke:var(--bad);stroke-dasharray:3 2}
svg .model{fill:var(--band);stroke:var(--accent)}
svg .kind{filter:brightness(.84) saturate(1.2)}
@media (prefers-color-scheme:dark){svg .kind{filter:none}}
svg .spot line,svg .spot circle,svg .spot text,svg .spot .plate{opacity:0}
svg .spot .reach{fill:transparent}
svg .spot .plate{fill:var(--card);stroke:var(--line)}
svg .spot:hover line,svg .spot:hover circle,svg .spot:hover text,svg .spot:hover .plate{opacity:1}
""")


def colour(position: int, count: int) -> str:
    """The colour of one of `count` owners: of few each its own, of many they run from the first to the last."""
    if count <= len(OWNERS):
        return OWNERS[position]
    place = position / (count - 1) * (len(OWNERS) - 1)
    left = min(int(place), len(OWNERS) - 2)
    pairs = zip(channels(OWNERS[left]), channels(OWNERS[left + 1]), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * (place - left)):02x}" for a, b in pairs)


def channels(colour: str) -> tuple[int, int, int]:
    """Red, green and blue of `#rrggbb`."""
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)

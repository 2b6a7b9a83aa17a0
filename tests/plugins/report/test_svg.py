"""Pictures as SVG: that they are well-formed, stay inside their frame, and tell what they show."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from ckptkit.checkpoints.checkpoint import open_layout
from ckptkit.markup import Markup
from ckptkit.plugins.report.chapters import draw_timeline
from ckptkit.plugins.report.curves import draw_curves
from ckptkit.plugins.report.history import Series
from ckptkit.plugins.report.layers import draw_layers, spread_apart
from ckptkit.plugins.report.shard_svg import OWNERS, as_svg_file, draw_shards, owner_color, rgb_channels, shorten
from ckptkit.plugins.report.shards import map_shards
from ckptkit.runs.ls import Listed, Listing
from tests import producers
from tests.conftest import Produce
from tests.plugins.report.layouts import cut_among, llama

SVG = "{http://www.w3.org/2000/svg}"


def parse(picture: str) -> ET.Element:
    root = ET.fromstring(picture)
    assert root.tag == f"{SVG}svg"
    assert root.find(f"{SVG}title") is not None
    left, top, width, height = map(float, root.attrib["viewBox"].split())
    for x, y in places(root):
        assert left <= x <= left + width
        assert top <= y <= top + height
    return root


def places(root: ET.Element) -> Iterator[tuple[float, float]]:
    """Corners of rectangles, ends of lines, centres of circles, starts of text."""
    for element in root.iter():
        number = {name: float(value) for name, value in element.attrib.items() if name in ("x", "y", "width", "height")}
        if "x" in number and "y" in number:
            yield number["x"], number["y"]
            yield number["x"] + number.get("width", 0), number["y"] + number.get("height", 0)
        if "cx" in element.attrib:
            yield float(element.attrib["cx"]), float(element.attrib["cy"])
        if element.tag.endswith("path"):
            for point in element.attrib["d"].replace("M", "L").replace("Z", "").split("L")[1:]:
                x, y = point.split()
                yield float(x), float(y)


def titles(root: ET.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{SVG}title")]


def parts(root: ET.Element) -> list[ET.Element]:
    return [element for element in root.iter(f"{SVG}rect") if element.get("class") == "part"]


def test_each_part_tells_name_indices_owner_bytes_and_file(produce: Produce) -> None:
    root = parse(as_svg_file(draw_shards(map_shards(open_layout(produce(producers.mesh).root)))))
    assert "model.rows[0:3, 0:3]: rank 0, 36 B, __0_0.distcp" in titles(root)
    assert "rank 1: 208 B" in titles(root)
    style = root.find(f"{SVG}style")
    assert style is not None
    assert "prefers-color-scheme:dark" in (style.text or "")


def test_widths_are_shares() -> None:
    layout = cut_among(3, {"a": (5, 2)})
    root = parse(draw_shards(map_shards(layout)))
    widths = [float(rect.attrib["width"]) for rect in parts(root)[3:]]
    assert [round(5 * width / sum(widths)) for width in widths] == [2, 2, 1]


def test_many_ranks_and_tensors_stay_small() -> None:
    shards = map_shards(cut_among(512, {f"w{i}.x{i}": (600 + i, 2) for i in range(100)}))
    picture = draw_shards(shards)
    root = parse(picture)
    assert len(picture) < 400_000
    assert len(parts(root)) < 2500
    assert any("left out: 40 smaller tensors" in (text.text or "") for text in root.iter(f"{SVG}text"))


@pytest.mark.parametrize("is_narrow", [False, True])
def test_an_empty_checkpoint_is_drawn(is_narrow: bool) -> None:
    parse(draw_shards(map_shards(cut_among(2, {})), is_narrow=is_narrow))
    parse(draw_shards(map_shards(cut_among(2, {"a": (0, 2)})), is_narrow=is_narrow))


def test_hostile_names_stay_text(produce: Produce) -> None:
    layout = cut_among(2, {'<script>alert(1)</script>"\x00\x1b': (2, 2), **llama(1)})
    root = parse(as_svg_file(draw_shards(map_shards(layout))))
    assert not list(root.iter(f"{SVG}script"))
    assert any(title.startswith('<script>alert(1)</script>"\\x00') for title in titles(root))
    parse(draw_shards(map_shards(open_layout(produce(producers.strange_names).root))))


def test_colors_of_owners_differ_from_their_neighbors_and_letters_show_on_them() -> None:
    for count in (1, 2, 8, 9, 64):
        found = [owner_color(i, count) for i in range(count)]
        assert len(set(found)) == count
    for owner in OWNERS:
        red, green, blue = (((c / 255 + 0.055) / 1.055) ** 2.4 for c in rgb_channels(owner))
        assert (0.2126 * red + 0.7152 * green + 0.0722 * blue + 0.05) / 0.057 > 4.5


def test_long_names_keep_their_ends() -> None:
    assert shorten("abc", 3) == "abc"
    assert shorten("a" * 30 + "end", 12) == "aaaa…aaaaend"


@pytest.mark.parametrize(
    "values",
    [[1.0], [2.0, 2.0], [1e-9, 1e9], [-1.0, 1.0], [float("nan"), 1.0, float("inf"), 2.0], [0.0], [3.0] * 5000, [1e300]],
    ids=["one", "equal", "far apart", "below zero", "not finite", "zero", "many", "huge"],
)
def test_curves(values: list[float]) -> None:
    series = Series("loss")
    for step, value in enumerate(values, 1):
        series.add_value(step, value)
    for may_be_log in (False, True):
        root = parse(draw_curves("Loss", [series], may_be_log=may_be_log))
        assert "Loss by step" in titles(root)[0]
    bad = [title for title in titles(root) if "is not finite at" in title]
    assert len(bad) == series.bad_count


def test_two_curves_have_a_legend() -> None:
    one, other = Series("loss"), Series("eval_loss")
    for step in range(10):
        one.add_value(step, 1 / (step + 1))
    other.add_value(5, 0.3)
    root = parse(draw_curves("Loss", [one, other]))
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {"loss 0.1", "eval loss 0.3"} <= set(texts)
    assert "step 5: 0.1667, eval_loss 0.3" in texts


def listed(
    step: int, nbytes: int, *, is_complete: bool = True, is_pinned: bool = False, is_weights_only: bool = False
) -> Listed:
    return Listed(
        path=Path(f"ckpt-{step}"),
        step=step,
        format=None,
        is_complete=is_complete,
        world_size=None,
        nbytes=nbytes,
        saved_at=0.0,
        metrics={},
        is_pinned=is_pinned,
        problem=None,
        is_weights_only=is_weights_only,
    )


def test_the_time_line() -> None:
    stops = [
        listed(step, step, is_complete=step != 30, is_weights_only=step == 10, is_pinned=step == 20)
        for step in (10, 20, 30)
    ]
    root = parse(draw_timeline(Listing(Path(), tuple(stops), Path("ckpt-20"), None), 60))
    classes = [element.get("class") or "" for element in root.iter(f"{SVG}rect")]
    assert sorted(classes) == ["model", "model", "saved", "saved", "unfinished", "unfinished"]  # with the legend
    assert "ckpt-20: 20 B, 1970-01-01 00:00" in titles(root)
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {"latest", "pinned", "complete", "not complete", "weights only"} <= set(texts)


def test_a_time_line_of_very_many_shows_the_newest() -> None:
    stops = tuple(listed(step, 5) for step in range(5000))
    root = parse(draw_timeline(Listing(Path(), stops, None, None)))
    assert "300 checkpoints from step 4,700 to 4,999" in titles(root)


def test_layers() -> None:
    kinds = {f"layers.*.{i}": {layer: 10.0**i + layer for layer in range(5)} for i in range(12)}
    root = parse(draw_layers("Norms", kinds))
    assert "layers.*.3, layer 2: 1.002k" in titles(root)
    parse(Markup(draw_layers("Norms", {"a.*.b": {7: 0.0}})))


def test_names_beside_lines_do_not_lie_on_each_other() -> None:
    found = spread_apart([10, 11, 12, 290, 299, 299], 0, 300)
    assert all(later - earlier >= 15 for earlier, later in pairwise(found))
    assert max(found) <= 300
    assert found[0] == 10

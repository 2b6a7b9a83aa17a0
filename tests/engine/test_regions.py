"""Tiles: a file is cut without gap or overlap, whatever extents are claimed to lie in it."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from ckptkit.engine.scan import extents_by_file, overlapping_regions, regions_of_file
from ckptkit.errors import CkptError
from ckptkit.layout import Extent

SIZE = 100
extents = st.builds(
    lambda offset, length, crc: Extent("f", offset, length, crc, "t"),
    st.integers(0, SIZE + 5),
    st.integers(0, 40),
    st.none() | st.integers(0, 3),
)


@given(st.lists(extents, max_size=8))
def test_tiles_fill_the_file(found: list[Extent]) -> None:
    problems: list[CkptError] = []
    tiles = regions_of_file(Path(), "f", SIZE, found, problems.append)
    assert [tile.offset for tile in tiles] == [
        0,
        *(tile.offset + tile.length for tile in tiles[:-1]),
    ]
    assert tiles[-1].offset + tiles[-1].length == SIZE
    kept = [tile for tile in tiles if tile.name]
    places = {(extent.offset, extent.length) for extent in found if extent.length}
    assert len(kept) + len(problems) >= len(places)
    assert {(tile.offset, tile.length) for tile in kept} <= places


def test_what_overlaps_is_reported_once() -> None:
    problems: list[CkptError] = []
    one, other, beyond = Extent("f", 10, 20, 1, "a"), Extent("f", 25, 10, 2, "b"), Extent("f", 95, 6, 3, "c")
    tiles = regions_of_file(Path(), "f", SIZE, [other, one, one, beyond], problems.append)
    assert [(tile.offset, tile.name) for tile in tiles] == [(0, ""), (10, "a"), (30, "")]
    assert [(problem.tensor, problem.offset) for problem in problems] == [("b", 25), ("c", 95)]
    assert "ends at byte 30" in problems[0].message
    assert "end after the end of the file, at byte 100" in problems[1].message


@given(st.lists(st.integers(1, 30), max_size=8), st.integers(1, 40))
def test_blocks_hold_every_byte_of_every_tile_once(lengths: list[int], limit: int) -> None:
    size = sum(lengths)
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    tiles = [Extent("f", start, length, None, "") for start, length in zip(starts, lengths, strict=True)]
    blocks = [(start, min(start + limit, size)) for start in range(0, size, limit)]
    inside = [list(overlapping_regions(tiles, start, stop)) for start, stop in blocks]
    seen = [(tile.offset, byte) for found in inside for tile, low, high in found for byte in range(low, high)]
    assert seen == [(start, start + i) for start, length in zip(starts, lengths, strict=True) for i in range(length)]
    for (start, stop), found in zip(blocks, inside, strict=True):
        assert (found[0][1], found[-1][2]) == (start, stop)


def test_only_the_files_asked_for() -> None:
    one, other = Extent("f", 0, 1, None, "a"), Extent("g", 0, 1, None, "b")
    assert extents_by_file(["f", "h"], [one, other]) == {"f": [one], "h": []}

"""Checksums gathered in any order against zlib over the whole."""

from __future__ import annotations

import zlib
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ckptkit.io.crc32 import Checksums, crc32


@st.composite
def cut_up(draw: st.DrawFn) -> tuple[bytes, list[tuple[int, int]]]:
    """Some bytes, and pieces of them in any order that cover them exactly once."""
    content = draw(st.binary(min_size=1, max_size=60))
    inner = draw(st.sets(st.integers(1, len(content) - 1))) if len(content) > 1 else set()
    cuts = [0, *sorted(inner), len(content)]
    return content, draw(st.permutations(list(pairwise(cuts))))


@given(cut_up())
def test_pieces_in_any_order_give_the_crc_of_the_whole(given: tuple[bytes, list[tuple[int, int]]]) -> None:
    content, pieces = given
    checksums: Checksums[str] = Checksums()
    for done, (start, stop) in enumerate(pieces):
        assert checksums.find_complete_crc("k", len(content)) is None, f"{done} of {len(pieces)}"
        checksums.add("k", start, stop - start, crc32(content[start:stop]))
    assert checksums.find_complete_crc("k", len(content)) == zlib.crc32(content)


@given(cut_up(), st.data())
def test_a_piece_seen_twice_never_gives_a_wrong_crc(
    given: tuple[bytes, list[tuple[int, int]]], data: st.DataObject
) -> None:
    content, pieces = given
    again = data.draw(st.lists(st.sampled_from(pieces), max_size=4))
    checksums: Checksums[str] = Checksums()
    for start, stop in data.draw(st.permutations(pieces + again)):
        checksums.add("k", start, stop - start, crc32(content[start:stop]))
        assert checksums.find_complete_crc("k", len(content)) in (None, zlib.crc32(content))


def test_keys_are_apart() -> None:
    checksums: Checksums[int] = Checksums()
    checksums.add(1, 0, 3, crc32(b"abc"))
    assert checksums.find_complete_crc(2, 3) is None
    assert checksums.find_complete_crc(2, 0) == 0
    assert checksums.find_complete_crc(1, 4) is None

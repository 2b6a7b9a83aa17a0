"""The pieces of files are what every store takes as parts of an object."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from ckptkit.io.pieces import PART_BYTES, cut_into_pieces, is_sent_in_pieces, piece_size_for

_MIB, _TIB = 1 << 20, 1 << 40


@given(st.integers(0, 5 * _TIB))
@example(0)
@example(PART_BYTES)
@example(PART_BYTES + 1)
@example(9_000 * PART_BYTES)
@example(9_000 * PART_BYTES + 1)
@example(5 * _TIB)
def test_all_parts_but_the_last_are_equal_and_within_the_limits_of_s3(size: int) -> None:
    """R2 refuses an object of unequal parts; S3 one of more than 10,000, or of parts outside of 5 MiB to 5 GiB."""
    length, count = piece_size_for(size), -(-size // piece_size_for(size))
    assert count <= 10_000
    assert 5 * _MIB <= length <= 5 << 30
    assert is_sent_in_pieces(size) == (count > 1)
    pieces = cut_into_pieces("a", size)
    first = next(pieces)
    assert (first.start, first.length, first.count) == (0, min(size, length), max(1, count))
    for number, piece in enumerate(pieces, 2):
        assert (piece.number, piece.start) == (number, (number - 1) * length)
        assert piece.length == (length if number < count else size - piece.start)
        assert 0 < piece.length <= length

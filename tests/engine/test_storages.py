"""Chunks that lie together in one storage with one checksum: it is compared where nearly all of it was read."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest

from ckptkit.engine.copy import copy_by_plan, verify_copy
from ckptkit.engine.shares import Share
from ckptkit.errors import Corrupt
from ckptkit.io.crc32 import Checksums, crc32
from ckptkit.layout import Chunk, Layout, Spec, StoredTensor
from ckptkit.layout.box import full_box
from ckptkit.layout.dtypes import DTYPES
from ckptkit.layout.edits import select_entries
from ckptkit.layout.plan import make_plan
from tests.execute import execute
from tests.raw import contents

BYTE = DTYPES["uint8"]
EACH, COUNT, PADDING = 100_000, 4, 7


def stored(root: Path, *, damaged_at: int | None = None) -> Layout:
    """Some tensors and padding behind one another, of which only the whole has a checksum."""
    root.mkdir()
    data = bytearray(i * 37 % 251 for i in range(EACH * COUNT + PADDING))
    begin, crc = 11, zlib.crc32(data)
    if damaged_at is not None:
        data[damaged_at] ^= 1
    (root / "f").write_bytes(b"?" * begin + data + b"?")
    run = (begin, len(data))
    places = [begin + i * EACH for i in range(COUNT)]
    chunks = (Chunk(full_box((EACH,)), "f", at, EACH, BYTE, crc32=crc, run=run) for at in places)
    tensors = {f"t{i}": StoredTensor(Spec(BYTE, (EACH,)), (chunk,)) for i, chunk in enumerate(chunks)}
    return Layout(root, "raw", tensors)


def destination(root: Path, layout: Layout) -> Layout:
    root.mkdir()
    tensors = {}
    for name in layout.tensors:
        (root / name).write_bytes(b"\0" * EACH)
        tensors[name] = StoredTensor(Spec(BYTE, (EACH,)), (Chunk(full_box((EACH,)), name, 0, EACH, BYTE),))
    return Layout(root, "raw", tensors)


@pytest.mark.parametrize("damaged_at", [0, EACH, EACH * COUNT - 1, EACH * COUNT + 3])
def test_damage_is_found_in_what_was_read_and_in_the_padding(damaged_at: int, tmp_path: Path) -> None:
    src = stored(tmp_path / "src", damaged_at=damaged_at)
    with pytest.raises(Corrupt, match="damaged"):
        execute(make_plan(src, destination(tmp_path / "dst", src)))


def test_what_is_sound_is_counted_as_checked(tmp_path: Path) -> None:
    src = stored(tmp_path / "src")
    dst = destination(tmp_path / "dst", src)
    copied = execute(make_plan(src, dst), jobs=2)
    assert (copied.checked_bytes, copied.unchecked_bytes) == (EACH * COUNT, 0)
    assert all(contents(dst, name) == contents(src, name) for name in src.tensors)


def test_shares_of_several_workers_add_up(tmp_path: Path) -> None:
    src = stored(tmp_path / "src", damaged_at=EACH + 5)
    plan = make_plan(src, destination(tmp_path / "dst", src))
    ledgers = [copy_by_plan(plan, Share(number, 3)) for number in range(3)]
    for other in ledgers[1:]:
        ledgers[0].add_ledger(other)
    with pytest.raises(Corrupt, match="damaged"):
        verify_copy(plan, ledgers[0])


def test_a_storage_is_not_read_for_a_small_part_of_it(tmp_path: Path) -> None:
    src = stored(tmp_path / "src", damaged_at=EACH * 3)
    some = select_entries(src, {"t0", "t1"}.__contains__)
    copied = execute(make_plan(some, destination(tmp_path / "dst", some)))
    assert (copied.checked_bytes, copied.unchecked_bytes) == (0, 2 * EACH)


def test_the_missing_parts_of_a_range() -> None:
    sums: Checksums[str] = Checksums()
    assert list(sums.missing_ranges("k", 10)) == [(0, 10)]
    sums.add("k", 2, 3, crc32(b"abc"))
    sums.add("k", 7, 1, crc32(b"d"))
    assert list(sums.missing_ranges("k", 10)) == [(0, 2), (5, 2), (8, 2)]
    sums.add("k", 8, 2, crc32(b"ef"))
    assert list(sums.missing_ranges("k", 10)) == [(0, 2), (5, 2)]
    assert list(sums.missing_ranges("other", 0)) == []

"""Reading from remote files: the right bytes, in few requests, whoever asks for them and in whatever order."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.errors import Corrupt, IOFailure, Unsafe
from ckptkit.io import remote_file
from ckptkit.io.file import OpenFiles, opening, read_at, read_small
from ckptkit.io.path import RemotePath
from ckptkit.io.remote_file import Pages, Range, RemoteFile, group_nearby_pages, iterate_with_prefetch, prefetch
from ckptkit.io.stores import STORES, KnownStore, Read, StoreEntry, open_store

SIZE = 5_000_001


@dataclass
class Shelf:
    """A store of files in memory that notes what is read, and may give too little."""

    hint: str = "look at the shelf"
    files: dict[str, bytes] = field(default_factory=dict)
    reads: list[tuple[str, int, int]] = field(default_factory=list)
    short: int = 0
    pause: float = 0

    def find_entry(self, key: str) -> StoreEntry | None:
        if key in self.files:
            return StoreEntry(key, False, len(self.files[key]), tag=str(id(self.files[key])))
        return None if key else StoreEntry("", is_dir=True)

    def list_entries(self, key: str) -> list[StoreEntry]:
        return [entry for name in self.files if (entry := self.find_entry(name))]

    def open_reader(self, key: str, entry: StoreEntry) -> Read:
        def read(start: int, stop: int) -> bytes:
            self.reads.append((key, start, stop))
            time.sleep(self.pause)
            return self.files[key][start : stop - self.short]

        return read

    def drop_cache(self) -> None:
        pass


SHELVES: dict[str, Shelf] = {}


def find_shelf(url: str) -> Shelf:
    return SHELVES.setdefault(url, Shelf())


@pytest.fixture
def shelf(monkeypatch: pytest.MonkeyPatch) -> Iterator[Shelf]:
    monkeypatch.setitem(STORES.own, "shelf", KnownStore(f"{__name__}:find_shelf"))
    monkeypatch.setattr(remote_file, "PAGES", Pages(1 << 24))
    open_store.cache_clear()
    SHELVES.clear()
    found = find_shelf("shelf://here")
    found.files["file"] = random.Random(0).randbytes(SIZE)
    yield found
    open_store.cache_clear()


ROOT = RemotePath("shelf://here")


def read(offset: int, length: int, name: str = "file") -> bytes:
    with opening(ROOT / name) as file:
        return read_at(file, length, offset)


def test_any_range_is_read_as_it_stands(shelf: Shelf) -> None:
    content = shelf.files["file"]
    edges = [0, 1, (1 << 14) - 1, 1 << 14, (1 << 18) - 1, 1 << 18, (1 << 18) + 1, SIZE - (1 << 18) - 1, SIZE - 1, SIZE]
    for start in edges:
        for stop in edges:
            if start <= stop:
                assert read(start, stop - start) == content[start:stop], (start, stop)


def test_what_lies_around_a_small_read_comes_with_it(shelf: Shelf) -> None:
    for offset in range(0, 1 << 18, 1000):
        read(offset, 100)
    assert len(shelf.reads) <= 2


def test_a_large_read_is_one_request_for_no_more_than_that(shelf: Shelf) -> None:
    read(12345, 3_000_000)
    assert shelf.reads == [("file", 12345, 3_012_345)]


def test_nothing_is_asked_for_nothing(shelf: Shelf) -> None:
    assert read(SIZE, 0) == b""
    assert not shelf.reads


def test_several_threads_wait_for_one_request(shelf: Shelf) -> None:
    shelf.pause = 0.05
    start = threading.Barrier(8)

    def look(number: int) -> bytes:
        start.wait()
        return read(number * 1000, 10)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(look, range(8)))
    assert found == [shelf.files["file"][n * 1000 : n * 1000 + 10] for n in range(8)]
    assert len(shelf.reads) == 1


def test_ranges_said_beforehand_come_in_few_requests(shelf: Shelf) -> None:
    close = [("file", at, at + 2048) for at in range(0, 1_000_000, 50_000)]
    far = [("file", SIZE - 2048, SIZE)]
    prefetch(ROOT, [*close, *far, ("missing", 0, 10)])
    assert len(shelf.reads) == 2
    for _, start, stop in close + far:
        assert read(start, stop - start) == shelf.files["file"][start:stop]
    assert len(shelf.reads) == 2


def test_ranges_past_the_end_are_cut(shelf: Shelf) -> None:
    shelf.files["short"] = b"abc"
    prefetch(ROOT, [("short", 0, 1 << 16), ("file", SIZE + 5, SIZE + 9)])
    assert shelf.reads == [("short", 0, 3)]


def test_things_are_given_in_order_and_read_ahead(shelf: Shelf) -> None:
    things = list(range(1200))
    found = list(iterate_with_prefetch(ROOT, things, lambda n: [("file", n * 4000, n * 4000 + 100)]))
    assert found == things
    assert len(shelf.reads) < 12
    read(1199 * 4000, 100)
    assert len(shelf.reads) < 12


def test_of_local_files_nothing_is_read_ahead(tmp_path: Path) -> None:
    def refuse(_thing: int) -> list[Range]:
        raise AssertionError

    assert list(iterate_with_prefetch(tmp_path, [1, 2], refuse)) == [1, 2]


def test_the_end_of_a_file_is_known(shelf: Shelf) -> None:
    with pytest.raises(Corrupt, match=f"expected at least {SIZE + 1} bytes, found {SIZE}") as raised:
        read(SIZE - 9, 10)
    assert str(raised.value.path) == "shelf://here/file"


def test_what_is_too_short_is_an_error_and_not_kept(shelf: Shelf) -> None:
    shelf.short = 1
    for length in (10, 1 << 20):
        with pytest.raises(IOFailure, match="from the store, found") as raised:
            read(0, length)
        assert str(raised.value.path) == "shelf://here/file"
    shelf.short = 0
    assert read(0, 10) == shelf.files["file"][:10]


def test_what_is_missing_or_no_file(shelf: Shelf) -> None:
    with pytest.raises(Corrupt, match="missing"):
        RemoteFile(ROOT / "nothing")
    with pytest.raises(Unsafe):
        RemoteFile(ROOT)


def test_small_files_and_files_of_a_directory(shelf: Shelf) -> None:
    shelf.files["small"] = b"abc"
    assert read_small(ROOT / "small", 10) == b"abc"
    with pytest.raises(Corrupt):
        read_small(ROOT / "small", 2)
    with OpenFiles(ROOT, limit=1) as files:
        for name in ("small", "file", "small"):
            assert read_at(files[name], 3, 0) == shelf.files[name][:3]


def test_pages_are_dropped_beyond_the_limit() -> None:
    pages = Pages(3 << 14)
    for number in range(4):
        pages.put(("file", "", number), b"%d" % number)
        assert pages.get(("file", "", 0)) == (b"0" if number < 4 else None)
    assert [pages.get(("file", "", number)) for number in range(4)] == [b"0", None, b"2", b"3"]


@given(st.sets(st.integers(0, 2000)))
def test_runs_hold_every_page_once_and_are_bounded(numbers: set[int]) -> None:
    runs = list(group_nearby_pages(sorted(numbers)))
    assert [number for run in runs for number in run] == sorted(numbers)
    assert all((run[-1] - run[0] + 1) << 14 <= 1 << 22 for run in runs)
    assert all(later - earlier <= 32 for run in runs for earlier, later in pairwise(run))

"""Read byte ranges of remote files with few requests, through a cache of pages.

A small read also fetches the bytes around it. `iterate_with_prefetch` fetches ranges that will be needed in a few large
parallel requests. Large reads are one request each and are not cached.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TypeVar

from ckptkit.errors import Incomplete, IOFailure, Unsafe, Unsupported, truncated_error
from ckptkit.io.path import RemotePath, is_remote, map_in_parallel
from ckptkit.io.stores import Read, translate_store_errors

T = TypeVar("T")
Range = tuple[str, int, int]  # file name, start and end offset
PageKey = tuple[str, str, int]  # file, its tag, page number

_PAGE = 1 << 14  # bytes: the unit of the cache
_WINDOW = 1 << 18  # bytes that a small read fetches; longer reads are large
_CACHE = 1 << 26  # bytes of cached pages
_MAX_GAP = 1 << 19  # up to this many unneeded bytes cost less than another request: what arrives in one round trip
_MAX_REQUEST = 1 << 22  # maximum bytes of a request that serves several reads
_BATCH = 512  # items per prefetch, so that no page is evicted before it is used


class Pages:
    """An LRU cache of pages, with a limit in bytes. Thread-safe."""

    def __init__(self, limit: int) -> None:
        self._limit = limit // _PAGE
        self._kept: OrderedDict[PageKey, bytes] = OrderedDict()
        self._lock = threading.Lock()
        self._busy = [threading.Lock() for _ in range(256)]

    def get(self, key: PageKey) -> bytes | None:
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def put(self, key: PageKey, content: bytes) -> None:
        with self._lock:
            self._kept[key] = content
            while len(self._kept) > self._limit:
                self._kept.popitem(last=False)

    def lock_for_fetching(self, *key: object) -> threading.Lock:
        """Return the lock to take while fetching `key`: other threads wait, then find the pages in the cache."""
        return self._busy[hash(key) % len(self._busy)]


PAGES = Pages(_CACHE)


class RemoteFile:
    """A remote file at `path`, of `size` bytes. Belongs to one thread."""

    __slots__ = ("_entry", "_read", "path", "size")

    def __init__(self, path: RemotePath) -> None:
        entry = path.find_entry()
        if entry is None:
            raise Incomplete("the file is missing", path=path, hint="copy the file here; it was lost or never copied")
        if entry.is_dir:
            raise Unsafe("not a regular file", path=path)
        self.path = path
        self.size = entry.size
        self._entry = entry
        self._read: Read | None = None

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` from `offset`. Raises `Corrupt` if the file ends before, `IOFailure` if it cannot be read."""
        stop = offset + len(buffer)
        if stop > self.size:
            raise truncated_error(stop, self.size, path=self.path)
        if not buffer:
            return
        if len(buffer) > _WINDOW:
            buffer[:] = self.fetch_range(offset, stop)
            return
        for start in range(offset - offset % _PAGE, stop, _PAGE):
            page = self._get_page(start // _PAGE)
            first, last = max(offset, start), min(stop, start + _PAGE)
            buffer[first - offset : last - offset] = page[first - start : last - start]

    def write_at(self, buffer: memoryview, offset: int) -> None:  # noqa: ARG002
        """Raise `Unsupported`: remote files are read-only."""
        raise Unsupported("a remote file cannot be written", path=self.path)

    def announce_order(self, *, in_order: bool) -> None:
        """Do nothing: each large read is a separate request in any order."""

    def close(self) -> None:
        """Do nothing: no connection stays open."""

    def fetch_range(self, start: int, stop: int) -> bytes:
        """Return the bytes from offset `start` to `stop`, in one uncached request."""
        store = self.path.store.store
        with translate_store_errors(self.path, store):
            try:
                self._read = self._read or store.open_reader(self.path.key, self._entry)
                data = self._read(start, stop)
            except FileNotFoundError as error:
                hint = "run the command again: another process deletes this file"
                raise IOFailure("the file vanished while it was being read", path=self.path, hint=hint) from error
        if len(data) != stop - start:
            message = f"expected {stop - start} bytes at byte {start} from the store, found {len(data)}"
            raise IOFailure(message, path=self.path, hint="run the same command again")
        return data

    def fetch_pages(self, numbers: Sequence[int]) -> None:
        """Fetch pages, given by sorted numbers, in one request that includes the bytes between them."""
        start, stop = numbers[0] * _PAGE, min(self.size, (numbers[-1] + 1) * _PAGE)
        data = self.fetch_range(start, stop)
        for number in numbers:
            at = number * _PAGE - start
            PAGES.put(self._key(number), data[at : at + _PAGE])

    def uncached_pages(self, ranges: Iterable[Range]) -> list[int]:
        """Return the sorted numbers of the pages that `ranges` need and that are not cached."""
        spans = ((start, min(stop, self.size)) for _, start, stop in ranges if 0 <= start < self.size)
        numbers = {number for start, stop in spans for number in range(start // _PAGE, -(-stop // _PAGE))}
        return sorted(number for number in numbers if PAGES.get(self._key(number)) is None)

    def _get_page(self, number: int) -> bytes:
        page = PAGES.get(self._key(number))
        if page is not None:
            return page
        # fetch the aligned window around the page: neighboring pages are usually needed next
        first = number - number % (_WINDOW // _PAGE)
        with PAGES.lock_for_fetching(str(self.path), first):
            page = PAGES.get(self._key(number))  # another thread may have fetched it meanwhile
            if page is None:
                start, stop = first * _PAGE, min(self.size, first * _PAGE + _WINDOW)
                data = self.fetch_range(start, stop)
                for at in range(0, len(data), _PAGE):
                    PAGES.put(self._key(first + at // _PAGE), data[at : at + _PAGE])
                at = (number - first) * _PAGE
                page = data[at : at + _PAGE]
        return page

    def _key(self, number: int) -> PageKey:
        return str(self.path), self._entry.tag, number


def iterate_with_prefetch(root: Path, items: Iterable[T], ranges_of: Callable[[T], Iterable[Range]]) -> Iterator[T]:
    """Yield `items` in order; for a remote directory, prefetch the `ranges_of` of each batch of things first.

    Otherwise each small read would be a request of its own, one after the other.
    """
    if not is_remote(root):
        yield from items
        return
    waiting = iter(items)
    while batch := list(islice(waiting, _BATCH)):
        prefetch(root, [wanted for thing in batch for wanted in ranges_of(thing)])
        yield from batch


def prefetch(root: RemotePath, ranges: Iterable[Range]) -> None:
    """Fetch the pages of `ranges` in directory `root`: one request for close pages, all requests in parallel.

    Skips missing files.
    """
    by_file: dict[str, list[Range]] = {}
    for wanted in ranges:
        by_file.setdefault(wanted[0], []).append(wanted)
    files = [(path, file_ranges) for name, file_ranges in by_file.items() if (path := root / name).is_file()]
    runs = [
        (path, run)
        for path, file_ranges in files
        for run in group_nearby_pages(RemoteFile(path).uncached_pages(file_ranges))
    ]
    map_in_parallel(lambda run: RemoteFile(run[0]).fetch_pages(run[1]), runs)


def group_nearby_pages(numbers: Iterable[int]) -> Iterator[list[int]]:
    """Yield sorted page numbers as groups that are worth one request each."""
    run: list[int] = []
    for number in numbers:
        if run and ((number - run[-1]) * _PAGE > _MAX_GAP or (number - run[0]) * _PAGE >= _MAX_REQUEST):
            yield run
            run = []
        run.append(number)
    if run:
        yield run

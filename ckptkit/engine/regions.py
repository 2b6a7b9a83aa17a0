"""Tiles: a file cut into the runs of bytes that have a checksum and what lies between them. Opens no file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ckptkit.errors import CkptError, Corrupt, Report
from ckptkit.layout import Extent


@dataclass(frozen=True, slots=True)
class Block:
    """A run of a file that is read at once, and the tiles that it is of: each with where it begins in the tile."""

    path: str
    start: int
    stop: int
    tiles: tuple[tuple[Extent, int, int], ...]  # a tile; start and stop in the file of what is in the block


def by_file(paths: Iterable[str], extents: Iterable[Extent]) -> dict[str, list[Extent]]:
    """The extents of each of the files."""
    found: dict[str, list[Extent]] = {path: [] for path in paths}
    for extent in extents:
        if extent.path in found:
            found[extent.path].append(extent)
    return found


def cut(path: Path, size: int, extents: Iterable[Extent], report: Report) -> list[Extent]:
    """A file of `size` bytes as tiles, in order and without a gap: the extents, and nameless ones between them.

    An extent that is there twice is one; one that overlaps another, or the end, is reported and left out.
    """
    tiles: list[Extent] = []
    at = 0
    for extent in sorted(extents, key=lambda extent: (extent.offset, extent.length)):
        end = extent.offset + extent.length
        if not extent.length or (tiles and (tiles[-1].offset, tiles[-1].length) == (extent.offset, extent.length)):
            continue
        if extent.offset < at or end > size:
            what = f"overlaps what ends at {at}" if extent.offset < at else f"does not fit a file of {size}"
            message = f"what lies at bytes {extent.offset}:{end} {what}"
            report(Corrupt(message, path=path, tensor=extent.name or None, offset=extent.offset))
            continue
        if extent.offset > at:
            tiles.append(Extent(extent.path, at, extent.offset - at, None, ""))
        tiles.append(extent)
        at = end
    if at < size:
        tiles.append(Extent(path.name, at, size - at, None, ""))
    return tiles


def blocks(path: str, size: int, tiles: list[Extent], limit: int) -> Iterator[Block]:
    """The blocks of a file, of at most `limit` bytes, each with the parts of tiles that are in it."""
    first = 0
    for start in range(0, size, limit):
        stop = min(start + limit, size)
        inside: list[tuple[Extent, int, int]] = []
        while first < len(tiles) and tiles[first].offset < stop:
            tile = tiles[first]
            end = tile.offset + tile.length
            inside.append((tile, max(start, tile.offset), min(stop, end)))
            if end > stop:
                break
            first += 1
        yield Block(path, start, stop, tuple(inside))


def ignore(_problem: CkptError) -> None:
    """The `Report` of whoever looks only at what is left."""

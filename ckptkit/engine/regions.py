"""Cut files into regions: the runs of bytes that have a checksum, and the runs between them. Opens no file."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from pathlib import Path

from ckptkit.errors import CkptError, Corrupt, Report
from ckptkit.layout import Extent


def by_file(paths: Iterable[str], extents: Iterable[Extent]) -> dict[str, list[Extent]]:
    """Return the extents of each of the files."""
    found: dict[str, list[Extent]] = {path: [] for path in paths}
    for extent in extents:
        if extent.path in found:
            found[extent.path].append(extent)
    return found


def cut(root: Path, name: str, size: int, extents: Iterable[Extent], report: Report) -> list[Extent]:
    """Return the regions of a file of `size` bytes, in order and without a gap: the extents, and nameless ones between.

    The file is called `name` in directory `root`. An extent that is there twice is one; one that overlaps another, or
    the end, is reported and left out.
    """
    regions: list[Extent] = []
    at = 0
    for extent in sorted(extents, key=lambda extent: (extent.offset, extent.length)):
        end = extent.offset + extent.length
        is_same = bool(regions) and (regions[-1].offset, regions[-1].length) == (extent.offset, extent.length)
        if is_same or not extent.length:
            continue
        if extent.offset < at or end > size:
            what = f"overlaps what ends at {at}" if extent.offset < at else f"does not fit a file of {size}"
            message = f"what lies at bytes {extent.offset}:{end} {what}"
            report(Corrupt(message, path=root / name, tensor=extent.name or None, offset=extent.offset))
            continue
        if extent.offset > at:
            regions.append(Extent(extent.path, at, extent.offset - at, None, ""))
        regions.append(extent)
        at = end
    if at < size:
        regions.append(Extent(name, at, size - at, None, ""))
    return regions


def between(regions: list[Extent], start: int, stop: int) -> Iterator[tuple[Extent, int, int]]:
    """Yield the regions that have bytes in `start:stop`, and from where to where in the file those lie."""
    for i in range(bisect_right(regions, start, key=lambda region: region.offset) - 1, len(regions)):
        region = regions[i]
        if region.offset >= stop:
            return
        yield region, max(start, region.offset), min(stop, region.offset + region.length)


def ignore(_problem: CkptError) -> None:
    """Be the `Report` of a caller who needs only the rest."""

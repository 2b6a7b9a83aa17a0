"""Read and write DCP directories: `.metadata` and `.distcp` files, as torch.distributed.checkpoint writes them.

Source: torch/distributed/checkpoint/{filesystem,metadata,default_planner}.py. `.metadata` is a pickle that says which
chunk of which tensor lies in which range of which file; each range is one archive of torch.save. Geometry comes from
the metadata alone: file names say who wrote, never what.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path

from ckptkit.errors import ELSEWHERE, SALVAGE, CkptError, Corrupt, Incomplete, Report, and_more, refuse
from ckptkit.formats.archives.locate import ends_of
from ckptkit.formats.archives.zip_entries import large_entries
from ckptkit.formats.dcp.model_space import unfold
from ckptkit.formats.dcp.read_metadata import (
    Reading,
    find_metadata,
    has_strides,
    is_metadata,
    name_data,
    rank_of,
    read_metadata,
)
from ckptkit.formats.protocols import FormatWriter
from ckptkit.io.file import OpenFiles, ReadAhead, file_size, names_in
from ckptkit.io.ranges import read_ahead
from ckptkit.layout import (
    Extent,
    FileOffset,
    KeyPath,
    Layout,
    NewFile,
    NumberKey,
    Patch,
    TuplePlace,
    WriterOptions,
    check_cover,
)
from ckptkit.layout.gc_pause import collector_paused

GROUPS = "param_groups"  # the key beside the states of an optimizer


class Dcp(FormatWriter):
    """The format of DCP directories: read with one `.metadata` or one per rank, written with one."""

    name = "dcp"
    known_by = "DCP's `.metadata`"
    is_sharded = True

    def owns(self, name: str) -> bool:
        """Return True for the metadata, and for data of whatever rank."""
        return is_metadata(name) or rank_of(name) is not None

    def remarks(self, wanted: Layout) -> Iterator[str]:
        """Return in words which types of keys become others: DCP has text and places in lists only, as torch's has."""
        ways = {name: wanted.key(name) for name in wanted.names}
        optimizers = {(*way[: way.index(GROUPS)], "state") for way in ways.values() if GROUPS in way}
        numbers = [name for name, way in ways.items() if has_number_key(way, optimizers)]
        if numbers:
            yield f"integer keys become text in DCP, as torch writes them: `{numbers[0]}`{and_more(len(numbers) - 1)}"
        tuples = [name for name, way in ways.items() if any(isinstance(step, TuplePlace) for step in way)]
        if tuples:
            yield f"tuples with tensors become lists in DCP: `{tuples[0]}`{and_more(len(tuples) - 1)}"

    def rank_of(self, name: str) -> int | None:
        """Return the rank that wrote a file of data."""
        return rank_of(name)

    def detect(self, path: Path) -> bool:
        """Return True for a directory in which DCP has written, or has begun to."""
        return path.is_dir() and any(map(self.owns, names_in(path)))

    def check_names(self, path: Path, report: Report) -> None:  # noqa: ARG002 - there is only one thing to miss
        """Raise `Corrupt` unless the metadata is there, which DCP writes last."""
        find_metadata(path)

    def metadata_bytes(self, path: Path) -> int:
        """Return the bytes of the metadata, which is all that is parsed."""
        return sum(map(file_size, find_metadata(path).values()))

    def read(self, path: Path, report: Report = refuse) -> Layout:
        """Return the layout of the checkpoint in directory `path`; chunks still in their envelopes."""
        with collector_paused():
            layout = self.read_items(path, report)
            check_files(layout, report)
            check_cover(layout, report)
            return unfold(replace(layout, world_size=count_ranks(layout)), report)

    def read_like(self, path: Path, other: Path, report: Report = refuse) -> Layout | None:
        """Return the layout by the metadata of another checkpoint whose items all match; None if `path` has its own."""
        if any(map(is_metadata, names_in(path))):
            return None
        from ckptkit.formats.dcp.match_items import match_items  # only salvaging needs it

        with collector_paused():
            plan = self.read_items(other)
            match_items(path, plan)
            layout = replace(plan, root=path, descriptions=())
            check_files(layout, report)
            check_cover(layout, report)
            return unfold(replace(layout, world_size=count_ranks(layout)), report)

    def read_items(self, path: Path, report: Report = refuse) -> Layout:
        """Return the layout of a checkpoint as its metadata says it, which is not compared with the files.

        Of several files with metadata one that cannot be read is reported.
        """
        described_by = find_metadata(path)
        if len(described_by) > 1:
            from ckptkit.formats.dcp.by_rank import read_by_rank  # rare

            gathered = read_by_rank(path, described_by, report)
        else:
            gathered = Reading(path, report)
            for file in described_by.values():
                gathered.add(read_metadata(file), file)
        return replace(gathered.layout(self.name), descriptions=tuple(file.name for file in described_by.values()))

    def least_torch(self, path: Path) -> str | None:
        """Return the version of torch that began to describe tensors as this checkpoint does; None for the old way."""
        return "2.15" if any(map(has_strides, map(read_metadata, find_metadata(path).values()))) else None

    def extents(self, layout: Layout, report: Report = refuse) -> Iterator[Extent]:
        """Return the large entries of every item's archive, and whole what is none; the small ones are compared."""
        with OpenFiles(layout.root, in_order=False) as opened:
            files = ReadAhead(opened)
            items = sorted(items_of(self.with_items(layout)).items())
            for (path, offset, length), name in read_ahead(layout.root, items, lambda item: ends_of(*item[0])):
                try:
                    yield from extents_of(files, Extent(path, offset, length, None, name))
                except CkptError as error:
                    report(error.blame(path=layout.root / path, tensor=name, offset=offset))

    def with_items(self, layout: Layout) -> Layout:
        """Return the layout by the items in its files, also where it has parts of these; of files that it uses."""
        if all(chunk.wrapper for tensor in layout.tensors.values() for chunk in tensor.chunks):
            return layout
        whole = self.read_items(layout.root)
        used = layout.paths | {chunk.path for _, chunk in layout.copies}
        tensors = {
            name: replace(tensor, chunks=tuple(chunk for chunk in tensor.chunks if chunk.path in used))
            for name, tensor in whole.tensors.items()
        }
        blobs = {name: blob for name, blob in whole.blobs.items() if blob.path in used}
        return replace(whole, tensors=tensors, blobs=blobs)

    def arrange(self, wanted: Layout, options: WriterOptions) -> tuple[NewFile, ...]:
        """Return a file for each of `options.world_size` ranks, with its items and room for data; and the metadata."""
        from ckptkit.formats.dcp import write_files  # reading needs none of it

        return write_files.arrange(wanted, options)

    def entries_file(self, rank: int) -> str:
        return name_data(rank, 1)

    def embed(self, wanted: Layout, options: WriterOptions) -> Iterator[tuple[str, Patch]]:
        """Return the metadata anew, which is longer now."""
        from ckptkit.formats.dcp import write_files  # reading needs none of it

        return write_files.embed(wanted, options)

    def checksum_places(self, made: Layout) -> Iterator[tuple[FileOffset, int]]:
        """Return both places of each item's CRC-32."""
        from ckptkit.formats.dcp import write_files  # reading needs none of it

        return write_files.checksum_places(made)


def count_ranks(layout: Layout) -> int | None:
    """Return how many ranks wrote the checkpoint. A file that is neither empty nor of it is of an earlier save."""
    used = layout.paths | {chunk.path for _, chunk in layout.copies}
    names = {name: rank for name in names_in(layout.root) if (rank := rank_of(name)) is not None}
    ranks = {rank for name, rank in names.items() if name in used or not (layout.root / name).stat().st_size}
    return len(ranks) or None


def check_files(layout: Layout, report: Report) -> None:
    """Report every file that the metadata names and that is not there, or not as long as what should lie in it.

    Also the items of which only a part is shared with another.
    """
    items: dict[str, list[tuple[int, int, str]]] = {}
    for name, place in chain(layout.stored, layout.copies):
        if place.length:
            items.setdefault(place.path, []).append((place.offset, place.length, name))
    missing = sorted(items.keys() - set(names_in(layout.root)))
    if missing:
        report(
            Incomplete(
                f"{len(missing)} of {len(items)} files are missing: {', '.join(missing)}",
                path=layout.path,
                hint=f"{ELSEWHERE}, or {SALVAGE}",
                files=missing,
            )
        )
    for path in sorted(items.keys() - missing):
        try:
            check_items(layout.root / path, sorted(items[path]))
        except CkptError as error:
            report(error)


def check_items(path: Path, items: list[tuple[int, int, str]]) -> None:
    """Raise `Corrupt` if the file is shorter than its items, given as offset, length and name, or if two overlap.

    They are given in order; one may have several names.
    """
    size = file_size(path)
    start, end, before = 0, 0, ""
    for offset, length, name in items:
        if (offset, offset + length) == (start, end):
            continue
        if offset < end:
            message = f"the item at {offset}:{offset + length} overlaps that of `{before}`, which ends at {end}"
            raise Corrupt(message, path=path, tensor=name, offset=offset)
        start, end, before = offset, offset + length, name
        if end > size:
            raise Corrupt(
                f"expected at least {max(sum(item[:2]) for item in items)} bytes (metadata), found {size}",
                path=path,
                tensor=name,
                offset=size,
            )


def has_number_key(way: KeyPath, optimizers: Container[KeyPath]) -> bool:
    """Return whether a key path leads through an integer key, but for those below the states of `optimizers`.

    These become numbers again wherever they are read.
    """
    return any(isinstance(step, NumberKey) and way[:i] not in optimizers for i, step in enumerate(way))


def items_of(layout: Layout) -> dict[tuple[str, int, int], str]:
    """Return the file, offset and length of every item that has bytes, each with the first name that it belongs to."""
    items: dict[tuple[str, int, int], str] = {}
    for name, place in chain(layout.stored, layout.copies):
        if place.length:
            items.setdefault((place.path, place.offset, place.length), name)
    return items


def extents_of(files: ReadAhead, item: Extent) -> Iterator[Extent]:
    """Return the large entries of an item's archive, the small ones compared; the item itself if it is none."""
    read = files.inside(item.path, item.offset, item.length)
    if read(0, min(2, item.length)) != b"PK":
        yield item
        return
    for entry in large_entries(read, item.length):
        yield Extent(item.path, item.offset + entry.offset, entry.length, entry.crc32 or None, item.name)

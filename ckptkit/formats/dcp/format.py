"""DCP directories: `.metadata` and `.distcp` files, as torch.distributed.checkpoint writes them.

Source: torch/distributed/checkpoint/{filesystem,metadata,default_planner}.py. `.metadata` is a pickle that says which
chunk of which tensor lies in which range of which file; each range is one archive of torch.save. Geometry comes from
the metadata alone: file names say who wrote, never what.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from ckptkit.errors import CkptError, Corrupt, Report, Unsupported, refuse
from ckptkit.files.crc32 import crc32
from ckptkit.files.file import Opened, file_size, is_there, names_in, read_at
from ckptkit.files.ranges import Range, read_ahead
from ckptkit.formats.dcp.read_metadata import ENVELOPE, Reading, read_metadata
from ckptkit.formats.dcp.shards import Known, deal, end_of, seal
from ckptkit.formats.dcp.write_metadata import record
from ckptkit.formats.torchfile.read_archive import GLANCE, ReadAt, check_contents, large_entries, locate_tensor
from ckptkit.layout import Blob, Chunk, Extent, Layout, NewFile, Options, Part, Place, Spec, StoredTensor, check_cover

METADATA = ".metadata"
_LARGEST_CHECKED = 1 << 26  # bytes of a blob, which is held in memory while it is checked
_RANK_METADATA = re.compile(r"__(\d+)\.metadata")
_DATA = re.compile(r"(?:.*?)__(\d+)_\d+\.distcp")


class Dcp:
    """Reads DCP directories, with one `.metadata` or one `__{rank}.metadata` per rank; writes the former."""

    name = "dcp"
    is_sharded = True
    is_model_only = False
    suffixes = ()

    def owns(self, name: str) -> bool:
        """True for the metadata, and for data of whatever rank."""
        return name == METADATA or bool(_RANK_METADATA.fullmatch(name) or _DATA.fullmatch(name))

    def rank_of(self, name: str) -> int | None:
        """The rank that wrote a file of data."""
        match = _DATA.fullmatch(name)
        return int(match[1]) if match else None

    def detect(self, path: Path) -> bool:
        """True for a directory in which DCP has written, or has begun to."""
        if not path.is_dir():
            return False
        names = names_in(path)
        return METADATA in names or any(_RANK_METADATA.fullmatch(name) or _DATA.fullmatch(name) for name in names)

    def is_complete(self, path: Path) -> bool:
        """True if the metadata is there, which DCP writes last."""
        return bool(metadata_files(path))

    def read(self, path: Path, report: Report = refuse) -> Layout:
        """The layout of the checkpoint in directory `path`; chunks still in their envelopes."""
        with collector_paused():
            reading = Reading(path)
            described_by = metadata_files(path)
            for file in described_by:
                reading.add(read_metadata(file), file)
            if not reading.files_seen:
                raise Corrupt(
                    "no `.metadata`: the save did not finish",
                    path=path,
                    hint="every rank writes its shard first and `.metadata` comes last; use an older checkpoint",
                )
            layout = reading.layout(self.name)
            check_files(layout, report)
            check_cover(layout, report)
            names = tuple(file.name for file in described_by)
            return replace(layout, world_size=count_ranks(layout), descriptions=names)

    def locate(self, layout: Layout, report: Report = refuse) -> Layout:
        """The layout with every chunk's bytes found inside its envelope, and compared with what is expected there."""
        with Opened(layout.root) as files, collector_paused():
            tensors = locate_chunks(layout, files, report)
            blobs = {name: check_blob(layout, name, files, report) for name in layout.blobs}
        return replace(layout, tensors=tensors, blobs=blobs)

    def extents(self, layout: Layout, report: Report = refuse) -> Iterator[Extent]:
        """The large entries of every item's archive, and whole what is no archive; the small ones are compared."""
        with Opened(layout.root) as files:
            items = sorted(items_of(layout).items())
            for (path, offset, length), name in read_ahead(layout.root, items, lambda item: ends_of(*item[0])):
                try:
                    yield from extents_of(files, Extent(path, offset, length, None, name))
                except CkptError as error:
                    report(error.blame(path=layout.root / path, tensor=name, offset=offset))

    def arrange(self, wanted: Layout, options: Options) -> tuple[NewFile, ...]:
        """One file for each of `options.world_size` ranks, with its items and room for their data; and the metadata."""
        files = {f"__{rank}_0.distcp": items for rank, items in enumerate(deal(wanted, options.world_size))}
        metadata = record(wanted, files)
        data = (NewFile(name, end_of(items), Known(items)) for name, items in files.items())
        return *data, NewFile(METADATA, len(metadata), ((0, metadata),))

    def seal(self, made: Layout, checksums: Mapping[Place, int]) -> Iterator[tuple[str, Part]]:
        """The CRC-32 of each item."""
        for tensor in made.tensors.values():
            for chunk in tensor.chunks:
                checksum = checksums.get((chunk.path, chunk.offset))
                if chunk.length and checksum is not None:
                    parts = seal(Spec(chunk.dtype, chunk.size), chunk.offset, checksum)
                    yield from ((chunk.path, part) for part in parts)


def metadata_files(path: Path) -> list[Path]:
    """The files that describe the checkpoint: `.metadata`, or else every rank's own, in order of rank."""
    if (path / METADATA).exists():
        return [path / METADATA]
    ranks = {int(match[1]): path / name for name in names_in(path) if (match := _RANK_METADATA.fullmatch(name))}
    return [ranks[rank] for rank in sorted(ranks)]


def count_ranks(layout: Layout) -> int | None:
    """How many ranks wrote the checkpoint: those with a file that is of it or empty; others are of an earlier save."""
    used = {place.path for _, place in places_of(layout)}
    names = {name: match[1] for name in names_in(layout.root) if (match := _DATA.fullmatch(name))}
    ranks = {rank for name, rank in names.items() if name in used or not (layout.root / name).stat().st_size}
    return len(ranks) or None


def check_files(layout: Layout, report: Report) -> None:
    """Report every file that the metadata names and that is not there, or not as long as what should lie in it.

    Also the items of which only a part is shared with another.
    """
    items: dict[str, list[tuple[int, int, str]]] = {}
    for (path, offset, length), name in items_of(layout).items():
        items.setdefault(path, []).append((offset, length, name))
    missing = [name for name in sorted(items) if not is_there(layout.root / name)]
    if missing:
        report(
            Corrupt(
                f"{len(missing)} of {len(items)} files are missing: {', '.join(missing)}",
                path=layout.root,
                hint="shards of other nodes were never copied here, or were lost",
            )
        )
    for path in sorted(items.keys() - missing):
        try:
            check_items(layout.root / path, sorted(items[path]))
        except CkptError as error:
            report(error)


def check_items(path: Path, items: list[tuple[int, int, str]]) -> None:
    """Raise `Corrupt` if the file is shorter than its items, given as offset, length and name, or if two overlap."""
    size = file_size(path)
    end, before = 0, ""
    for offset, length, name in items:
        if offset < end:
            message = f"the item at {offset}:{offset + length} overlaps that of `{before}`, which ends at {end}"
            raise Corrupt(message, path=path, tensor=name, offset=offset)
        end, before = offset + length, name
        if end > size:
            raise Corrupt(
                f"the file has {size} bytes, but the metadata needs {max(sum(item[:2]) for item in items)}",
                path=path,
                tensor=name,
                offset=size,
                hint="the file is truncated, or belongs to another checkpoint",
            )


def items_of(layout: Layout) -> dict[tuple[str, int, int], str]:
    """The file, offset and length of every item that has bytes, and the first name that it belongs to."""
    items: dict[tuple[str, int, int], str] = {}
    for name, place in places_of(layout):
        if place.length:
            items.setdefault((place.path, place.offset, place.length), name)
    return items


def places_of(layout: Layout) -> Iterator[tuple[str, Chunk | Blob]]:
    """Every chunk and blob with the name that it belongs to."""
    for name, tensor in layout.tensors.items():
        for chunk in tensor.chunks:
            yield name, chunk
    yield from layout.blobs.items()


def locate_chunks(layout: Layout, files: Opened, report: Report) -> dict[str, StoredTensor]:
    """The tensors with each of their chunks found inside its envelope. Empty chunks have no bytes to find.

    File by file: of thousands of ranks, each file is opened once, and not once for each of its chunks.
    """
    chunks = {name: list(tensor.chunks) for name, tensor in layout.tensors.items()}
    places = [
        (chunk.path, chunk.offset, chunk.length, name, i)
        for name, found in chunks.items()
        for i, chunk in enumerate(found)
        if chunk.box.numel
    ]
    for *_, name, i in read_ahead(layout.root, sorted(places), lambda place: ends_of(*place[:3])):
        chunks[name][i] = locate_chunk(layout, name, chunks[name][i], files, report)
    return {name: replace(tensor, chunks=tuple(chunks[name])) for name, tensor in layout.tensors.items()}


def ends_of(path: str, offset: int, length: int) -> tuple[Range, Range]:
    """What is read of an item's archive to find what is in it: its first and its last bytes."""
    end = offset + length
    return (path, offset, min(end, offset + GLANCE)), (path, max(offset, end - GLANCE), end)


def reading(files: Opened, place: Chunk | Extent) -> ReadAt:
    """Reads inside an item, and nowhere else."""
    file = files[place.path]

    def read(offset: int, length: int) -> bytes:
        if offset < 0 or length < 0 or offset + length > place.length:
            raise Corrupt(f"bytes {offset}:{offset + length} lie outside the item's {place.length}")
        return read_at(file, length, place.offset + offset)

    return read


def extents_of(files: Opened, item: Extent) -> Iterator[Extent]:
    """The large entries of an item's archive, the small ones compared; the item itself if it is none."""
    read = reading(files, item)
    if read(0, min(2, item.length)) != b"PK":
        yield item
        return
    for entry in large_entries(read, item.length):
        yield Extent(item.path, item.offset + entry.offset, entry.length, entry.crc32 or None, item.name)


def locate_chunk(layout: Layout, name: str, chunk: Chunk, files: Opened, report: Report) -> Chunk:
    """The chunk with its bytes' own offset, length, order and CRC; or as it was, once that has been reported."""
    path = layout.root / chunk.path
    try:
        read = reading(files, chunk)
        if chunk.wrapper != ENVELOPE:
            hint = "save it again without `_extensions`" if chunk.wrapper else None
            raise Unsupported(f"stored through the transform `{chunk.wrapper}`", hint=hint)
        found = locate_tensor(read, chunk.length)
        if (found.tensor.dtype, found.tensor.shape) != (chunk.dtype, chunk.box.size):
            stored = Spec(found.tensor.dtype, found.tensor.shape)
            promised = Spec(chunk.dtype, chunk.box.size)
            raise Corrupt(f"the metadata promises {promised} at byte {chunk.offset}, the file holds {stored}")
    except CkptError as error:
        report(error.blame(path=path, tensor=name, offset=chunk.offset))
        return chunk
    return replace(
        chunk,
        offset=chunk.offset + found.offset,
        length=found.length,
        strides=found.strides,
        crc32=found.crc32,
        wrapper=None,
    )


def check_blob(layout: Layout, name: str, files: Opened, report: Report) -> Blob:
    """A blob with the CRC-32 of its bytes, if it is an archive and what is in it has those recorded there.

    Reported if not. What is no archive, or is too large to be held, remains unchecked.
    """
    blob = layout.blobs[name]
    path = layout.root / blob.path
    if blob.content is not None or blob.wrapper or blob.length > _LARGEST_CHECKED:
        return blob
    try:
        data = read_at(files[blob.path], blob.length, blob.offset)
        if not data.startswith(b"PK"):
            return blob
        check_contents(data)
    except CkptError as error:
        report(error.blame(path=path, tensor=name, offset=blob.offset))
        return blob
    return replace(blob, crc32=crc32(data))


@contextmanager
def collector_paused() -> Iterator[None]:
    """No garbage collection inside the block: of millions of objects made none is garbage, and it would walk them."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()

"""Find the bytes of chunks inside their wrappers. A wrapper is an archive of torch.save.

ckptkit reads both ends of each archive. Most archives differ from an earlier one only in the tensor and its checksums,
so a template of the earlier archive locates them quickly.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from struct import Struct

from ckptkit.errors import CkptError, Corrupt, Report, Unsupported, raise_problem
from ckptkit.formats.archives.zip_entries import (
    GLANCE,
    Located,
    ReadAt,
    ZipEntry,
    locate_single_tensor,
    verify_archive_in_memory,
)
from ckptkit.io.crc32 import crc32
from ckptkit.io.file import OpenFiles, ReadAhead, read_at
from ckptkit.io.remote_file import Range, iterate_with_prefetch
from ckptkit.layout import Blob, Chunk, Layout, Spec
from ckptkit.layout.gc_pause import collector_paused

ENVELOPE = "torch.save"  # the wrapper of a chunk that can be located here; any other is the name of a transform
ZSTD = "stream.zstd/1"  # the only known transform, with torch's name and version of it
_LARGEST_CHECKED = 1 << 26  # bytes of a blob that is checked, which takes as much memory
_crc32 = Struct("<I")
_MOST_TEMPLATES = 4096  # templates in memory
_SERIAL = ".data/serialization_id"  # a number that torch computes from all checksums


def locate_in_archives(
    layout: Layout, report: Report = raise_problem, *, skipped_wrappers: Collection[str] = ()
) -> Layout:
    """Return the layout with the bytes of every chunk located in its archive, and the checksum of every blob verified.

    Reports each chunk that cannot be located and each damaged blob, and leaves them unchanged. Chunks whose wrapper is
    in `skipped_wrappers` are skipped without a report. Chunks without a wrapper need no search.
    """
    with OpenFiles(layout.root, in_order=False) as files, collector_paused():
        located = {
            name: [chunk._replace(length=0, where=None) if 0 in chunk.box.size else chunk for chunk in tensor.chunks]
            for name, tensor in layout.tensors.items()
            if any(chunk.where is not None for chunk in tensor.chunks)
        }
        places: dict[str, list[tuple[int, int, str, int]]] = {}
        skipped = {None, *skipped_wrappers}
        for name, chunks in located.items():
            for i, chunk in enumerate(chunks):
                if chunk.wrapper not in skipped:
                    places.setdefault(chunk.path, []).append((chunk.offset, chunk.length, name, i))
        # file by file, so that each is opened once
        in_order = ((path, *place) for path in sorted(places) for place in sorted(places.pop(path)))
        ahead, templates = ReadAhead(files), ArchiveTemplates()
        for path, *_, name, i in iterate_with_prefetch(
            layout.root, in_order, lambda place: head_and_tail_ranges(*place[:3])
        ):
            chunk = located[name][i]
            try:
                if chunk.wrapper != ENVELOPE:
                    hint = "save the checkpoint again without `_extensions`" if chunk.wrapper else None
                    raise Unsupported(f"stored through the transform `{chunk.wrapper}`", hint=hint)
                located[name][i] = locate_in_own_archive(chunk, ahead, templates)
            except CkptError as error:
                report(error.blame(path=layout.root / path, tensor=name, offset=chunk.offset))
        tensors = {name: replace(layout.tensors[name], chunks=tuple(chunks)) for name, chunks in located.items()}
        blobs = {name: try_verify_blob(layout, name, files, report) for name in layout.blobs}
    return replace(layout, tensors={**layout.tensors, **tensors}, blobs=blobs)


def head_and_tail_ranges(path: str, offset: int, length: int) -> tuple[Range, Range]:
    """Return the byte ranges that are read to locate an archive's contents: its first and its last bytes."""
    end = offset + length
    return (path, offset, min(end, offset + GLANCE)), (path, max(offset, end - GLANCE), end)


def locate_in_own_archive(chunk: Chunk, files: ReadAhead, templates: ArchiveTemplates) -> Chunk:
    """Return the chunk with the offset, length, order and CRC-32 of its bytes inside its archive.

    The bytes may be floats of fewer bits than the metadata says; torch casts them on load
    (torch/distributed/checkpoint/filesystem.py, `target_tensor.copy_`). Planners that round on save write them.
    """
    tensor, start, nbytes, strides, crc, _ = templates.locate_tensor(files, chunk.path, chunk.offset, chunk.length)
    is_narrower = tensor.dtype.itemsize < chunk.dtype.itemsize and tensor.dtype.is_castable_to(chunk.dtype)
    fits = tensor.dtype == chunk.dtype or is_narrower
    if tensor.shape != chunk.box.size or not fits:
        stored, promised = Spec(tensor.dtype, tensor.shape), Spec(chunk.dtype, chunk.box.size)
        raise Corrupt(f"expected {promised} at byte {chunk.offset} (metadata), found {stored}")
    return Chunk(chunk.box, chunk.path, chunk.offset + start, nbytes, tensor.dtype, strides, crc)


def try_verify_blob(layout: Layout, blob_name: str, files: OpenFiles, report: Report) -> Blob:
    """Return a blob with the CRC-32 of its bytes, if it is an archive whose contents match the checksums in it.

    Reports an archive that does not match. Does not read a blob again that has a CRC-32. A blob that is not an archive,
    or is too large for memory, remains unchecked.
    """
    blob = layout.blobs[blob_name]
    path = layout.root / blob.path
    if blob.content is not None or blob.wrapper or blob.crc32 is not None or blob.length > _LARGEST_CHECKED:
        return blob
    try:
        data = read_at(files[blob.path], blob.length, blob.offset)
        if not data.startswith(b"PK"):
            return blob
        verify_archive_in_memory(data)
    except CkptError as error:
        report(error.blame(path=path, tensor=blob_name, offset=blob.offset))
        return blob
    return blob._replace(crc32=crc32(data))


class ArchiveTemplates:
    """The last archive of each length that was read, as a template for the next archive of that length."""

    def __init__(self) -> None:
        self._kept: dict[int, ArchiveTemplate] = {}

    def locate_tensor(self, files: ReadAhead, path: str, offset: int, length: int) -> Located:
        """Locate the one tensor of an archive. Raises `Corrupt`, or `Unsupported` with the name of its contents."""
        known = self._kept.get(length)
        fitting = known.find_fitting_location(files, path, offset, length) if known is not None else None
        if fitting is not None:
            return fitting
        read = files.reader_within(path, offset, length)
        located, entries = locate_single_tensor(read, length)
        template = make_template(read, length, located, entries)
        if template is not None:
            # rare, so a full cache is simply emptied
            if len(self._kept) == _MOST_TEMPLATES:
                self._kept.clear()
            self._kept[length] = template
        return located


@dataclass(frozen=True, slots=True)
class ArchiveTemplate:
    """The bytes before and after the tensor of an archive, and the location of its tensor, `found`.

    Another archive fits if it has the same `head`, and after its tensor the bytes in `same`, each given with an offset
    in the last `tail` bytes. Each pair of offsets in `pairs` has one checksum twice; the first pair is that of the
    tensor.
    """

    head: bytes
    tail: int
    same: tuple[tuple[int, bytes], ...]
    pairs: tuple[tuple[int, int], ...]
    found: Located

    def find_fitting_location(self, files: ReadAhead, path: str, offset: int, length: int) -> Located | None:
        """Return the location of the tensor in an archive of this length; None if the archive does not fit."""
        head, at = files.buffer_containing(path, offset, len(self.head))
        if not head.startswith(self.head, at):
            return None
        tail, at = files.buffer_containing(path, offset + length - self.tail, self.tail)
        for start, wanted in self.same:
            if not tail.startswith(wanted, at + start):
                return None
        for first, second in self.pairs:
            if _crc32.unpack_from(tail, at + first) != _crc32.unpack_from(tail, at + second):
                return None
        (crc32,) = _crc32.unpack_from(tail, at + self.pairs[0][0])
        tensor, start, nbytes, strides, *_ = self.found
        return Located(tensor, start, nbytes, strides, crc32 or None)


def make_template(read: ReadAt, length: int, found: Located, entries: Mapping[str, ZipEntry]) -> ArchiveTemplate | None:
    """Return the template of an archive; None if its tensor is only a part of its storage, or it has unusual entries.

    The serialization id, which torch computes from all checksums, may differ: the checksums determine it.
    """
    storage, serial = entries[f"data/{found.tensor.key}"], entries.get(_SERIAL)
    begin = storage.offset + storage.length
    if found.length != storage.length or max(storage.offset, length - begin) > GLANCE:
        return None
    checksummed = [storage] if serial is None else [storage, serial]
    pairs = tuple((first - begin, second - begin) for first, second in (entry.crc_offsets for entry in checksummed))
    variable_spans = [(start, start + _crc32.size) for pair in pairs for start in pair]
    if serial is not None:
        variable_spans.append((serial.offset - begin, serial.offset - begin + serial.length))
    tail = read(begin, length - begin)
    checksums = [_crc32.pack(entry.crc32) for entry in checksummed for _ in entry.crc_offsets]
    if min(variable_spans)[0] < 0 or [tail[slice(*span)] for span in variable_spans[: len(checksums)]] != checksums:
        return None
    edges = [0, *chain.from_iterable(sorted(variable_spans)), len(tail)]
    same = tuple((start, tail[start:stop]) for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop)
    return ArchiveTemplate(read(0, storage.offset), len(tail), same, pairs, found)

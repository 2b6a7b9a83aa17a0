"""Decompress the entries that torch.distributed.checkpoint stored through its `ZStandard` transform.

Source: torch/distributed/checkpoint/_extension.py. Each entry is one zstd frame around an archive of torch.save. The
size that the metadata promises limits what a frame may expand to.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Self, TypeVar, cast

from ckptkit.errors import CkptError, Corrupt, Report, Unsupported, raise_problem, translate_os_errors
from ckptkit.formats.archives.locate import ZSTD, ArchiveTemplates, locate_in_own_archive
from ckptkit.formats.archives.zip_entries import verify_archive_checksums
from ckptkit.io.allocation import TemporaryFile, require_free_space
from ckptkit.io.file import OpenFiles, ReadAhead, read_at
from ckptkit.layout import Blob, Chunk, FileOffset, Layout

if TYPE_CHECKING:
    from zstandard import ZstdDecompressor

Item = TypeVar("Item", Chunk, Blob)
_PIECE = 1 << 20  # bytes per write
_READ = 1 << 22  # bytes per read, which is one request to a store
_OVERHEAD = 1 << 16  # bytes that an archive may add to its tensor's; torch adds about 1,400
_LARGEST_ENTRY = 1 << 26  # bytes; the metadata has no size for non-tensor entries
_WINDOW = 1 << 27  # bytes of memory that a frame may request; torch's frames request 2 MiB


def decompress_zstd_streams(layout: Layout, report: Report = raise_problem) -> Layout:
    """Return the layout with all its zstd streams decompressed into a temporary file, which the layout keeps alive.

    Verifies the contents with the checksums in their archives. Reports a stream that is damaged or expands to more than
    the metadata promises, and leaves it unchanged. Raises `Unsupported` without the package `zstandard`, `NoRoom` if
    the temporary disk is too small.
    """
    unpacked = UnpackedFile(layout)

    def move(name: str, item: Item) -> Item:
        try:
            return unpacked.unpack_entry(item) if item.wrapper == ZSTD else item
        except CkptError as error:
            report(error.blame(path=layout.root / item.path, tensor=name, offset=item.offset))
            return item

    with unpacked, translate_os_errors(unpacked.kept.path):
        packed = [item for _, item in layout.chunks_and_blobs if item.wrapper == ZSTD and isinstance(item, Chunk)]
        require_free_space(unpacked.kept.path, sum(chunk.box.numel * chunk.dtype.itemsize for chunk in packed))
        tensors = {
            name: replace(tensor, chunks=tuple(move(name, chunk) for chunk in tensor.chunks))
            for name, tensor in layout.tensors.items()
        }
        blobs = {name: move(name, blob) for name, blob in layout.blobs.items()}
    return replace(layout, tensors=tensors, blobs=blobs, keeper=(layout.keeper, unpacked.kept))


class UnpackedFile:
    """A temporary file with the contents of a layout's streams, each once. Removed if the `with` block raises."""

    def __init__(self, layout: Layout) -> None:
        self._decompressor = make_decompressor(layout.root)
        self.kept = TemporaryFile()
        self._file = self.kept.path.open("r+b")
        self._files = OpenFiles(layout.root)
        self._ahead, self._templates = ReadAhead(self._files), ArchiveTemplates()
        self._locations: dict[FileOffset, tuple[int, int]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._file.close()
        self._files.close()
        if kind is not None:
            self.kept.remove()

    def unpack_entry(self, stored: Item) -> Item:
        """Return the entry at its location in the temporary file, verified, and located inside its archive."""
        location = stored.path, stored.offset
        if location not in self._locations:
            start = self._file.tell()
            self._file.writelines(decompress(stored, self._files, self._decompressor))
            self._file.flush()
            length = self._file.tell() - start
            read = self._ahead.reader_within(str(self.kept.path), start, length)
            if isinstance(stored, Chunk) or read(0, min(2, length)) == b"PK":
                verify_archive_checksums(read, length)
            self._locations[location] = start, length
        start, length = self._locations[location]
        unpacked = stored._replace(path=str(self.kept.path), offset=start, length=length, where=None)
        if not isinstance(unpacked, Chunk):
            return unpacked
        if not unpacked.box.numel:
            return unpacked._replace(length=0)
        return locate_in_own_archive(unpacked, self._ahead, self._templates)


def make_decompressor(root: Path) -> ZstdDecompressor:
    """Return a decompressor. Raises `Unsupported` if the package `zstandard` is missing."""
    try:
        from zstandard import ZstdDecompressor
    except ImportError as error:
        hint = "run `pip install 'ckptkit-fsdp[zstd]'`"
        raise Unsupported(f"stored through the transform `{ZSTD}`", path=root, hint=hint) from error
    return ZstdDecompressor(max_window_size=_WINDOW)


def decompress(item: Chunk | Blob, files: OpenFiles, decompressor: ZstdDecompressor) -> Iterator[bytes]:
    """Yield the decompressed bytes of an entry's stream. Raises `Corrupt` as soon as there are too many."""
    from zstandard import ZstdError

    limit = item.box.numel * item.dtype.itemsize + _OVERHEAD if isinstance(item, Chunk) else _LARGEST_ENTRY
    remaining = limit
    stream = decompressor.stream_reader(cast(IO[bytes], PackedStream(item, files)), read_size=_READ)
    try:
        while piece := stream.read(_PIECE):
            remaining -= len(piece)
            if remaining < 0:
                raise Corrupt(f"expected at most {limit} bytes in the zstd stream, found more")
            yield piece
    except ZstdError as error:
        raise Corrupt(f"the zstd stream is damaged: {error}") from error


class PackedStream:
    """The bytes of an entry as a file object, for a library that reads from start to end."""

    def __init__(self, item: Chunk | Blob, files: OpenFiles) -> None:
        self.file = files[item.path]
        self.at = item.offset
        self.end = item.offset + item.length

    def read(self, size: int) -> bytes:
        data = read_at(self.file, min(size, self.end - self.at), self.at)
        self.at += len(data)
        return data

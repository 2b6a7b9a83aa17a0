"""Decompress the items that torch.distributed.checkpoint stored through its `ZStandard` transform.

Source: torch/distributed/checkpoint/_extension.py. Each item is one zstd frame around the bytes that would else lie
there, an archive of torch.save. What the metadata promises bounds what a frame may give.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Self, TypeVar, cast

from ckptkit.errors import CkptError, Corrupt, Report, Unsupported, refuse, translate_os_errors
from ckptkit.formats.archives.locate import ZSTD, ArchiveTemplates, open_envelope
from ckptkit.formats.archives.zip_entries import check_archive
from ckptkit.io.allocation import TemporaryFile, check_room
from ckptkit.io.file import OpenFiles, ReadAhead, read_at
from ckptkit.layout import Blob, Chunk, FileOffset, Layout

if TYPE_CHECKING:
    from zstandard import ZstdDecompressor

Item = TypeVar("Item", Chunk, Blob)
_PIECE = 1 << 20  # bytes written at once
_READ = 1 << 22  # bytes read at once: of a store, by one request
_OVERHEAD = 1 << 16  # bytes that an archive may have beside its tensor's; torch's has about 1,400
_LARGEST_ENTRY = 1 << 26  # bytes; no metadata says how large an entry is that is no tensor
_WINDOW = 1 << 27  # bytes of memory that a frame may ask for; torch's ask for 2 MiB


def unpack(layout: Layout, report: Report = refuse) -> Layout:
    """Return the layout with all its zstd streams decompressed into a temporary file, which goes with the layout.

    What is in each is compared with the checksums recorded there. Reports a stream that is damaged or gives more than
    the metadata promises, and leaves it as it is. Raises `Unsupported` without the package `zstandard`, `NoRoom` if the
    disk is too small for what the metadata promises.
    """
    room = Room(layout)

    def move(name: str, item: Item) -> Item:
        try:
            return room.unpack(item) if item.wrapper == ZSTD else item
        except CkptError as error:
            report(error.blame(path=layout.root / item.path, tensor=name, offset=item.offset))
            return item

    with room, translate_os_errors(room.kept.path):
        check_room(room.kept.path, sum(promised(item) for _, item in layout.stored if item.wrapper == ZSTD))
        tensors = {
            name: replace(tensor, chunks=tuple(move(name, chunk) for chunk in tensor.chunks))
            for name, tensor in layout.tensors.items()
        }
        blobs = {name: move(name, blob) for name, blob in layout.blobs.items()}
    return replace(layout, tensors=tensors, blobs=blobs, keeper=(layout.keeper, room.kept))


def promised(item: Chunk | Blob) -> int:
    """Return how many bytes the metadata says a tensor's item holds; of any other it says nothing."""
    return item.box.numel * item.dtype.itemsize if isinstance(item, Chunk) else 0


class Room:
    """A temporary file for what is in the streams of a layout, each of them once; removed if the block has an error."""

    def __init__(self, layout: Layout) -> None:
        self._decompressor = make_decompressor(layout.root)
        self.kept = TemporaryFile()
        self._file = self.kept.path.open("r+b")
        self._files = OpenFiles(layout.root)
        self._ahead, self._templates = ReadAhead(self._files), ArchiveTemplates()
        self._found: dict[FileOffset, tuple[int, int]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._file.close()
        self._files.close()
        if kind is not None:
            self.kept.remove()

    def unpack(self, item: Item) -> Item:
        """Return the item as it lies here, out of its stream and of the envelope in that."""
        place = item.path, item.offset
        if place not in self._found:
            self._found[place] = self._append(item)
        start, length = self._found[place]
        unpacked = item._replace(path=str(self.kept.path), offset=start, length=length, where=None)
        if not isinstance(unpacked, Chunk):
            return unpacked
        if not unpacked.box.numel:
            return unpacked._replace(length=0)
        return open_envelope(unpacked, self._ahead, self._templates)

    def _append(self, item: Chunk | Blob) -> tuple[int, int]:
        """Append what is in an item's stream, and compare its sums; return where it begins, and how long it is."""
        start = self._file.tell()
        self._file.writelines(decompress(item, self._files, self._decompressor))
        self._file.flush()
        length = self._file.tell() - start
        read = self._ahead.inside(str(self.kept.path), start, length)
        if isinstance(item, Chunk) or read(0, min(2, length)) == b"PK":
            check_archive(read, length)
        return start, length


def make_decompressor(root: Path) -> ZstdDecompressor:
    """Return what decompresses a stream. Raises `Unsupported` if the package is not there."""
    try:
        from zstandard import ZstdDecompressor
    except ImportError as error:
        hint = "run `pip install 'ckptkit-fsdp[zstd]'`"
        raise Unsupported(f"stored through the transform `{ZSTD}`", path=root, hint=hint) from error
    return ZstdDecompressor(max_window_size=_WINDOW)


def decompress(item: Chunk | Blob, files: OpenFiles, decompressor: ZstdDecompressor) -> Iterator[bytes]:
    """Return the bytes in an item's stream, piece by piece. Raises `Corrupt` as soon as they are too many."""
    from zstandard import ZstdError

    left = limit = promised(item) + _OVERHEAD if isinstance(item, Chunk) else _LARGEST_ENTRY
    stream = decompressor.stream_reader(cast(IO[bytes], PackedStream(item, files)), read_size=_READ)
    try:
        while piece := stream.read(_PIECE):
            left -= len(piece)
            if left < 0:
                raise Corrupt(f"expected at most {limit} bytes in the zstd stream, found more")
            yield piece
    except ZstdError as error:
        raise Corrupt(f"the zstd stream is damaged: {error}") from error


def decompress_blob(root: Path, blob: Blob) -> bytes:
    """Return the decompressed bytes of an entry that is not a tensor. Raises `Corrupt` for more than 64 MiB."""
    with OpenFiles(root) as files:
        return b"".join(decompress(blob, files, make_decompressor(root)))


class PackedStream:
    """The bytes of an item as a stream, for a library that reads one from start to end."""

    def __init__(self, item: Chunk | Blob, files: OpenFiles) -> None:
        self.file = files[item.path]
        self.at = item.offset
        self.end = item.offset + item.length

    def read(self, size: int) -> bytes:
        """Return the next `size` bytes, or as many as there are."""
        data = read_at(self.file, min(size, self.end - self.at), self.at)
        self.at += len(data)
        return data

"""Decompress the items that torch.distributed.checkpoint stored through its `ZStandard` transform.

Source: torch/distributed/checkpoint/_extension.py. Each item is one zstd frame around the bytes that would else lie
there, an archive of torch.save. What the metadata promises bounds what a frame may give.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, TypeVar, cast

from ckptkit.errors import CkptError, Corrupt, Unsupported, translate_os_errors
from ckptkit.files.allocation import check_room
from ckptkit.files.file import Opened, read_at
from ckptkit.files.path import RemotePath
from ckptkit.formats.torchfile.locate import ENVELOPE
from ckptkit.layout import Blob, Chunk, Layout

Item = TypeVar("Item", Chunk, Blob)
ZSTD = "stream.zstd/1"  # as torch names it, with the version
_PIECE = 1 << 20  # bytes read and written at once
_OVERHEAD = 1 << 16  # bytes that an archive may have beside its tensor's; torch's has about 1,400
_LARGEST_ENTRY = 1 << 26  # bytes; no metadata says how large an entry is that is no tensor
_WINDOW = 1 << 27  # bytes of memory that a frame may ask for; torch's ask for 2 MiB


@contextmanager
def unpacked(layout: Layout) -> Iterator[Layout]:
    """Give the layout with all its zstd streams decompressed, into a temporary file that goes with the block's end.

    Raises `Unsupported` if the package `zstandard` is not there, `NoRoom` if the disk is too small for what the
    metadata promises, `Corrupt` for a stream that is damaged or gives more than that.
    """
    if not any(item.wrapper == ZSTD for _, item in items_of(layout)):
        yield layout
        return
    if isinstance(layout.root, RemotePath):
        hint = "copy the checkpoint here first"
        raise Unsupported(f"stored through the transform `{ZSTD}`, on a remote store", path=layout.root, hint=hint)
    with tempfile.NamedTemporaryFile(prefix="ckptkit-") as room:
        path = Path(room.name)
        with Opened(layout.root) as files, translate_os_errors(path):
            places = {(item.path, item.offset): (name, item) for name, item in items_of(layout) if item.wrapper == ZSTD}
            check_room(path, sum(promised(item) for _, item in places.values()))
            found = {place: unpack(layout, *places[place], files, room.file) for place in sorted(places)}
            room.flush()

        def moved(item: Item) -> Item:
            if item.wrapper != ZSTD:
                return item
            offset, length = found[item.path, item.offset]
            wrapper = ENVELOPE if isinstance(item, Chunk) else None
            return item._replace(path=str(path), offset=offset, length=length, wrapper=wrapper)

        tensors = {name: replace(t, chunks=tuple(map(moved, t.chunks))) for name, t in layout.tensors.items()}
        yield replace(layout, tensors=tensors, blobs={name: moved(blob) for name, blob in layout.blobs.items()})


def items_of(layout: Layout) -> Iterator[tuple[str, Chunk | Blob]]:
    """Return every chunk and blob with the name that it belongs to."""
    yield from ((name, chunk) for name, tensor in layout.tensors.items() for chunk in tensor.chunks)
    yield from layout.blobs.items()


def promised(item: Chunk | Blob) -> int:
    """Return how many bytes the metadata says a tensor's item holds; of any other it says nothing."""
    return item.box.numel * item.dtype.itemsize if isinstance(item, Chunk) else 0


def unpack(layout: Layout, name: str, item: Chunk | Blob, files: Opened, out: IO[bytes]) -> tuple[int, int]:
    """Append the bytes in an item's stream to `out`; return where they begin there, and how many they are."""
    start, path = out.tell(), layout.root / item.path
    try:
        out.writelines(decompress(item, files))
    except CkptError as error:
        raise error.blame(path=path, tensor=name, offset=item.offset) from None
    return start, out.tell() - start


def decompress(item: Chunk | Blob, files: Opened) -> Iterator[bytes]:
    """Return the bytes in an item's stream, piece by piece. Raises `Corrupt` as soon as they are too many."""
    try:
        import zstandard
    except ImportError as error:
        hint = "install the package `zstandard`"
        raise Unsupported(f"stored through the transform `{ZSTD}`", hint=hint) from error

    left = limit = promised(item) + _OVERHEAD if isinstance(item, Chunk) else _LARGEST_ENTRY
    packed = cast(IO[bytes], Packed(item, files))
    stream = zstandard.ZstdDecompressor(max_window_size=_WINDOW).stream_reader(packed)
    try:
        while piece := stream.read(_PIECE):
            left -= len(piece)
            if left < 0:
                raise Corrupt(f"the zstd stream gives more than {limit} bytes, which it should not need")
            yield piece
    except zstandard.ZstdError as error:
        raise Corrupt(f"the zstd stream is damaged: {error}") from error


class Packed:
    """The bytes of an item as a stream, for a library that reads one from start to end."""

    def __init__(self, item: Chunk | Blob, files: Opened) -> None:
        self.file = files[item.path]
        self.at = item.offset
        self.end = item.offset + item.length

    def read(self, size: int) -> bytes:
        """Return the next `size` bytes, or as many as there are."""
        data = read_at(self.file, min(size, self.end - self.at), self.at)
        self.at += len(data)
        return data

"""Compress and decompress the data of a tensor in a delta: one zstd frame for each."""

from __future__ import annotations

import io
from types import ModuleType
from typing import TYPE_CHECKING, cast

from ckptkit.errors import Corrupt, Unsupported
from ckptkit.files.file import File

if TYPE_CHECKING:
    import zstandard

_READ = 1 << 20  # bytes of a file at once
_WINDOW = 1 << 27  # bytes of memory that a frame may ask for


def library() -> ModuleType:
    """Return the package that compresses. Raises `Unsupported` without it."""
    try:
        import zstandard
    except ImportError as error:
        hint = "run `pip install zstandard`"
        raise Unsupported("deltas of this format need the package `zstandard`", hint=hint) from error
    return zstandard


class FileRange(io.RawIOBase):
    """A run of bytes of an open file, as a stream."""

    def __init__(self, file: File, offset: int, length: int) -> None:
        self._file, self._at, self._end = file, offset, offset + length

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        count = min(len(buffer), self._end - self._at, _READ)
        self._file.read_into(memoryview(buffer)[:count], self._at)
        self._at += count
        return count


class Decompressed:
    """The content of a frame, read in order."""

    def __init__(self, file: File, offset: int, length: int) -> None:
        zstd = library()
        self._error = zstd.ZstdError
        source = FileRange(file, offset, length)
        self._stream = zstd.ZstdDecompressor(max_window_size=_WINDOW).stream_reader(source)

    def read(self, length: int) -> bytes:
        """Return exactly so many bytes. Raises `Corrupt` if there are fewer."""
        parts: list[bytes] = []
        left = length
        try:
            while left and (part := self._stream.read(left)):
                parts.append(part)
                left -= len(part)
        except self._error as error:
            raise Corrupt(f"expected a zstd frame, found another ({error})") from error
        if left:
            raise Corrupt(f"expected {length} more bytes in the zstd frame, found {length - left}")
        return b"".join(parts)

    def drain(self) -> None:
        """Read all of it. Raises `Corrupt` for what is no frame."""
        try:
            while self._stream.read(_READ):
                pass
        except self._error as error:
            raise Corrupt(f"expected a zstd frame, found another ({error})") from error

    def require_end(self) -> None:
        """Raise `Corrupt` if there is more to read."""
        try:
            more = self._stream.read(1)
        except self._error as error:
            raise Corrupt(f"expected the end of the zstd frame, found another ({error})") from error
        if more:
            raise Corrupt("the zstd frame has more bytes than the tensor")


def compressing(level: int, nbytes: int) -> zstandard.ZstdCompressionObj:
    """Return what compresses so many bytes, which come one after another, into one frame that says their number."""
    return cast("zstandard.ZstdCompressionObj", library().ZstdCompressor(level=level).compressobj(size=nbytes))

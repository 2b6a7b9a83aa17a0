"""Find the bytes of the tensor in an archive of torch.save, without reading them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ckptkit.errors import Corrupt, Unsupported
from ckptkit.formats.archives.zip_entries import ReadAt, ZipEntry, glance, read_directory, read_entry
from ckptkit.formats.pickles.tensor_calls import TensorRecord, parse_tensor
from ckptkit.layout import Chunk
from ckptkit.layout.box import Box, Shape


class Located(NamedTuple):
    """The place of a tensor's bytes: `length` of them at `offset` of the archive, in the order `strides` gives.

    One that has only a part of its storage is checked with that, if it has a CRC-32.
    """

    tensor: TensorRecord
    offset: int
    length: int
    strides: Shape | None
    crc32: int | None
    storage: ZipEntry | None = None

    def chunk(self, box: Box, path: str) -> Chunk:
        """Return it as a box of a tensor, in file `path`; if it is a part of its storage, with the checksum of that."""
        own = Chunk(box, path, self.offset, self.length, self.tensor.dtype, self.strides, self.crc32)
        storage = self.storage
        return own if storage is None else own._replace(crc32=storage.crc32, run=(storage.offset, storage.length))


def open_archive(read: ReadAt, length: int) -> tuple[Located, dict[str, ZipEntry]]:
    """Return where the one tensor of an archive of `length` bytes lies, and every entry.

    Raises `Corrupt`, or `Unsupported` naming what it holds.
    """
    read = glance(read, length)
    entries = read_directory(read, length)
    check_byte_order(read, entries)
    return place_tensor(parse_tensor(read_entry(read, entries, "data.pkl")), entries), entries


def place_tensor(tensor: TensorRecord, entries: Mapping[str, ZipEntry]) -> Located:
    """Return where the bytes of a tensor lie, by the archive's directory. Its storage may be too small: `Corrupt`."""
    storage = entries.get(f"data/{tensor.key}")
    if storage is None:
        raise Corrupt(f"entry `data/{tensor.key}` is missing from the archive")
    start = tensor.offset * tensor.dtype.itemsize
    nbytes = tensor.span * tensor.dtype.itemsize
    if start + nbytes > storage.length:
        raise Corrupt(f"expected a storage of at least {start + nbytes} bytes, found {storage.length}")
    is_whole = nbytes == storage.length
    return Located(
        tensor=tensor,
        offset=storage.offset + start,
        length=nbytes,
        strides=None if tensor.is_row_major else tensor.strides,
        crc32=storage.crc32 if is_whole and storage.crc32 else None,
        storage=None if is_whole or not storage.crc32 else storage,
    )


def check_byte_order(read: ReadAt, entries: Mapping[str, ZipEntry]) -> None:
    """Raise `Unsupported` for an archive written on a big-endian machine; torch before 2.1 did not say."""
    if "byteorder" in entries and read_entry(read, entries, "byteorder").strip() != b"little":
        raise Unsupported("the tensor was saved in big-endian byte order")

"""Read the zip archive that torch.save writes: entries, offsets, checksums, and the location of the tensor.

Source: caffe2/serialize/inline_container.cc; the fields are from PKWARE's APPNOTE.TXT. Local headers have no sizes
(flag bit 3), so everything comes from the central directory. Reads one or two kilobytes per archive.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from struct import Struct
from typing import Any, NamedTuple
from zlib import crc32

from ckptkit.errors import RESTORE, Corrupt, Unsupported
from ckptkit.formats.pickles.tensor_calls import TensorRecord, parse_tensor
from ckptkit.io.file import find_missing_content_error
from ckptkit.layout import Chunk
from ckptkit.layout.box import Box, Shape


class Located(NamedTuple):
    """The location of a tensor's bytes: `length` bytes at `offset` of the archive, in the order of `strides`.

    A tensor that uses only a part of its storage is verified with the CRC-32 of the storage, if that has one.
    """

    tensor: TensorRecord
    offset: int
    length: int
    strides: Shape | None
    crc32: int | None
    storage: ZipEntry | None = None

    def as_chunk(self, box: Box, path: str) -> Chunk:
        """Return the location as a chunk in file `path`. A part of a storage has the checksum of the storage."""
        own = Chunk(box, path, self.offset, self.length, self.tensor.dtype, self.strides, self.crc32)
        storage = self.storage
        return own if storage is None else own._replace(crc32=storage.crc32, run=(storage.offset, storage.length))


def locate_single_tensor(read: ReadAt, length: int) -> tuple[Located, dict[str, ZipEntry]]:
    """Return the location of an archive's one tensor, and every entry. Raises `Corrupt`, or `Unsupported`."""
    read = with_cached_ends(read, length)
    entries = read_central_directory(read, length)
    check_byte_order(read, entries)
    return locate_storage_of(parse_tensor(read_entry_content(read, entries, "data.pkl")), entries), entries


def locate_storage_of(tensor: TensorRecord, entries: Mapping[str, ZipEntry]) -> Located:
    """Return the location of a tensor's bytes. Raises `Corrupt` if its storage is missing or too small."""
    storage = entries.get(f"data/{tensor.key}")
    if storage is None:
        raise Corrupt(f"entry `data/{tensor.key}` is missing from the archive")
    start = tensor.offset * tensor.dtype.itemsize
    nbytes = tensor.numel_spanned * tensor.dtype.itemsize
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
    """Raise `Unsupported` for an archive from a big-endian machine; archives before torch 2.1 do not say."""
    if "byteorder" in entries and read_entry_content(read, entries, "byteorder").strip() != b"little":
        raise Unsupported("the tensor was saved in big-endian byte order")


ReadAt = Callable[[int, int], bytes]  # (offset in the archive, length) -> bytes
LOCAL_HEADER = Struct("<4sHHHHHIIIHH")  # signature .. name length, extra length
DIRECTORY_RECORD = Struct("<4sHHHHHHIIIHHHHHII")
END = Struct("<4sHHHHIIH")
END64_LOCATOR = Struct("<4sIQI")
END64 = Struct("<4sQHHIIQQQQ")
ALL_ONES = 0xFFFFFFFF
_HAS_DESCRIPTOR = 8  # flag bit 3: CRC and sizes follow the content
_DIRECTORY_LIMIT = 1 << 26  # bytes; half a million entries
CONTENT_LIMIT = 1 << 16  # bytes of `data.pkl` for one tensor, and of the other small entries
_PIECE = 1 << 20  # bytes of an entry per read when its checksum is verified
GLANCE = 2048  # bytes read at each end; torch's own head and directory take about 800 and 600


@dataclass(frozen=True, slots=True)
class ZipEntry:
    """A file in the archive. `record` is the offset of its record in the directory; a `crc32` of 0 is unknown."""

    offset: int
    length: int
    crc32: int
    record: int = 0

    @property
    def crc_offsets(self) -> tuple[int, int]:
        """Return both offsets of the CRC-32: in the data descriptor after the content, and in the directory."""
        return self.offset + self.length + 4, self.record + 16


def with_cached_ends(read: ReadAt, length: int) -> ReadAt:
    """Return a `read` that serves the archive's first and last bytes from memory, after two reads in advance."""
    head = read(0, min(length, GLANCE))
    cut = max(0, length - GLANCE)
    tail = read(cut, length - cut) if cut else head

    def read_glanced(offset: int, size: int) -> bytes:
        if offset + size <= len(head):
            return head[offset : offset + size]
        if offset >= cut:
            return tail[offset - cut : offset - cut + size]
        return read(offset, size)

    return read_glanced


def read_central_directory(read: ReadAt, length: int) -> dict[str, ZipEntry]:
    """Return every entry of the archive by its name without the archive's own prefix, which ends at the first slash."""
    count, size, offset = read_central_directory_location(read, length)
    if offset + size > length or size > _DIRECTORY_LIMIT:
        raise Corrupt(f"the zip directory of {size} bytes at byte {offset} does not fit an archive of {length} bytes")
    directory = read(offset, size)
    entries: dict[str, ZipEntry] = {}
    at = 0
    for _ in range(count):
        if at + DIRECTORY_RECORD.size > size:
            raise Corrupt("the zip directory is truncated")
        fields = DIRECTORY_RECORD.unpack_from(directory, at)
        record = offset + at
        name_length, extra_length, comment_length = fields[10:13]
        at += DIRECTORY_RECORD.size
        raw_name = directory[at : at + name_length]
        extra = directory[at + name_length : at + name_length + extra_length]
        at += name_length + extra_length + comment_length
        name = raw_name.decode("utf-8", "replace").partition("/")[2]
        if name in entries:
            raise Corrupt(f"the archive has two entries called `{name}`")
        entries[name] = ZipEntry(*locate_entry_content(read, fields, raw_name, extra, offset), fields[7], record)
    return entries


def locate_entry_content(
    read: ReadAt, record_fields: tuple[Any, ...], raw_name: bytes, extra: bytes, directory_offset: int
) -> tuple[int, int]:
    """Return offset and length of the content of a directory entry.

    `directory_offset` is the offset of the directory.
    """
    signature, flags, method, checksum, packed, unpacked, header = (record_fields[i] for i in (0, 3, 4, 7, 8, 9, 16))
    if signature != b"PK\x01\x02":
        raise Corrupt("the zip directory is damaged")
    packed, unpacked, header = apply_zip64(unpacked, packed, header, extra)
    if method != 0 or packed != unpacked or flags & 1:
        message = f"entry `{raw_name.decode('utf-8', 'replace')}` is compressed or encrypted; torch writes neither"
        raise Unsupported(message)
    if header + LOCAL_HEADER.size > directory_offset:
        raise Corrupt(f"a zip entry starts at {header}, past the {directory_offset} bytes of the archive's entries")
    local = LOCAL_HEADER.unpack(read(header, LOCAL_HEADER.size))
    start = header + LOCAL_HEADER.size
    if local[0] != b"PK\x03\x04" or read(start, local[9]) != raw_name:
        raise Corrupt(f"the zip directory lists an entry at byte {header}, but no entry starts there")
    offset = start + local[9] + local[10]
    if offset + unpacked > directory_offset:
        entry = f"a zip entry of {unpacked} bytes at byte {offset}"
        raise Corrupt(f"{entry} does not fit the {directory_offset} bytes of the archive's entries")
    if flags & _HAS_DESCRIPTOR and read(offset + unpacked, 8) != b"PK\x07\x08" + checksum.to_bytes(4, "little"):
        message = f"damaged near byte {offset}: the zip entry of {unpacked} bytes there has no description behind it"
        raise Corrupt(message)
    return offset, unpacked


def apply_zip64(unpacked_size: int, packed_size: int, header_offset: int, extra: bytes) -> tuple[int, int, int]:
    """Return packed size, unpacked size and header offset; values beyond 32 bits come from the zip64 field."""
    values = [unpacked_size, packed_size, header_offset]
    while len(extra) >= 4:
        kind, size = int.from_bytes(extra[:2], "little"), int.from_bytes(extra[2:4], "little")
        field, extra = extra[4 : 4 + size], extra[4 + size :]
        if kind == 1:
            for i, value in enumerate(values):
                if value == ALL_ONES and len(field) >= 8:
                    values[i], field = int.from_bytes(field[:8], "little"), field[8:]
    return values[1], values[0], values[2]


def read_central_directory_location(read: ReadAt, length: int) -> tuple[int, int, int]:
    """Return number of entries, size and offset of the central directory, from the archive's last bytes."""
    if length < END.size:
        raise Corrupt(f"expected an archive of at least {END.size} bytes, found {length}")
    end = END.unpack(read(length - END.size, END.size))
    if end[0] != b"PK\x05\x06":
        head = read(0, min(length, 64))
        if head[8:9] == b"{":
            raise Unsupported("expected an archive of torch.save, found safetensors")
        message = "expected an archive of torch.save: this is another kind of file, or its end is missing"
        raise find_missing_content_error(head) or Corrupt(message, hint=RESTORE)
    count, size, offset = end[4:7]
    if count == 0xFFFF or ALL_ONES in (size, offset):
        at = length - END.size - END64_LOCATOR.size
        locator = END64_LOCATOR.unpack(read(at, END64_LOCATOR.size)) if at >= 0 else (b"",)
        if locator[0] != b"PK\x06\x07" or locator[2] + END64.size > length:
            raise Corrupt("the zip64 end record of the archive is missing")
        end64 = END64.unpack(read(locator[2], END64.size))
        if end64[0] != b"PK\x06\x06":
            raise Corrupt("the zip64 end record of the archive is damaged")
        count, size, offset = end64[7:10]
    if count * DIRECTORY_RECORD.size > size:
        raise Corrupt(f"expected {count} entries in the zip directory, found only {size} bytes")
    return count, size, offset


def read_entry_content(
    read: ReadAt, entries: Mapping[str, ZipEntry], name: str, *, limit: int = CONTENT_LIMIT
) -> bytes:
    """Return the content of an entry of at most `limit` bytes. Verifies its CRC-32."""
    entry = entries.get(name)
    if entry is None:
        raise Corrupt(f"entry `{name}` is missing from the archive")
    if entry.length > limit:
        raise Unsupported(f"expected at most {limit} bytes in entry `{name}`, found {entry.length}")
    content = read(entry.offset, entry.length)
    if entry.crc32 and crc32(content) != entry.crc32:
        raise damaged_entry_error(name, entry, crc32(content))
    return content


def damaged_entry_error(name: str, entry: ZipEntry, found_crc32: int) -> Corrupt:
    return Corrupt(
        f"expected CRC-32 {entry.crc32:08x} of entry `{name}`, found {found_crc32:08x}: the entry is damaged"
    )


def verify_archive_in_memory(archive: bytes) -> None:
    """Raise `Corrupt` unless every entry of an archive, given in memory, matches its recorded CRC-32."""

    def read(offset: int, length: int) -> bytes:
        if offset < 0 or length < 0 or offset + length > len(archive):
            raise Corrupt(f"expected an entry of at least {offset + length} bytes, found {len(archive)}")
        return archive[offset : offset + length]

    verify_archive_checksums(read, len(archive))


def verify_archive_checksums(read: ReadAt, length: int) -> None:
    """Raise `Corrupt` unless every entry of an archive of `length` bytes matches its recorded CRC-32."""
    for name, entry in read_central_directory(with_cached_ends(read, length), length).items():
        pieces = range(entry.offset, entry.offset + entry.length, _PIECE)
        crc = 0
        for start in pieces if entry.crc32 else ():
            crc = crc32(read(start, min(_PIECE, entry.offset + entry.length - start)), crc)
        if crc != entry.crc32:
            raise damaged_entry_error(name, entry, crc)

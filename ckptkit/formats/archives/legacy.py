"""Read the format of torch.save before version 1.6: pickles one after another, then every storage. No tensor data.

Source: `_legacy_save` in torch/serialization.py. The pickles are a magic number, a version, the facts of the machine,
the object, and the keys of its storages; each storage is a count of elements and their bytes. Where the storages begin
shows only when the pickles have been read. Nothing has a checksum.
"""

from __future__ import annotations

from typing import Any

from ckptkit.errors import Corrupt, Unsupported
from ckptkit.formats.archives.zip_entries import ReadAt, ZipEntry
from ckptkit.formats.pickles import inert_pickle
from ckptkit.formats.pickles.inert_pickle import ANY_NAME, PersistentId
from ckptkit.formats.pickles.tensor_calls import STORAGES
from ckptkit.layout.dtypes import DTYPES

_MAGIC = 0x1950A86A20F9469CFC6C
_VERSION = 1001
_COUNT_BYTES = 8  # of elements, before each storage's bytes
_FIRST_READ = 1 << 16  # bytes; as many again, and more, are read as long as the pickles go on
_READ_LIMIT = 1 << 28
_ITEM_SIZES = {storage: DTYPES[name].itemsize for storage, name in STORAGES.items()} | {
    "UntypedStorage": 1,
    "QUInt8Storage": 1,
    "QInt8Storage": 1,
    "QInt32Storage": 4,
}


def is_legacy(head: bytes) -> bool:
    """Return True if a file that begins with `head` is of this format, or of the one before it."""
    magic = b"\x8a\x0a" + _MAGIC.to_bytes(10, "little")
    return (head[:1] == b"\x80" and magic in head[:32]) or is_tar(head)


def is_tar(head: bytes) -> bool:
    """Return True for the first format of all, a tar archive with the facts of the machine before everything else."""
    return head[257:262] == b"ustar" and b"sys_info\0" in head


def read_legacy(read: ReadAt, length: int) -> tuple[Any, dict[str, ZipEntry]]:
    """Return the object in a file of `length` bytes, and where its pickle and storages lie, called as in an archive."""
    pickled = _Pickles(read, length)
    if is_tar(pickled.data):
        raise Unsupported(
            "this is a tar archive, an early format of torch.save", hint="load the file with torch and save it again"
        )
    magic, version, machine = pickled.next(), pickled.next(), pickled.next()
    if magic != _MAGIC or version != _VERSION:
        raise Unsupported(f"expected version {_VERSION} of torch.save's old format, found another version")
    if not isinstance(machine, dict) or machine.get("little_endian") is not True:
        raise Unsupported("the file was saved in big-endian byte order")
    start = pickled.at
    state = pickled.next()
    entries = {"data.pkl": ZipEntry(start, pickled.at - start, 0)}
    keys = pickled.next()
    sizes = storage_sizes(state)
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys) or sorted(keys) != sorted(sizes):
        raise Corrupt("the storages in the file's list differ from the storages that its tensors use")
    at = pickled.at
    for key in keys:
        place = find_storage(read, at, length, *sizes[key])
        entries[f"data/{key}"] = place
        at = place.offset + place.length
    return state, entries


def storage_sizes(state: Any) -> dict[str, tuple[int, int]]:
    """Return elements, and bytes of each, of every storage that a pickled object refers to, by its key."""
    sizes: dict[str, tuple[int, int]] = {}
    for part in inert_pickle.walk(state):
        if not isinstance(part, PersistentId):
            continue
        try:
            _, kind, key, *details = part.value
            size = (int(details[1]), _ITEM_SIZES[kind.name])
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise Unsupported("the pickle refers to an unknown kind of storage") from error
        if type(key) is not str or sizes.setdefault(key, size) != size:
            raise Corrupt("two tensors share a storage, but describe it differently")
    return sizes


def find_storage(read: ReadAt, at: int, length: int, numel: int, itemsize: int) -> ZipEntry:
    """Return the place of the storage of `numel` elements whose count is at byte `at` of a file of `length` bytes."""
    start = at + _COUNT_BYTES
    if start > length:
        raise Corrupt(f"expected a storage at byte {at}, found the end of the file at byte {length}")
    count = int.from_bytes(read(at, _COUNT_BYTES), "little")
    if count != numel:
        raise Corrupt(f"expected {numel} elements in the storage at byte {at}, found {count}")
    nbytes = count * itemsize
    if start + nbytes > length:
        raise Corrupt(f"expected a storage at bytes {start}:{start + nbytes}, found the end of the file at {length}")
    return ZipEntry(start, nbytes, 0)


class _Pickles:
    """The pickles one after another from a file's start, which is read as far as they reach, or a little further."""

    def __init__(self, read: ReadAt, length: int) -> None:
        self.read = read
        self.length = min(length, _READ_LIMIT)
        self.data = read(0, min(self.length, _FIRST_READ))
        self.at = 0

    def next(self) -> Any:
        """Return the object of the next pickle."""
        while True:
            try:
                value, self.at = inert_pickle.load(self.data, ANY_NAME, at=self.at)
            except Corrupt:
                if len(self.data) == self.length:
                    raise
                self.data = self.read(0, min(self.length, 4 * len(self.data)))
            else:
                return value

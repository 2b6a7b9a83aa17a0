"""Open files of torch.save in the current or the old format, and read their pickles inertly."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptkit.errors import CkptError, Corrupt, Report, Unsafe, Unsupported, errors_at
from ckptkit.formats.archives.zip_entries import (
    ReadAt,
    ZipEntry,
    check_byte_order,
    read_central_directory,
    read_central_directory_location,
    read_entry_content,
    with_cached_ends,
)
from ckptkit.formats.pickles import inert_pickle
from ckptkit.formats.pickles.inert_pickle import ANY_NAME, PersistentId
from ckptkit.formats.pickles.tensor_calls import STORAGES
from ckptkit.io.file import find_missing_content_error, opening, read_at
from ckptkit.layout import Extent, FileOffset, Layout
from ckptkit.layout.dtypes import DTYPES

# The format of torch.save before version 1.6: consecutive pickles, then every storage.
#
# Source: `_legacy_save` in torch/serialization.py. The pickles are a magic number, a version, facts about the machine,
# the object, and the keys of its storages; each storage is a count of elements and their bytes. The storages begin
# where the pickles end, so ckptkit has to read the pickles first. There are no checksums.
_MAGIC = 0x1950A86A20F9469CFC6C
_VERSION = 1001
_COUNT_BYTES = 8  # the length of the element count in front of each storage
_FIRST_READ = 1 << 16  # bytes; the next read is four times as long if the pickles do not end within them
_READ_LIMIT = 1 << 28
_ITEM_SIZES = {storage: DTYPES[name].itemsize for storage, name in STORAGES.items()} | {
    "UntypedStorage": 1,
    "QUInt8Storage": 1,
    "QInt8Storage": 1,
    "QInt32Storage": 4,
}


def is_legacy_torch_save(head: bytes) -> bool:
    """Return True if a file that begins with `head` is of torch.save before 1.6, or in the tar format before that."""
    magic = b"\x8a\x0a" + _MAGIC.to_bytes(10, "little")
    return (head[:1] == b"\x80" and magic in head[:32]) or is_torch_tar(head)


def is_torch_tar(head: bytes) -> bool:
    """Return True for torch's first format, a tar archive that begins with facts about the machine."""
    return head[257:262] == b"ustar" and b"sys_info\0" in head


def read_legacy_torch_save(read: ReadAt, length: int) -> tuple[Any, dict[str, ZipEntry]]:
    """Return the object in a file, and the location of its pickle and storages, named as an archive's entries."""
    if is_torch_tar(read(0, min(length, HEAD))):
        hint = "load the file with torch and save it again"
        raise Unsupported("this is a tar archive, an early format of torch.save", hint=hint)
    pickles = legacy_pickles(read, length)
    (magic, _), (version, _), (machine, begin) = next(pickles), next(pickles), next(pickles)
    if magic != _MAGIC or version != _VERSION:
        raise Unsupported(f"expected version {_VERSION} of torch.save's old format, found another version")
    if not isinstance(machine, dict) or machine.get("little_endian") is not True:
        raise Unsupported("the file was saved in big-endian byte order")
    state, end = next(pickles)
    entries = {"data.pkl": ZipEntry(begin, end - begin, 0)}
    keys, at = next(pickles)
    sizes = storage_numels_and_itemsizes(state)
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys) or sorted(keys) != sorted(sizes):
        raise Corrupt("the storages in the file's list differ from the storages that its tensors use")
    for key in keys:
        numel, itemsize = sizes[key]
        start, nbytes = at + _COUNT_BYTES, numel * itemsize
        if start > length:
            raise Corrupt(f"expected a storage at byte {at}, found the end of the file at byte {length}")
        count = int.from_bytes(read(at, _COUNT_BYTES), "little")
        if count != numel:
            raise Corrupt(f"expected {numel} elements in the storage at byte {at}, found {count}")
        if start + nbytes > length:
            found = f"found the end of the file at byte {length}"
            raise Corrupt(f"expected a storage of {nbytes} bytes at byte {start}, {found}")
        entries[f"data/{key}"] = ZipEntry(start, nbytes, 0)
        at = start + nbytes
    return state, entries


def storage_numels_and_itemsizes(state: Any) -> dict[str, tuple[int, int]]:
    """Return the number of elements and the itemsize of each storage that a pickled object uses, by storage key."""
    sizes: dict[str, tuple[int, int]] = {}
    for member in inert_pickle.walk_members(state):
        if not isinstance(member, PersistentId):
            continue
        try:
            _, kind, key, *details = member.value
            size = (int(details[1]), _ITEM_SIZES[kind.name])
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise Unsupported("the pickle refers to an unknown kind of storage") from error
        if type(key) is not str or sizes.setdefault(key, size) != size:
            raise Corrupt("two tensors share a storage, but describe it differently")
    return sizes


def legacy_pickles(read: ReadAt, length: int) -> Iterator[tuple[Any, int]]:
    """Yield the values pickled at the start of a file, each with the offset after it. Reads little more than these."""
    limit, at = min(length, _READ_LIMIT), 0
    data = read(0, min(limit, _FIRST_READ))
    while True:
        try:
            value, at = inert_pickle.load(data, ANY_NAME, at=at)
        except Corrupt:
            if len(data) == limit:
                raise
            data = read(0, min(limit, 4 * len(data)))
        else:
            yield value, at


HEAD = 2048  # bytes, enough for the first entry's name
_ZIP = b"PK\x03\x04"
_PICKLE_LIMIT = 1 << 28  # bytes; the pickles of the largest models have a few million
_PROGRAMS = {  # an entry that only the archive of a program has: the kind of program, and the function that loads it
    "constants.pkl": ("a TorchScript program", "torch.jit.load"),
    "models/model.json": ("an ExportedProgram of torch.export", "torch.export.load"),
    "serialized_exported_program.json": ("an ExportedProgram of torch.export", "torch.export.load"),
    "archive_format": ("a program that torch.export or AOTInductor wrote", "torch.export.load"),
}


@dataclass(frozen=True, slots=True)
class StateFile:
    """The object pickled in a file of torch.save, and the location of its pickle and storages, as in an archive."""

    name: str
    value: Any
    entries: Mapping[str, ZipEntry]


def read_state_file(root: Path, name: str) -> StateFile:
    """Return the contents of file `name` in a directory. Every error names the file."""
    with opened_torch_save(root / name) as (read, length):
        if is_legacy_torch_save(read(0, min(length, HEAD))):
            return StateFile(name, *read_legacy_torch_save(read, length))
        entries = entry_locations(read, length)
        check_byte_order(read, entries)
        state, _ = inert_pickle.load(read_entry_content(read, entries, "data.pkl", limit=_PICKLE_LIMIT), ANY_NAME)
    return StateFile(name, state, entries)


def is_torch_save(path: Path) -> bool:
    """Return True if the file at `path` begins like one of torch.save, in the old format or as an archive."""
    if not path.is_file():
        return False
    with opening(path) as file:
        head = read_at(file, min(file.size, HEAD), 0)
    first_name = head[30 : 30 + int.from_bytes(head[26:28], "little")]
    return is_legacy_torch_save(head) or (head.startswith(_ZIP) and first_name.endswith(b"/data.pkl"))


@contextmanager
def opened_torch_save(path: Path) -> Iterator[tuple[ReadAt, int]]:
    """Open a file of torch.save. Yields a function that reads from it, and its size. Errors inside name the file."""
    with errors_at(path=path), opening(path) as file:
        length = file.size
        yield with_cached_ends(lambda offset, size: read_at(file, size, offset), length), length


def entry_locations(read: ReadAt, length: int) -> dict[str, ZipEntry]:
    """Return the location of each entry, by name. Raises `Unsupported` for programs, and for files of DataStates."""
    head = read(0, min(length, HEAD))
    if is_legacy_torch_save(head):
        return read_legacy_torch_save(read, length)[1]
    if not head.startswith(_ZIP) and (strange := find_datastates_error(read, length)):
        raise strange
    if program := find_saved_program_error(read, length):
        raise program
    return read_central_directory(read, length)


def entry_locations_in_file(path: Path) -> dict[str, ZipEntry]:
    """Return the location of each entry in a file, by name, as `entry_locations`. Every error names the file."""
    with opened_torch_save(path) as opened:
        return entry_locations(*opened)


def report_truncated_files(root: Path, names: Iterable[str], report: Report) -> None:
    """Report each of these files in directory `root` that is truncated."""
    for name in names:
        try:
            entry_locations_in_file(root / name)
        except CkptError as error:
            report(error)


def find_saved_program_error(read: ReadAt, length: int) -> Unsupported | None:
    """Return the error for an archive in which torch saved a program; None for any other archive.

    Sources: torch/csrc/jit/serialization/export_module.cpp, torch/export/pt2_archive/constants.py and, before 2.8,
    torch/_export/serde.
    """
    _, size, offset = read_central_directory_location(read, length)
    directory = read(offset, min(size, max(length - offset, 0), _PICKLE_LIMIT))
    for name, (what, loader) in _PROGRAMS.items():
        if f"/{name}".encode() in directory:
            hint = f"load it with `{loader}`, and save its `state_dict()` with torch.save"
            return Unsupported(f"expected a state dict, found {what}", hint=hint)
    return None


def find_datastates_error(read: ReadAt, length: int) -> Unsupported | None:
    """Return the error for a file of DataStates: the size of a header, the header in JSON, then tensors and a pickle.

    The header follows its size, or in newer versions begins at byte 4096. Source: llm/datastates/ckpt.py of
    DataStates/datastates-llm.
    """
    size = int.from_bytes(read(0, 8), "little") if length > 8 else 0
    places = (at for at in (8, 4096) if 2 <= size <= min(length - at, _PICKLE_LIMIT))
    if not any((header := read(at, size)).startswith(b"{") and b'"datastates_metadata"' in header for at in places):
        return None
    hint = "load the checkpoint with DataStates' engine, and save it with the default one"
    return Unsupported("the file is in the format of DataStates, not of torch.save", hint=hint)


def find_foreign_file_error(path: Path) -> CkptError | None:
    """Return the error for a program that torch wrote, a file of DataStates, or a pointer or empty file; else None."""
    with opened_torch_save(path) as (read, length):
        if strange := find_missing_content_error(read(0, min(length, HEAD)), path):
            return strange
        if foreign := find_datastates_error(read, length):
            return foreign.blame(path=path)
        try:
            program = find_saved_program_error(read, length) if read(0, min(4, length)) == _ZIP else None
        except (Corrupt, Unsafe, Unsupported):
            # not this function's concern: whoever reads the file reports the damage
            return None
    if program is not None:
        program.blame(path=path)
    return program


def checksum_offsets_in(layout: Layout, paths: Iterable[str]) -> Iterator[tuple[FileOffset, int]]:
    """Yield each entry of the files, as file and offset, with both offsets at which its CRC-32 is stored."""
    for path in paths:
        with opened_torch_save(layout.root / path) as (read, length):
            entries = read_central_directory(read, length)
        yield from (
            ((path, entry.offset), at) for entry in entries.values() if entry.length for at in entry.crc_offsets
        )


def read_raw_pickle(path: Path) -> bytes:
    """Return the unparsed pickle in a file of torch.save, without its storages; empty if the archive has none."""
    with opened_torch_save(path) as (read, length):
        entries = entry_locations(read, length)
        return read_entry_content(read, entries, "data.pkl", limit=_PICKLE_LIMIT) if "data.pkl" in entries else b""


def archive_extents_of(layout: Layout, paths: Iterable[str], report: Report) -> Iterator[Extent]:
    """Yield every entry of the files: storages, pickles and torch's own. Reports each file that cannot be read."""
    places = {(chunk.path, chunk.offset): name for name, t in layout.tensors.items() for chunk in t.chunks}
    for path in sorted(set(paths)):
        try:
            entries = entry_locations_in_file(layout.root / path).values()
        except CkptError as error:
            report(error)
            continue
        for entry in entries:
            name = places.get((path, entry.offset), "")
            yield Extent(path, entry.offset, entry.length, entry.crc32 or None, name)

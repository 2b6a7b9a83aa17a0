"""Join what ranks saved without talking to each other: a file `__N.metadata` for each rank, and no `.metadata`.

torch loads every entry of a rank by that rank's own metadata (torch/distributed/checkpoint/state_dict_loader.py). So
entries that differ between ranks (random states, the place in the data) stay apart, as `own_state.rank_N.NAME`.
Entries that are equal on all ranks are one entry. Floats beside shards are parameters or their states: copies of these
must be equal, and are left to whoever compares spare chunks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ckptkit.errors import CkptError, Corrupt, Report
from ckptkit.formats.archives.locate import ENVELOPE, locate
from ckptkit.formats.dcp.read_metadata import Entry, Reading, read_metadata
from ckptkit.formats.shards.join import STATISTICS
from ckptkit.io.crc32 import crc32
from ckptkit.io.file import OpenFiles, read_at
from ckptkit.layout import OWN, Blob, Chunk, KeyPath, Layout, Spec, StoredTensor
from ckptkit.layout.box import whole

_BLOCK = 1 << 22  # bytes that are held at once
_EntryByRank = Mapping[int, Entry]  # what each rank has under one name
_Content = tuple[object, ...]  # the same for entries with the same value


def read_by_rank(path: Path, files: Mapping[int, Path], report: Report) -> Reading:
    """Return what the metadata of all ranks describe. Reports the files that cannot be read, and shards that differ."""
    ranks = read_each_rank(path, files, report)
    joined = Reading(path, report)
    names = dict.fromkeys(name for reading in ranks.values() for name in reading.names)
    held = {name: {rank: one.entry(name) for rank, one in ranks.items() if name in one.names} for name in names}
    contents = read_contents(path, [own for own in held.values() if are_whole(own)], report)
    keys = {name: next(ranks[rank].key(name) for rank in own) for name, own in held.items()}
    sharded = {top_of(keys[name]) for name, own in held.items() if any(map(is_sharded, own.values()))}
    for name, own in held.items():
        is_equal = not are_whole(own) or len({contents[place_of(entry)] for entry in own.values()}) == 1
        is_float = all(isinstance(entry, StoredTensor) and entry.spec.dtype.kind == "float" for entry in own.values())
        try:
            if is_equal or (is_float and top_of(keys[name]) in sharded and not name.endswith(STATISTICS)):
                check_kinds(own)
                put(joined, name, keys[name], list(own.values()))
                continue
        except CkptError as error:
            report(error.blame(path=path, tensor=name))
            continue
        put_apart(joined, keys[name], own)
        if name.endswith(STATISTICS):
            put(joined, name, keys[name], [next(iter(own.values()))])
    return joined


def read_each_rank(path: Path, files: Mapping[int, Path], report: Report) -> dict[int, Reading]:
    """Return what each rank's metadata describe. Reports the files that cannot be read."""
    ranks = {}
    for rank, file in files.items():
        reading = Reading(path, report)
        try:
            reading.add(read_metadata(file), file)
            ranks[rank] = reading
        except CkptError as error:
            report(error.blame(path=file))
    return ranks


def are_whole(held: _EntryByRank) -> bool:
    """Return whether several ranks have an entry, and each of them has all of it."""
    return len(held) > 1 and not any(map(is_sharded, held.values()))


def is_sharded(entry: Entry) -> bool:
    """Return whether a rank has only a part of an entry."""
    return isinstance(entry, StoredTensor) and [chunk.box for chunk in entry.chunks] != [whole(entry.spec.shape)]


def top_of(key: KeyPath) -> KeyPath:
    """Return the first step of the way to an entry that lies in a dict, and nothing for any other entry."""
    return key[: len(key) > 1]


def check_kinds(held: _EntryByRank) -> None:
    """Raise `Corrupt` unless all ranks have parts of the same tensor, or no tensor."""
    kinds = {str(entry.spec) if isinstance(entry, StoredTensor) else "no tensor" for entry in held.values()}
    if len(kinds) > 1:
        one, other = sorted(kinds)[:2]
        raise Corrupt(f"the ranks disagree: one rank has {one}, another {other}")


def put(joined: Reading, name: str, key: KeyPath, entries: Sequence[Entry]) -> None:
    """Add an entry that ranks have in parts, or alike. Further copies of a chunk are spares."""
    for entry in entries:
        if isinstance(entry, Blob):
            joined.blobs.setdefault(name, entry)
            continue
        joined.specs[name] = entry.spec
        chunks = joined.chunks.setdefault(name, {})
        for chunk in entry.chunks:
            if chunks.setdefault(chunk.box, chunk) != chunk:
                joined.spares.setdefault(name, []).append(chunk)
    if key != (name,):
        joined.keys[name] = key


def put_apart(joined: Reading, key: KeyPath, held: _EntryByRank) -> None:
    """Add an entry for each rank, since their values differ."""
    for rank, entry in held.items():
        way = (OWN, f"rank_{rank}", *key)
        put(joined, ".".join(map(str, way)), way, [entry])


def read_contents(path: Path, held: Sequence[_EntryByRank], report: Report) -> dict[tuple[str, int, int], _Content]:
    """Return for each entry what tells whether it is equal to another, by its place."""
    found: dict[tuple[str, int, int], _Content] = {}
    chunks: dict[str, Chunk] = {}
    with OpenFiles(path, in_order=False) as files:
        for entry in (entry for own in held for entry in own.values()):
            if isinstance(entry, StoredTensor) and entry.chunks[0].wrapper == ENVELOPE:
                chunks[str(len(chunks))] = entry.chunks[0]
            else:
                found[place_of(entry)] = (sum_bytes(files, *place_of(entry)),)
        for old, new in zip(chunks.values(), locate_all(path, chunks, report), strict=True):
            crc = new.crc32 if new.crc32 is not None else sum_bytes(files, new.path, new.offset, new.length)
            found[old.path, old.offset, old.length] = (old.dtype, old.size, new.strides, crc)
    return found


def locate_all(path: Path, chunks: Mapping[str, Chunk], report: Report) -> list[Chunk]:
    """Return chunks of whole tensors with their bytes located."""
    tensors = {name: StoredTensor(Spec(chunk.dtype, chunk.size), (chunk,)) for name, chunk in chunks.items()}
    return [tensor.chunks[0] for tensor in locate(Layout(path, "dcp", tensors), report).tensors.values()]


def sum_bytes(files: OpenFiles, path: str, offset: int, length: int) -> int:
    """Return the CRC-32 of bytes in a file."""
    total = 0
    for at in range(offset, offset + length, _BLOCK):
        total = crc32(read_at(files[path], min(_BLOCK, offset + length - at), at), total)
    return total


def place_of(entry: Entry) -> tuple[str, int, int]:
    """Return file, offset and length of an entry that is whole."""
    place = entry if isinstance(entry, Blob) else entry.chunks[0]
    return place.path, place.offset, place.length

"""Join the entries that ranks saved independently: one file `__N.metadata` per rank, and no `.metadata`.

torch loads every entry of a rank by the rank's own metadata (torch/distributed/checkpoint/state_dict_loader.py). So
entries that differ between ranks (random states, the position in the data) stay separate, as `own_state.rank_N.NAME`.
Entries that are equal on all ranks become one entry. Float tensors beside shards are parameters or their optimizer
state: their replicas must be equal, and later checks compare them as spare chunks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ckptkit.errors import CkptError, Corrupt, Report
from ckptkit.formats.archives.locate import ENVELOPE, locate_in_archives
from ckptkit.formats.dcp.read_metadata import Entry, Reading, read_metadata
from ckptkit.formats.rank_names import read_each_file
from ckptkit.formats.shards.join import STATISTICS
from ckptkit.io.crc32 import crc32
from ckptkit.io.file import OpenFiles, read_at
from ckptkit.layout import OWN, Blob, Chunk, KeyPath, Layout, Spec, StoredTensor
from ckptkit.layout.box import full_box

_BLOCK = 1 << 22  # bytes per read
_EntryByRank = Mapping[int, Entry]  # the entries that the ranks have under one name
_Content = tuple[object, ...]  # equal for entries with equal values


def join_metadata_of_ranks(path: Path, file_by_rank: Mapping[int, Path], report: Report) -> Reading:
    """Return the entries of all ranks, joined. Reports files that cannot be read, and shards that disagree."""

    def read_rank(_: int, name: str) -> Reading:
        reading = Reading(path, report)
        reading.add_metadata(read_metadata(path / name), path / name)
        return reading

    ranks = read_each_file(path, {rank: file.name for rank, file in file_by_rank.items()}, read_rank, report)
    joined = Reading(path, report)
    by_name: dict[str, dict[int, Entry]] = {}
    for rank, reading in ranks.items():
        for name in reading.names:
            by_name.setdefault(name, {})[rank] = reading.entry(name)
    in_shards = {name for name, by_rank in by_name.items() if any(map(is_shard_of_entry, by_rank.values()))}
    repeated = {name: by_rank for name, by_rank in by_name.items() if len(by_rank) > 1 and name not in in_shards}
    contents = content_ids_by_range(path, list(repeated.values()), report)
    keys = {name: next(ranks[rank].key(name) for rank in by_rank) for name, by_rank in by_name.items()}
    sharded = {top_level_key(keys[name]) for name in in_shards}
    for name, by_rank in by_name.items():
        is_equal = name not in repeated or len({contents[byte_range_of(entry)] for entry in by_rank.values()}) == 1
        is_float = all(
            isinstance(entry, StoredTensor) and entry.spec.dtype.kind == "float" for entry in by_rank.values()
        )
        try:
            if is_equal or (is_float and top_level_key(keys[name]) in sharded and not name.endswith(STATISTICS)):
                kinds = {str(one.spec) if isinstance(one, StoredTensor) else "no tensor" for one in by_rank.values()}
                if len(kinds) > 1:
                    first, second = sorted(kinds)[:2]
                    raise Corrupt(f"the ranks disagree: one rank has {first}, another {second}")
                add_joined_entry(joined, name, keys[name], list(by_rank.values()))
                continue
        except CkptError as error:
            report(error.blame(path=path, tensor=name))
            continue
        for rank, entry in by_rank.items():
            way = (OWN, f"rank_{rank}", *keys[name])
            add_joined_entry(joined, ".".join(map(str, way)), way, [entry])
        if name.endswith(STATISTICS):
            add_joined_entry(joined, name, keys[name], [next(iter(by_rank.values()))])
    return joined


def is_shard_of_entry(entry: Entry) -> bool:
    """Return whether a rank has only a part of an entry."""
    return isinstance(entry, StoredTensor) and [chunk.box for chunk in entry.chunks] != [full_box(entry.spec.shape)]


def top_level_key(key: KeyPath) -> KeyPath:
    """Return the first step of an entry's key path if the entry is inside a dict, else ()."""
    return key[: len(key) > 1]


def add_joined_entry(joined: Reading, name: str, key: KeyPath, entries: Sequence[Entry]) -> None:
    """Add an entry that ranks have in shards or as replicas. Further copies of a chunk become spares."""
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


def content_ids_by_range(
    path: Path, entries_by_rank: Sequence[_EntryByRank], report: Report
) -> dict[tuple[str, int, int], _Content]:
    """Return a value for each entry, by its location, that is equal for entries with equal contents."""
    contents: dict[tuple[str, int, int], _Content] = {}
    chunks: dict[str, Chunk] = {}
    with OpenFiles(path, in_order=False) as files:
        for entry in (entry for own in entries_by_rank for entry in own.values()):
            if isinstance(entry, StoredTensor) and entry.chunks[0].wrapper == ENVELOPE:
                chunks[str(len(chunks))] = entry.chunks[0]
            else:
                contents[byte_range_of(entry)] = (crc32_of_range(files, *byte_range_of(entry)),)
        tensors = {name: StoredTensor(Spec(chunk.dtype, chunk.size), (chunk,)) for name, chunk in chunks.items()}
        located = locate_in_archives(Layout(path, "dcp", tensors), report).tensors
        for old, (new,) in zip(chunks.values(), (tensor.chunks for tensor in located.values()), strict=True):
            crc = new.crc32 if new.crc32 is not None else crc32_of_range(files, new.path, new.offset, new.length)
            contents[old.path, old.offset, old.length] = (old.dtype, old.size, new.strides, crc)
    return contents


def crc32_of_range(files: OpenFiles, path: str, offset: int, length: int) -> int:
    """Return the CRC-32 of `length` bytes at `offset` of a file."""
    total = 0
    for at in range(offset, offset + length, _BLOCK):
        total = crc32(read_at(files[path], min(_BLOCK, offset + length - at), at), total)
    return total


def byte_range_of(entry: Entry) -> tuple[str, int, int]:
    stored = entry if isinstance(entry, Blob) else entry.chunks[0]
    return stored.path, stored.offset, stored.length

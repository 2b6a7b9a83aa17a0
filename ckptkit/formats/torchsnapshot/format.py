"""Read snapshots of torchsnapshot: common entries once, shards joined, and each rank's own entries by rank.

Source: torchsnapshot/{snapshot,manifest,manifest_ops}.py. There are no checksums.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptkit.errors import Corrupt, Incomplete, Report, refuse
from ckptkit.files.file import names_in, opening, read_at
from ckptkit.formats.archives.locate import ENVELOPE, locate
from ckptkit.formats.pickles.write_pickle import dump
from ckptkit.formats.protocols import FormatReader
from ckptkit.formats.torchsnapshot.plain_lists import join_lists
from ckptkit.formats.torchsnapshot.read_manifest import (
    NAME,
    ManifestEntry,
    Places,
    is_container,
    read_manifest,
    value_of,
)
from ckptkit.layout import OWN, Blob, Chunk, Extent, KeyPath, Layout, Spec, StoredTensor, Unreadable, check_cover
from ckptkit.tensors.box import Box

_TENSORS = ("Tensor", "ShardedTensor", "ChunkedTensor")
_COMPARED = 1 << 20  # bytes of a tensor that every rank has, and that may be the same on all


class TorchSnapshot(FormatReader):
    """The format of a directory with `.snapshot_metadata`."""

    name = "torchsnapshot"
    known_by = "torchsnapshot's `.snapshot_metadata`"
    is_sharded = True

    def owns(self, name: str) -> bool:
        """Return True for the manifest, and for the directories of what it points to."""
        return name in (NAME, "batched", "sharded", "replicated")

    def detect(self, path: Path) -> bool:
        """Return True for a directory with the manifest, which is written last."""
        return path.is_dir() and NAME in names_in(path)

    def check_names(self, path: Path, report: Report) -> None:
        """Report each file that is missing, or too short for what lies in it."""
        self.read(path, report)

    def read(self, path: Path, report: Report = refuse) -> Layout:
        """Return the layout of the snapshot in directory `path`."""
        entries, world = read_manifest(path)
        by_key: dict[KeyPath, list[ManifestEntry]] = {}
        try:
            gathering = _Gathering(path, Places(path, entries, report))
            for entry in entries:
                if not is_container(entry):
                    by_key.setdefault(entry.key, []).append(entry)
            for key, found in by_key.items():
                gathering.add(key, found)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise Corrupt("the manifest is malformed", path=path / NAME) from error
        gathering.add_values()
        tensors, blobs, keys = gathering.tensors, gathering.blobs, gathering.keys
        layout = Layout(path, self.name, tensors, blobs, keys, world, (NAME,))
        check_cover(layout, report)
        return layout

    def extents(self, layout: Layout, report: Report = refuse) -> Iterator[Extent]:
        """Return the bytes of every tensor; those in archives of torch.save have a CRC-32, others none."""
        located = locate(layout, report)
        for name, tensor in located.tensors.items():
            for chunk in tensor.chunks:
                if chunk.where is None:
                    yield Extent(chunk.path, chunk.offset, chunk.length, chunk.crc32, name)


@dataclass(frozen=True)
class _Gathering:
    """The entries of a snapshot as they are gathered from those of all ranks."""

    root: Path
    places: Places
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    blobs: dict[str, Blob] = field(default_factory=dict)
    keys: dict[str, KeyPath] = field(default_factory=dict)
    values: dict[KeyPath, Any] = field(default_factory=dict)

    def add(self, key: KeyPath, entries: list[ManifestEntry]) -> None:
        """Add what lies at one key path: once, or by rank if ranks have different things there."""
        if all(entry.kind == "ShardedTensor" for entry in entries):
            self.add_tensor(key, None, [chunk for entry in entries for chunk in self.places.chunks(entry)[1]])
        elif entries[0].said.get("replicated") or len(entries) == 1 or self.are_same(entries):
            self.add_common(key, entries)
        else:
            for entry in entries:
                self.add_entry((OWN, f"rank_{entry.rank}", *key), entry)

    def add_common(self, key: KeyPath, entries: list[ManifestEntry]) -> None:
        """Add what all ranks have alike, as one has it whose file is there. Reports what could not be compared."""
        there = [entry for entry in entries if self.is_there(entry)] or entries
        self.add_entry(key, there[0])
        for entry in (entry for entry in entries if entry not in there):
            own = ".".join(map(str, (OWN, f"rank_{entry.rank}", *key)))
            path = self.root / self.places.chunks(entry)[1][0].path
            message = "other ranks may have had another value"
            self.places.report(Incomplete(message, path=path, tensor=own, ranks=[entry.rank]))

    def add_entry(self, key: KeyPath, entry: ManifestEntry) -> None:
        """Add what one rank has."""
        if entry.kind in _TENSORS:
            self.add_tensor(key, *self.places.chunks(entry))
            return
        if entry.kind == "object":
            file, run = self.places.run(entry.said)
            self.blobs[self.name(key)] = Blob(file, *run) if run else Blob(file, 0, 1, where=Unreadable())
        else:
            self.values[key] = value_of(entry)

    def add_values(self) -> None:
        for key, value in join_lists(self.values, list(self.keys.values())).items():
            self.blobs[self.name(key)] = Blob(NAME, 0, 0, dump(value))

    def add_tensor(self, key: KeyPath, spec: Spec | None, chunks: list[Chunk]) -> None:
        """Add a tensor. Of shards the shape is in no file: it is as large as they reach."""
        name = self.name(key)
        unique: dict[Box, Chunk] = {}
        for chunk in chunks:
            unique.setdefault(chunk.box, chunk)
        if spec is None:
            if not chunks or len({(chunk.dtype, len(chunk.size)) for chunk in chunks}) > 1:
                raise Corrupt("the shards have different dtypes or numbers of axes", path=self.root, tensor=name)
            ends = zip(*(box.stop for box in unique), strict=True)
            spec = Spec(chunks[0].dtype, tuple(max(along) for along in ends))
        self.tensors[name] = StoredTensor(spec, tuple(unique.values()))

    def name(self, key: KeyPath) -> str:
        """Return the name at a key path, and keep the path."""
        name = ".".join(map(str, key))
        if name in self.keys:
            raise Corrupt("two entries of the manifest have the same name", path=self.root, tensor=name)
        self.keys[name] = key
        return name

    def are_same(self, entries: list[ManifestEntry]) -> bool:
        """Return whether all ranks have the same value or, of small tensors, the same bytes where files are there."""
        if any(entry.kind != entries[0].kind for entry in entries) or entries[0].kind == "object":
            return False
        if entries[0].kind not in _TENSORS:
            return all(value_of(entry) == value_of(entries[0]) for entry in entries)
        found = [self.places.chunks(entry) for entry in entries]
        spec = found[0][0]
        small = spec is not None and spec.nbytes <= _COMPARED
        if not small or any(other != spec or len(those) != 1 for other, those in found):
            return False
        there = [chunk for _, (chunk,) in found if chunk.is_in_file]
        return not any(chunk.wrapper == ENVELOPE for chunk in there) and len(set(map(self.content, there))) < 2

    def is_there(self, entry: ManifestEntry) -> bool:
        """Return whether no part of an entry is in a file that cannot be read."""
        return entry.kind not in _TENSORS or all(chunk.is_in_file for chunk in self.places.chunks(entry)[1])

    def content(self, chunk: Chunk) -> bytes:
        """Return the bytes of a small chunk."""
        with opening(self.root / chunk.path) as file:
            return read_at(file, chunk.length, chunk.offset)

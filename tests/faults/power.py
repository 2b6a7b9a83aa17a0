"""Power: what a disk may hold after the power went, by the journal of a writing. Runs nothing, judges nothing.

The model is the weakest that POSIX allows. What a file holds is on the disk since its last fsync, a change of names
since the fsync of the directory. Of later changes of names any may be on the disk: tried are none, all, all but one,
and one alone, each with and without the later data of files (delayed allocation gives zeros). A rename is done or not.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from tests.faults.scenes import Tree

# in the order of `enum change` in shim.c
CREATED, WROTE, RESIZED, SYNCED, RENAMED, EXCHANGED, LINKED, UNLINKED = range(8)
_HEAD = struct.Struct("<6q")

Names = dict[int, dict[str, int]]  # by directory and name, the file or directory there
Entry = tuple[int, str]  # a directory, and a name in it


@dataclass(frozen=True, slots=True)
class Change:
    """A change to the disk, or an fsync; `offset` is a new size where it resizes. `node` is the inode then."""

    kind: int
    node: int
    offset: int
    path: str
    other: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Naming:
    """A change of names."""

    kind: int
    entry: Entry
    other: Entry | None
    made: int

    def touches(self, directory: int) -> bool:
        """True if it changes this directory."""
        return directory in (self.entry[0], self.other and self.other[0])

    def apply(self, names: Names) -> None:
        """Do it, as far as what it needs is there."""
        here = names.setdefault(self.entry[0], {})
        if self.kind in (CREATED, LINKED):
            here[self.entry[1]] = self.made
        elif self.kind == UNLINKED:
            here.pop(self.entry[1], None)
        else:
            assert self.other is not None
            there = names.setdefault(self.other[0], {})
            mine, theirs = here.get(self.entry[1]), there.get(self.other[1])
            if mine is None or (self.kind == EXCHANGED and theirs is None):
                return
            del here[self.entry[1]]
            there[self.other[1]] = mine
            if self.kind == EXCHANGED and theirs is not None:
                here[self.entry[1]] = theirs


def read_journal(path: Path) -> Iterator[Change]:
    """The changes that the shim has written down."""
    raw, at = path.read_bytes(), 0
    while at < len(raw):
        kind, node, offset, *sizes = _HEAD.unpack_from(raw, at)
        at += _HEAD.size
        parts = []
        for size in sizes:
            parts.append(raw[at : at + size])
            at += size
        yield Change(kind, node, offset, parts[0].decode(), parts[1].decode(), parts[2])


class Disk:
    """What is below directory `root`, for programs and on the disk, where all is that is there now."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._new = count(1)  # inodes are given anew, these are not
        self._ids: dict[int, int] = {}
        self._names: Names = {}
        self._files: dict[int, bytes] = {}
        self._top = self._load(root)
        self._sure_names = copied(self._names)
        self._sure_files = dict(self._files)
        self._waiting: list[Naming] = []

    def _load(self, path: Path) -> int:
        made = self._ids[path.stat().st_ino] = next(self._new)
        if path.is_dir():
            self._names[made] = {inside.name: self._load(inside) for inside in path.iterdir()}
        else:
            self._files[made] = path.read_bytes()
        return made

    def apply(self, change: Change) -> None:
        """Do what was done then."""
        if change.kind in (WROTE, RESIZED):
            content = self._files[self._ids[change.node]]
            if change.kind == RESIZED:
                content = content[: change.offset].ljust(change.offset, b"\0")
            else:
                content = content.ljust(change.offset, b"\0")
                content = content[: change.offset] + change.data + content[change.offset + len(change.data) :]
            self._files[self._ids[change.node]] = content
        elif change.kind == SYNCED:
            self._sync(self._ids[change.node])
        else:
            self._rename(change)

    def _sync(self, node: int) -> None:
        if node in self._files:
            self._sure_files[node] = self._files[node]
        for naming in self._waiting:
            if naming.touches(node):
                naming.apply(self._sure_names)
        self._waiting = [naming for naming in self._waiting if not naming.touches(node)]

    def _rename(self, change: Change) -> None:
        made = 0
        if change.kind == CREATED:
            made = self._ids[change.node] = next(self._new)
            if change.offset:
                self._names[made] = {}
            else:
                self._files[made] = b""
        elif change.kind == LINKED:
            made = self._ids[change.node]
        named = change.other if change.kind == LINKED else change.path
        other = self._entry(change.other) if change.kind in (RENAMED, EXCHANGED) else None
        naming = Naming(change.kind, self._entry(named), other, made)
        naming.apply(self._names)
        self._waiting.append(naming)

    def _entry(self, path: str) -> Entry:
        *above, name = Path(path).relative_to(self._root).parts
        node = self._top
        for part in above:
            node = self._names[node][part]
        return node, name

    def left(self) -> Iterator[Tree]:
        """What may be on the disk when the power goes now."""
        waiting = self._waiting
        choices = [[], waiting, *([n for n in waiting if n is not one] for one in waiting), *([one] for one in waiting)]
        zeros = {node: self._sure_files.get(node, bytes(len(data))) for node, data in self._files.items()}
        for choice in choices:
            names = copied(self._sure_names)
            for naming in choice:
                naming.apply(names)
            for files in (self._files, zeros):
                yield dict(self._tree(self._top, "", names, files))

    def _tree(self, node: int, path: str, names: Names, files: dict[int, bytes]) -> Iterable[tuple[str, bytes]]:
        for name, inside in names.get(node, {}).items():
            if inside in files:
                yield f"{path}{name}", files[inside]
            else:
                yield f"{path}{name}/", b""
                yield from self._tree(inside, f"{path}{name}/", names, files)


def copied(names: Names) -> Names:
    """The names, to be changed."""
    return {node: dict(inside) for node, inside in names.items()}

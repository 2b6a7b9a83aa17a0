"""torch.save files: one archive with a nested dict of tensors, as FULL_STATE_DICT and plain scripts write it.

Source: torch/serialization.py. The pickle `data.pkl` nests dicts and lists down to tensors, each a view of a storage
that lies uncompressed in the same file. It is read inertly: what it would import or call is never more than a name,
so any name may occur in it. Reads no tensor data.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ckptkit.box import whole
from ckptkit.errors import CkptError, Corrupt, Unsupported
from ckptkit.files import open_regular, read_at
from ckptkit.formats import pickles
from ckptkit.formats.archive import (
    Entry,
    ReadAt,
    as_tensor,
    check_byte_order,
    glance,
    is_tensor,
    place_tensor,
    read_directory,
    read_entry,
)
from ckptkit.formats.pickles import SCALARS, Global, PersistentId, Record
from ckptkit.layout import Blob, Chunk, KeyPath, Layout, Spec, StoredTensor

MAIN = "state.pt"
_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
# what trainers leave beside the model, and is none
_BESIDE = re.compile(r"(optim|(lr_)?scheduler|scaler|sampler|rng_state|random_states|training_args|dl_state_dict)")
_ZIP = b"PK\x03\x04"
_LEGACY = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"  # torch before 1.6: a pickled magic number
_HEAD = 512  # bytes, enough for the first entry's name
_PICKLE_LIMIT = 1 << 28  # bytes; those of the largest models have a few million
_DEEPEST = 64  # steps of a key path
_EXPANSION = 32  # how much more the entries with their names may be than the pickle that they come from
_MAPPINGS = (Global("collections", "OrderedDict"), Global("collections", "defaultdict"))


class Pt:
    """Reads a file of torch.save, or the directory that holds one.

    That is `state.pt`, or else the only one that is no optimizer, scheduler, sampler or random state by its name.
    """

    name = "pt"

    def detect(self, path: Path) -> bool:
        """True for a torch.save file of any name, or a directory with one under a usual name."""
        return bool(find_files(path))

    def is_complete(self, path: Path) -> bool:
        """True if the archive's directory is there, which torch writes last, and all that it lists."""
        return all(map(is_whole, find_files(path)))

    def read(self, path: Path) -> Layout:
        """The layout of the file at or in `path`. What is no tensor becomes a blob of no bytes: it lies in the pickle.

        Every tensor that the state dict leads to is in the layout, or the file is refused.
        """
        file = choose_file(path)
        try:
            with opened(file) as (read, length):
                entries = read_directory(read, length)
                check_byte_order(read, entries)
                return _Reading(file, entries, read_entry(read, entries, "data.pkl", limit=_PICKLE_LIMIT)).layout()
        except CkptError as error:
            raise error.blame(path=file) from None

    def locate(self, layout: Layout) -> Layout:
        """The layout itself: reading it has found every byte."""
        return layout


def find_files(path: Path) -> list[Path]:
    """`path` if it is a torch.save file; of a directory its `state.pt`, or else the files that may be the model."""
    if not path.is_dir():
        return [path] if is_torch_save(path) else []
    if is_torch_save(path / MAIN):
        return [path / MAIN]
    names = sorted(name for name in os.listdir(path) if name.endswith(_SUFFIXES) and not _BESIDE.match(name))
    return [path / name for name in names if is_torch_save(path / name)]


def is_torch_save(path: Path) -> bool:
    """True if `path` is a file that begins as torch.save begins one, in the old format or as an archive."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(_HEAD)
    return head.startswith(_LEGACY) or (head.startswith(_ZIP) and first_name(head).endswith("/data.pkl"))


def first_name(head: bytes) -> str:
    """The name of a zip's first entry."""
    return head[30 : 30 + int.from_bytes(head[26:28], "little")].decode("utf-8", "replace")


def choose_file(path: Path) -> Path:
    """The one file that is meant by `path`. Raises `Unsupported` if there are several."""
    files = find_files(path)
    if len(files) == 1:
        return files[0]
    names = ", ".join(file.name for file in files[:8])
    raise Unsupported(
        f"{len(files)} torch.save files and no `{MAIN}`: {names}", path=path, hint="name the one that is meant"
    )


def is_whole(path: Path) -> bool:
    """True if the file's end is there and everything that it lists."""
    try:
        with opened(path) as (read, length):
            read_directory(read, length)
    except Corrupt:
        return False
    return True


@contextmanager
def opened(path: Path) -> Iterator[tuple[ReadAt, int]]:
    """A file of torch.save to read from, and its size. Raises `Unsupported` for the format before archives."""
    fd = open_regular(path)
    try:
        length = os.fstat(fd).st_size
        read = glance(lambda offset, size: read_at(fd, size, offset, path), length)
        if read(0, min(length, len(_LEGACY))) == _LEGACY:
            hint = "load it with torch and save it again: torch 1.6 and later write archives"
            raise Unsupported("torch.save's format of before version 1.6", path=path, hint=hint)
        yield read, length
    finally:
        os.close(fd)


class _AnyName:
    """The names that may occur in the pickle of a user's own state: all, since none is ever imported."""

    def __contains__(self, name: object) -> bool:
        return True


class _Reading:
    """Gathers the layout from one pickle, at a cost bounded by its size: by sharing, few bytes can say much."""

    def __init__(self, file: Path, entries: Mapping[str, Entry], pickle: bytes) -> None:
        self.file = file
        self.entries = entries
        self.pickle = pickle
        self.budget = _EXPANSION * len(pickle)
        self.tensors: dict[str, StoredTensor] = {}
        self.blobs: dict[str, Blob] = {}
        self.keys: dict[str, KeyPath] = {}

    def layout(self) -> Layout:
        if "constants.pkl" in self.entries:
            raise Unsupported("a TorchScript program, not a state dict", hint="save its `state_dict()`")
        state, _ = pickles.load(self.pickle, _AnyName())
        if children_of(state) is None:
            raise Unsupported(f"the file holds {describe(state)}, not a state dict", hint="save its `state_dict()`")
        self.add(state, ())
        return Layout(self.file.parent, Pt.name, self.tensors, self.blobs, self.keys)

    def add(self, value: Any, key: KeyPath) -> None:
        """Add what `value` holds, under names that begin with `key`."""
        self.spend(1)
        if len(key) > _DEEPEST:
            raise Unsupported(f"the state dict is nested more than {_DEEPEST} deep")
        children = children_of(value)
        if children is None:
            self.add_entry(value, key)
            return
        for step, child in children:
            self.add(child, (*key, step))

    def add_entry(self, value: Any, key: KeyPath) -> None:
        """Add a tensor, or a value that holds none."""
        name = ".".join(map(str, key))
        self.spend(len(name))
        if name in self.tensors or (name in self.blobs and is_tensor(value)):
            raise Unsupported("two entries of the state dict have this name", tensor=name)
        if is_tensor(value):
            try:
                self.tensors[name] = self.stored(value)
            except CkptError as error:
                error.hint = error.hint and "save it as a plain dense tensor"
                raise error.blame(tensor=name) from None
        elif self.holds_tensor(value):
            raise Unsupported(f"a tensor inside {describe(value)}", tensor=name, hint="save it in a dict, by a name")
        else:
            self.blobs[name] = Blob(self.file.name, self.entries["data.pkl"].offset, 0)
        self.keys[name] = key

    def stored(self, value: Any) -> StoredTensor:
        """A tensor with the one chunk that its storage is, or that is a part of it."""
        found = place_tensor(as_tensor(value), self.entries)
        dtype, shape = found.tensor.dtype, found.tensor.shape
        chunk = Chunk(whole(shape), self.file.name, found.offset, found.length, dtype, found.strides, found.crc32)
        return StoredTensor(Spec(dtype, shape), (chunk,))

    def holds_tensor(self, value: Any) -> bool:
        """True if a tensor or a bare storage is anywhere in a value that is no state dict."""
        seen: set[int] = set()
        waiting = [value]
        while waiting:
            part = waiting.pop()
            if is_tensor(part) or isinstance(part, PersistentId):
                return True
            if id(part) not in seen:
                seen.add(id(part))
                parts = parts_of(part)
                self.spend(len(parts))
                waiting.extend(parts)
        return False

    def spend(self, amount: int) -> None:
        """Raise `Unsupported` when the entries have become too many for the pickle to have been meant so."""
        self.budget -= amount
        if self.budget < 0:
            raise Unsupported(f"a pickle of {len(self.pickle)} bytes repeats itself beyond {_EXPANSION} times its size")


def children_of(value: Any) -> list[tuple[str | int, Any]] | None:
    """What a dict or list holds, by the steps that DCP would take to it; None for what is one entry, whatever it is.

    A list or tuple is entered only if anything but plain values is in it.
    """
    pairs = pairs_of(value)
    if pairs is not None and all(isinstance(pair, tuple) and isinstance(pair[0], (str, int)) for pair in pairs):
        return [(str(key), child) for key, child in pairs]
    if isinstance(value, (list, tuple)) and not all(isinstance(child, SCALARS) for child in value):
        return list(enumerate(value))
    return None


def pairs_of(value: Any) -> list[Any] | None:
    """The keys and values of a dict of any kind; None for what is no dict."""
    if isinstance(value, dict):
        return list(value.items())
    is_mapping = isinstance(value, Record) and value.of in _MAPPINGS
    if is_mapping and all(isinstance(argument, Global) for argument in value.args):  # a defaultdict's factory
        return value.items or []
    return None


def parts_of(value: Any) -> list[Any]:
    """Everything directly in a pickled value, whatever it would have been."""
    if isinstance(value, Record):
        return [value.of, value.args, value.state, value.items]
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    return list(value) if isinstance(value, (list, tuple)) else []


def describe(value: Any) -> str:
    """What kind of thing a pickled value would have been."""
    if is_tensor(value):
        return "a single tensor"
    return f"`{value.of if isinstance(value, Record) and isinstance(value.of, Global) else type(value).__name__}`"

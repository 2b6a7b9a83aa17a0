"""Read and rewrite the values that lie in the files of a checkpoint: archives of torch.save, pickles, JSON."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from zipfile import ZIP_STORED, ZipFile

from ckptkit.errors import Unsupported, errors_at
from ckptkit.formats.pickles import inert_pickle
from ckptkit.formats.pickles.inert_pickle import ANY_NAME, SCALARS, Dict, Global, PersistentId, Record
from ckptkit.formats.pickles.tensor_calls import is_pickled_tensor
from ckptkit.formats.pickles.write_pickle import dump
from ckptkit.layout import KeyPath, Layout

_PICKLED = frozenset({".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt", ".tar"})
_PICKLE = "data.pkl"
_PADDING = ".padding"  # an entry that fills an archive up to the length of the one that it replaces
_LOCAL, _CENTRAL = 30, 46  # bytes of the two headers of a zip entry, without its name


@dataclass(frozen=True, slots=True)
class Container:
    """A value in `length` bytes at `offset` of a file; `prefix` is the way to it, as seen from the checkpoint.

    It may only be replaced by one of the same length if it `is_inside` a file with others.
    """

    file: Path
    offset: int
    length: int
    kind: Literal["archive", "pickle", "json"]
    prefix: KeyPath
    is_inside: bool = False

    def read_bytes(self) -> bytes:
        with self.file.open("rb") as file:
            file.seek(self.offset)
            return file.read(self.length)

    def load_value(self) -> Any:
        """Return its value, read inertly."""
        data = self.read_bytes()
        with errors_at(path=self.file):
            if self.kind == "json":
                try:
                    return json.loads(data)
                except ValueError as error:
                    raise Unsupported(f"not JSON: {error}") from None
            if self.kind == "archive":
                with ZipFile(io.BytesIO(data)) as archive:
                    name = next((name for name in archive.namelist() if name.endswith(f"/{_PICKLE}")), None)
                    if name is None:
                        raise Unsupported(f"expected `{_PICKLE}` in the archive, found none")
                    data = archive.read(name)
            return inert_pickle.load(data, ANY_NAME)[0]

    def write_value(self, value: Any) -> None:
        """Write another value in its place. Raises `Unsupported` if that cannot be pickled here, or is longer."""
        if self.kind == "json":
            data = json.dumps(value, indent=2).encode()
        elif self.kind == "pickle":
            data = dump(value)
        else:
            data = with_pickle(self.read_bytes(), dump(value), self.length if self.is_inside else None)
        if not self.is_inside:
            self.file.write_bytes(data)
            return
        with self.file.open("r+b") as file:
            file.seek(self.offset)
            file.write(data)


def with_pickle(archive: bytes, pickle: bytes, padded_nbytes: int | None = None) -> bytes:
    """Return an archive of torch.save with another pickle, padded to `padded_nbytes`; its checksums are right."""
    made = io.BytesIO()
    with ZipFile(io.BytesIO(archive)) as old, ZipFile(made, "w", ZIP_STORED) as new:
        for name in old.namelist():
            new.writestr(name, pickle if name.endswith(f"/{_PICKLE}") else old.read(name))
        folder = old.namelist()[0].partition("/")[0]
    if padded_nbytes is None:
        return made.getvalue()
    name = f"{folder}/{_PADDING}"
    missing = padded_nbytes - made.tell() - _LOCAL - _CENTRAL - 2 * len(name)
    if missing < 0:
        raise Unsupported(f"expected an archive of at most {padded_nbytes} bytes, found {padded_nbytes - missing}")
    with ZipFile(made, "a", ZIP_STORED) as new:
        new.writestr(name, bytes(missing))
    return made.getvalue()


def containers_in_layout(layout: Layout, prefix: KeyPath) -> Iterator[Container]:
    """Return the entries of a layout that are archives by themselves, as those of DCP."""
    for name, blob in layout.blobs.items():
        if blob.content is None and blob.where is None and blob.length:
            key = (*prefix, *layout.key(name))
            yield Container(layout.root / blob.path, blob.offset, blob.length, "archive", key, is_inside=True)


def find_container_in(file: Path, prefix: KeyPath) -> Container | None:
    """Return what lies in a small file of states, None if it is no pickle and no JSON."""
    size = file.stat().st_size
    if file.suffix == ".json":
        return Container(file, 0, size, "json", prefix)
    if file.suffix not in _PICKLED:
        return None
    with file.open("rb") as opened:
        head = opened.read(2)
    if head != b"PK" and head[:1] != b"\x80":
        return None
    return Container(file, 0, size, "archive" if head == b"PK" else "pickle", prefix)


_BYTES = Global("_codecs", "encode")  # pickles of protocol 2, as torch.save's, have bytes as a call of it
Visit = Callable[[KeyPath, Any], Any]  # (where a scalar is, its value) -> its new value


@dataclass(slots=True)
class Copying:
    """A copy of a value in the making; objects that are shared in the value are shared in the copy."""

    visit: Visit
    copies: dict[int, Any] = field(default_factory=dict)

    def copy_value(self, value: Any, path: KeyPath) -> Any:
        """Return the copy of what is at a path. Tensors stay as they are."""
        if isinstance(value, Record) and value.of == _BYTES:
            value = value.args[0].encode(value.args[1])
        if isinstance(value, SCALARS):
            return self.visit(path, value)
        if isinstance(value, PersistentId | type) or is_pickled_tensor(value):
            return value
        if id(value) not in self.copies:
            self.copies[id(value)] = self.copy_container(value, path)
        return self.copies[id(value)]

    def copy_container(self, value: Any, path: KeyPath) -> Any:
        if isinstance(value, dict):
            return Dict({key: self.copy_value(child, (*path, as_key_component(key))) for key, child in value.items()})
        if isinstance(value, list | tuple):
            return type(value)([self.copy_value(child, (*path, i)) for i, child in enumerate(value)])
        if not isinstance(value, Record):
            return value
        made = Record(value.of, self.copy_value(value.args, path), is_new=value.is_new)
        made.state = self.copy_value(value.state, path)
        if value.items is not None:
            made.items = [(key, self.copy_value(child, (*path, as_key_component(key)))) for key, child in value.items]
        if value.members is not None:
            made.members = self.copy_value(value.members, path)
        return made


def as_key_component(key: object) -> str | int:
    return key if isinstance(key, str | int) else str(key)


def map_scalars(value: Any, visit: Visit) -> Any:
    """Return a copy of a value whose scalars are what `visit` returns for them."""
    return Copying(visit).copy_value(value, ())

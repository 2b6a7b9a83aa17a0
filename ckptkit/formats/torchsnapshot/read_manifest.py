"""Read `.snapshot_metadata`: the entries of each rank, with their files and positions.

Source: torchsnapshot/{manifest,flatten}.py, 0.1.0. The manifest is JSON; versions before wrote YAML. Each entry has a
path, the rank and then the steps to it, with `/` and `%` in a step written as `%2F` and `%25`.
"""

from __future__ import annotations

import base64
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import Any
from urllib.parse import unquote

from ckptkit.errors import CkptError, Corrupt, IOFailure, Report, Unsafe, Unsupported
from ckptkit.files.file import check_name, file_size, read_small
from ckptkit.formats.archives.locate import ENVELOPE
from ckptkit.formats.json_text import parse_json
from ckptkit.formats.pickles.tensor_calls import as_shape
from ckptkit.layout import Chunk, KeyPath, NumberKey, Spec, Wrapped
from ckptkit.tensors.box import Box, Shape, whole
from ckptkit.tensors.dtypes import DTYPES, DType

NAME = ".snapshot_metadata"
_LIMIT = 1 << 28  # bytes
_float = Struct("<d")
_LISTS, _DICTS = ("list",), ("dict", "OrderedDict")


@dataclass(frozen=True, slots=True)
class ManifestEntry:
    """An entry of one rank: the way to it, and what the manifest says of it."""

    rank: int
    key: KeyPath
    said: Mapping[str, Any]

    @property
    def kind(self) -> str:
        """Return what it is."""
        return str(self.said["type"])


def read_manifest(root: Path) -> tuple[list[ManifestEntry], int]:
    """Return what is in the manifest of a snapshot at `root`, in its order, and the number of ranks."""
    path = root / NAME
    data = read_small(path, _LIMIT)
    if not data.lstrip().startswith(b"{"):
        hint = "load the snapshot with torchsnapshot 0.1 and save it again"
        raise Unsupported("the manifest is not JSON: a torchsnapshot before 0.1 wrote it", path=path, hint=hint)
    try:
        found = parse_json(data, path)
        manifest, world = found["manifest"], found["world_size"]
        if type(world) is not int or world < 1:
            raise ValueError("world_size")
        lists = {name for name, said in manifest.items() if said["type"] in _LISTS}
        numbers = {name: numbers_in(said) for name, said in manifest.items() if said["type"] in _DICTS}
        return [entry_of(name, said, lists, numbers) for name, said in manifest.items()], world
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise Corrupt("the manifest is malformed", path=path) from error


def numbers_in(said: Mapping[str, Any]) -> frozenset[str]:
    """Return, as text, the keys of a dict that are integers."""
    return frozenset(str(key) for key in said["keys"] if isinstance(key, int))


def entry_of(
    name: str, said: Mapping[str, Any], lists: Container[str], numbers: Mapping[str, Container[str]]
) -> ManifestEntry:
    """Return an entry; what lies in one of the `lists`, or at one of the `numbers` of a dict, is led to by numbers."""
    rank, *steps = name.split("/")
    key: list[str | int] = []
    above = rank
    for step in steps:
        if above in lists:
            key.append(int(step))
        else:
            text = unquote(step)
            key.append(NumberKey(text) if text in numbers.get(above, ()) else text)
        above = f"{above}/{step}"
    return ManifestEntry(int(rank), tuple(key), said)


def is_container(entry: ManifestEntry) -> bool:
    """Return whether an entry only says what others lie in."""
    return entry.kind in (*_LISTS, *_DICTS) and (entry.kind in _LISTS or bool(entry.said["keys"]))


def value_of(entry: ManifestEntry) -> Any:
    """Return the value of an entry that stands in the manifest itself. Raises `Unsupported` for an unknown kind."""
    if entry.kind in _DICTS:
        return {}
    text = entry.said.get("serialized_value")
    if not isinstance(text, str):
        raise Unsupported(f"an entry of the kind `{entry.kind!a}`")
    match entry.kind:
        case "int":
            return int(text)
        case "str":
            return text
        case "bool":
            return {"True": True, "False": False}[text]
        case "bytes":
            return base64.b64decode(text)
        case "float":
            data = base64.b64decode(text)
            if len(data) != _float.size:
                raise ValueError("float")
            return _float.unpack(data)[0]
    raise Unsupported(f"an entry of the kind `{entry.kind!a}`")


def parts_of(said: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield what the manifest says of each run of bytes of an entry."""
    if "location" in said:
        yield said
    for part in (*said.get("shards", ()), *said.get("chunks", ())):
        yield part["tensor"]


class Places:
    """The places of `entries` in the files of a snapshot at `root`.

    Reports each file that is missing, or too short for what should lie in it: it may be another snapshot's, and nothing
    has a checksum. So all of it is unreadable then.
    """

    def __init__(self, root: Path, entries: Iterable[ManifestEntry], report: Report) -> None:
        self.root = root
        self.report = report
        self.sizes: dict[str, int | None] = {}
        self.needed: dict[str, int] = {}
        for part in (part for entry in entries for part in parts_of(entry.said)):
            if part.get("byte_range"):
                _, end = as_shape(tuple(part["byte_range"]))
                self.needed[part["location"]] = max(end, self.needed.get(part["location"], 0))

    def size(self, file: str) -> int | None:
        """Return the size of a file, None of one that is of no use."""
        if file not in self.sizes:
            for part in file.split("/"):
                check_name(part, self.root)
            try:
                self.sizes[file] = self.sound_size(file)
            except (Corrupt, IOFailure) as error:
                self.sizes[file] = None
                self.report(error)
        return self.sizes[file]

    def sound_size(self, file: str) -> int:
        """Return the size of a file. Raises `Corrupt` for one that is missing or too short."""
        size = file_size(self.root / file)
        if size < self.needed.get(file, 0):
            message = f"expected at least {self.needed[file]} bytes (manifest), found {size}"
            hint = "copy it again: it is truncated, or belongs to another snapshot"
            raise Corrupt(message, path=self.root / file, hint=hint)
        return size

    def run(self, said: Mapping[str, Any]) -> tuple[str, tuple[int, int] | None]:
        """Return the file, offset and length of a run of bytes; only the file if that cannot be read."""
        file = said["location"]
        if not isinstance(file, str):
            raise Unsafe(f"the manifest refers to `{file!a}`", path=self.root)
        size = self.size(file)
        if size is None:
            return file, None
        start, end = as_shape(tuple(said["byte_range"])) if said.get("byte_range") else (0, size)
        if start > end:
            raise Corrupt(f"the manifest gives an impossible range of bytes, {start}:{end}", path=self.root / file)
        return file, (start, end - start)

    def chunk(self, said: Mapping[str, Any], start: Shape | None = None) -> Chunk:
        """Return the chunk that a tensor is, which begins at index `start` of a larger one."""
        spec = Spec(dtype_of(said["dtype"]), as_shape(tuple(said["shape"])))
        box = whole(spec.shape) if start is None else Box(start, spec.shape)
        file, run = self.run(said)
        serializer = said["serializer"]
        if serializer not in ("torch_save", "buffer_protocol"):
            raise Unsupported(f"a tensor in the format `{serializer!a}`")
        if run is None:
            return Chunk.unreadable(box, file, spec.dtype)
        offset, length = run
        if serializer == "torch_save":
            return Chunk(box, file, offset, length, spec.dtype, where=Wrapped(ENVELOPE))
        if length != spec.nbytes:
            message = f"expected {spec.nbytes} bytes for {spec}, found {length} in the manifest"
            self.report(Corrupt(message, path=self.root / file))
            return Chunk.unreadable(box, file, spec.dtype)
        return Chunk(box, file, offset, length, spec.dtype)

    def chunks(self, entry: ManifestEntry) -> tuple[Spec | None, list[Chunk]]:
        """Return the chunks of a tensor that one rank saved, and its dtype and shape; None where only all tell it."""
        said = entry.said
        try:
            if entry.kind == "Tensor":
                chunk = self.chunk(said)
                return Spec(chunk.dtype, chunk.size), [chunk]
            sharded = entry.kind == "ShardedTensor"
            shards = [(as_shape(tuple(s["offsets"])), s) for s in said["shards" if sharded else "chunks"]]
            chunks = [self.chunk(shard["tensor"], start) for start, shard in shards]
            if any(chunk.size != as_shape(tuple(s["sizes"])) for chunk, (_, s) in zip(chunks, shards, strict=True)):
                raise Corrupt("a shard's tensor has another shape than the shard")
            return None if sharded else Spec(dtype_of(said["dtype"]), as_shape(tuple(said["shape"]))), chunks
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise Corrupt("the manifest is malformed", path=self.root / NAME) from error
        except CkptError as error:
            raise error.blame(tensor=".".join(map(str, entry.key))) from None


def dtype_of(name: str) -> DType:
    """Return the dtype that torch calls so."""
    dtype = DTYPES.get(name.removeprefix("torch."))
    if dtype is None:
        raise Unsupported(f"dtype `{name!a}`")
    return dtype

"""DCP directories: `.metadata` and `.distcp` files, as torch.distributed.checkpoint writes them.

Source: torch/distributed/checkpoint/{filesystem,metadata,default_planner}.py. `.metadata` is a pickle that says which
chunk of which tensor lies in which range of which file; each range is one archive of torch.save. Geometry comes from
the metadata alone: file names say who wrote, never what.
"""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckptkit.box import Box, Shape
from ckptkit.dtypes import DTYPES, DType
from ckptkit.errors import CkptError, Corrupt, Unsupported
from ckptkit.files import Opened, check_name, file_size, read_at, read_small, recognise
from ckptkit.formats import pickles
from ckptkit.formats.archive import as_shape, locate_tensor
from ckptkit.formats.pickles import Global, Record
from ckptkit.layout import Blob, Chunk, KeyPath, Layout, Spec, StoredTensor, check_cover

METADATA = ".metadata"
_RANK_METADATA = re.compile(r"__(\d+)\.metadata")
_DATA = re.compile(r"(?:.*?)__(\d+)_\d+\.distcp")
_METADATA_LIMIT = 1 << 34
_ENVELOPE = "torch.save"

_THERE = "torch.distributed.checkpoint"
_NAMES = frozenset(
    [
        *(
            (f"{package}.metadata", name)
            for package in (_THERE, "torch.distributed._shard.checkpoint")
            for name in (
                "Metadata",
                "MetadataIndex",
                "TensorStorageMetadata",
                "TensorProperties",
                "ChunkStorageMetadata",
                "BytesStorageMetadata",
                "StorageMeta",
                "_MEM_FORMAT_ENCODING",
            )
        ),
        (f"{_THERE}.filesystem", "_StorageInfo"),
        ("torch.distributed._shard.checkpoint.filesystem", "_StorageInfo"),
        ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"),
        ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"),
        # Megatron-LM leaves its save plans in the metadata
        *(
            (f"{_THERE}.planner", name)
            for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")
        ),
        (f"{_THERE}.filesystem", "_StoragePrefix"),
        ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"),
        ("megatron.core.dist_checkpointing.strategies.torch", "MCoreSavePlan"),
        *(("torch", name) for name in (*DTYPES, "Size", "strided")),
        ("torch.serialization", "_get_layout"),
        *(
            (module, name)
            for module in ("pathlib", "pathlib._local")
            for name in ("PosixPath", "PurePosixPath", "WindowsPath")
        ),
        ("collections", "OrderedDict"),
        ("builtins", "getattr"),  # Python 3.11.2 pickles enum members by it; here it is a name like any other
        ("__builtin__", "getattr"),
    ]
)


class Dcp:
    """Reads DCP directories, with one `.metadata` or with one `__{rank}.metadata` per rank."""

    name = "dcp"

    def detect(self, path: Path) -> bool:
        """True for a directory in which DCP has written, or has begun to."""
        if not path.is_dir():
            return False
        names = os.listdir(path)
        return METADATA in names or any(_RANK_METADATA.fullmatch(name) or _DATA.fullmatch(name) for name in names)

    def is_complete(self, path: Path) -> bool:
        """True if the metadata is there, which DCP writes last."""
        return bool(metadata_files(path))

    def read(self, path: Path) -> Layout:
        """The layout of the checkpoint in directory `path`; chunks still in their envelopes."""
        with collector_paused():
            reading = _Reading(path)
            for file in metadata_files(path):
                reading.add(read_metadata(file), file)
            if not reading.files_seen:
                raise Corrupt(
                    "no `.metadata`: the save did not finish",
                    path=path,
                    hint="every rank writes its shard first and `.metadata` comes last; use an older checkpoint",
                )
            layout = reading.layout()
            check_files(layout)
            check_cover(layout)
            return layout

    def locate(self, layout: Layout) -> Layout:
        """The layout with every chunk's bytes found inside its envelope, and compared with what is expected there."""
        with Opened(layout.root) as files:
            tensors = {name: locate_chunks(layout, name, files) for name in layout.tensors}
        return replace(layout, tensors=tensors)


def metadata_files(path: Path) -> list[Path]:
    """The files that describe the checkpoint: `.metadata`, or else every rank's own, in order of rank."""
    if (path / METADATA).exists():
        return [path / METADATA]
    ranks = {int(match[1]): path / name for name in os.listdir(path) if (match := _RANK_METADATA.fullmatch(name))}
    return [ranks[rank] for rank in sorted(ranks)]


def read_metadata(path: Path) -> Record:
    """The pickled `Metadata` object in file `path`, as a record."""
    data = read_small(path, _METADATA_LIMIT)
    try:
        value, _ = pickles.load(data, _NAMES)
    except CkptError as error:
        error.hint = error.hint or recognise(data[:512])
        raise error.blame(path=path) from None
    if not isinstance(value, Record) or not has_fields(value):
        raise Corrupt("the pickle holds no DCP metadata", path=path, hint=recognise(data[:512]))
    return value


def has_fields(metadata: Record) -> bool:
    """True if the record has the fields that torch has always written."""
    has_planner_data = isinstance(metadata.state, dict) and "planner_data" in metadata.state
    return has_planner_data and isinstance(metadata.get("state_dict_metadata"), dict)


Places = Mapping[tuple[str, Shape | None], Mapping[str, Any]]


class _Reading:
    """Gathers one layout from one or more `Metadata` records."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files_seen = 0
        self.specs: dict[str, Spec] = {}
        self.chunks: dict[str, dict[tuple[Shape, Shape], Chunk]] = {}
        self.blobs: dict[str, Blob] = {}
        self.keys: dict[str, KeyPath] = {}

    def add(self, metadata: Record, file: Path) -> None:
        self.files_seen += 1
        places = self.places(metadata, file)
        for name, entry in metadata.get("state_dict_metadata").items():
            if type(name) is not str:
                raise Corrupt(f"a key of the state dict is no string but {type(name).__name__}", path=file)
            try:
                self.add_entry(name, entry, places)
            except CkptError as error:
                raise error.blame(path=file, tensor=name) from None
            except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
                raise Corrupt("the metadata of this entry makes no sense", path=file, tensor=name) from error
        self.keys.update(key_paths(metadata, file))

    def places(self, metadata: Record, file: Path) -> Places:
        """Where each entry lies: `storage_data`, keyed by name and chunk offset (None for byte entries)."""
        try:
            return {
                (as_name(index.state["fqn"]), as_offset(index.state.get("offset"))): info.state
                for index, info in metadata.get("storage_data").items()
            }
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise Corrupt("`storage_data` makes no sense", path=file) from error

    def add_entry(self, name: str, entry: Record, places: Places) -> None:
        kind = entry.of.name if isinstance(entry.of, Global) else ""
        if kind == "BytesStorageMetadata":
            path, offset, length, wrapper = self.place(places.get((name, None)))
            transform = None if wrapper == _ENVELOPE else wrapper
            self.blobs.setdefault(name, Blob(path, offset, length, wrapper=transform))
            return
        if kind != "TensorStorageMetadata":
            raise Unsupported(f"an entry of kind `{kind}`")
        spec = Spec(as_dtype(entry.get("properties")), as_shape(entry.get("size")))
        known = self.specs.setdefault(name, spec)
        if known != spec:
            raise Corrupt(f"the ranks disagree: one has {known}, another {spec}")
        chunks = self.chunks.setdefault(name, {})
        for part in entry.get("chunks"):
            box = Box(as_shape(part.state["offsets"]), as_shape(part.state["sizes"]))
            path, offset, length, wrapper = self.place(places.get((name, box.start)))
            chunk = Chunk(box, path, offset, length, spec.dtype, wrapper=wrapper)
            chunks.setdefault((box.start, box.size), chunk)  # a replica: one copy is enough

    def place(self, info: Mapping[str, Any] | None) -> tuple[str, int, int, str]:
        """File name, offset, length and kind of envelope of one item."""
        if info is None:
            raise Corrupt("the metadata does not say where this entry lies")
        path, offset, length = as_name(info["relative_path"]), info["offset"], info["length"]
        if type(offset) is not int or type(length) is not int or offset < 0 or length < 0:
            raise Corrupt("the metadata gives an impossible offset or length")
        check_name(path, self.root)
        transforms = info.get("transform_descriptors")
        return path, offset, length, "+".join(map(as_name, transforms)) if transforms else _ENVELOPE

    def layout(self) -> Layout:
        tensors = {name: StoredTensor(spec, tuple(self.chunks[name].values())) for name, spec in self.specs.items()}
        return Layout(self.root, Dcp.name, tensors, self.blobs, self.keys, count_ranks(self.root))


def as_name(value: Any) -> str:
    """A string, or `TypeError`: what a pickle holds instead may cost the world to hash or to print."""
    if type(value) is not str:
        raise TypeError("name")
    return value


def as_offset(value: Any) -> Shape | None:
    """A chunk's offset; byte entries have none."""
    return None if value is None else as_shape(value)


def as_dtype(properties: Record) -> DType:
    """The dtype in a `TensorProperties`, whose state is `(dtype, layout, requires_grad, memory format, pinned)`."""
    named = properties.state[0] if isinstance(properties.state, tuple) else properties.get("dtype")
    dtype = DTYPES.get(named.name)
    if dtype is None:
        raise Unsupported(f"dtype `{named.name}`")
    return dtype


def key_paths(metadata: Record, file: Path) -> dict[str, KeyPath]:
    """`planner_data`: for each flattened name its way through the nested dict. Absent if nothing was flattened.

    The names are these ways joined by dots, so each is there twice, and a damaged one shows.
    """
    recorded = metadata.get("planner_data")
    if not isinstance(recorded, dict) or not recorded:
        return {}
    for name, steps in recorded.items():
        is_path = isinstance(steps, tuple) and steps and all(type(step) in (str, int) for step in steps)
        if type(name) is not str or not is_path:
            raise Corrupt("`planner_data` has a key path that is no tuple of names and positions", path=file)
        if ".".join(map(str, steps)) != name:
            raise Corrupt(f"the recorded key path is {list(steps)}, which is another name", path=file, tensor=name)
    names = metadata.get("state_dict_metadata")
    if recorded.keys() != names.keys():
        name = next(iter(recorded.keys() ^ names.keys()))
        raise Corrupt("`planner_data` and `state_dict_metadata` do not name the same entries", path=file, tensor=name)
    return recorded


def count_ranks(path: Path) -> int | None:
    """How many ranks have files in the directory."""
    ranks = {match[1] for name in os.listdir(path) if (match := _DATA.fullmatch(name))}
    return len(ranks) or None


def check_files(layout: Layout) -> None:
    """Raise `Corrupt` unless every file that the metadata names is there and long enough for what should lie in it."""
    needed: dict[str, int] = {}
    for _, place in places_of(layout):
        needed[place.path] = max(needed.get(place.path, 0), place.offset + place.length)
    missing = [name for name in sorted(needed) if not os.path.lexists(layout.root / name)]
    if missing:
        raise Corrupt(
            f"{len(missing)} of {len(needed)} files are missing: {', '.join(missing)}",
            path=layout.root,
            hint="shards of other nodes were never copied here, or were lost",
        )
    for name, end in needed.items():
        size = file_size(layout.root / name)
        if size < end:
            tensor = next(
                tensor
                for tensor, place in places_of(layout)
                if place.path == name and place.offset + place.length > size
            )
            raise Corrupt(
                f"the file has {size} bytes, but the metadata needs {end}",
                path=layout.root / name,
                tensor=tensor,
                hint="the file is truncated, or belongs to another checkpoint",
            )


def places_of(layout: Layout) -> Iterator[tuple[str, Chunk | Blob]]:
    """Every chunk and blob with the name that it belongs to."""
    for name, tensor in layout.tensors.items():
        for chunk in tensor.chunks:
            yield name, chunk
    yield from layout.blobs.items()


def locate_chunks(layout: Layout, name: str, files: Opened) -> StoredTensor:
    """A tensor with each of its chunks found inside its envelope. Empty chunks have no bytes to find."""
    tensor = layout.tensors[name]
    chunks = tuple(
        chunk if chunk.box.numel == 0 else locate_chunk(layout, name, chunk, files) for chunk in tensor.chunks
    )
    return replace(tensor, chunks=chunks)


def locate_chunk(layout: Layout, name: str, chunk: Chunk, files: Opened) -> Chunk:
    """The chunk with its bytes' own offset, length, order and CRC."""
    path = layout.root / chunk.path
    fd = files.fd(chunk.path)

    def read(offset: int, length: int) -> bytes:
        if offset < 0 or length < 0 or offset + length > chunk.length:
            raise Corrupt(f"bytes {offset}:{offset + length} lie outside the item's {chunk.length}")
        return read_at(fd, length, chunk.offset + offset, path)

    try:
        if chunk.wrapper != _ENVELOPE:
            hint = "save it again without `_extensions`" if chunk.wrapper else None
            raise Unsupported(f"stored through the transform `{chunk.wrapper}`", hint=hint)
        found = locate_tensor(read, chunk.length)
        if (found.tensor.dtype, found.tensor.shape) != (chunk.dtype, chunk.box.size):
            stored = Spec(found.tensor.dtype, found.tensor.shape)
            promised = Spec(chunk.dtype, chunk.box.size)
            raise Corrupt(f"the metadata promises {promised} at byte {chunk.offset}, the file holds {stored}")
    except CkptError as error:
        raise error.blame(path=path, tensor=name) from None
    return replace(
        chunk,
        offset=chunk.offset + found.offset,
        length=found.length,
        strides=found.strides,
        crc32=found.crc32,
        wrapper=None,
    )


@contextmanager
def collector_paused() -> Iterator[None]:
    """No garbage collection inside the block: of millions of objects made none is garbage, and it would walk them."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()

"""Write the `.metadata` with the position of each item.

Source: torch/distributed/checkpoint/metadata.py. The pickle has only fields that torch has read since 2.0. A checkpoint
may have a million chunks, so recurring values are pickled once and then fetched from the memo, and bytes are written
directly, without an object per chunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from ckptkit.formats.dcp.shards import ShardItem
from ckptkit.formats.pickles.inert_pickle import Global, Record
from ckptkit.formats.pickles.write_pickle import Pickler
from ckptkit.layout import Blob, Layout
from ckptkit.layout.box import Shape
from ckptkit.layout.dtypes import DType

_MODULE = "torch.distributed.checkpoint.metadata"
_CLASSES = {
    name: Global(_MODULE, name)
    for name in (
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "TensorProperties",
        "ChunkStorageMetadata",
        "BytesStorageMetadata",
    )
} | {"_StorageInfo": Global("torch.distributed.checkpoint.filesystem", "_StorageInfo")}
_FIELDS = {
    "Metadata": ("state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"),
    "MetadataIndex": ("fqn", "index", "offset"),
    "TensorStorageMetadata": ("properties", "size", "chunks"),
    "ChunkStorageMetadata": ("offsets", "sizes"),
    "_StorageInfo": ("relative_path", "offset", "length"),
}
_SIZE = Global("torch", "Size")
_STRIDED = Record(Global("torch.serialization", "_get_layout"), ("torch.strided",))
_CONTIGUOUS = Record(Global(_MODULE, "_MEM_FORMAT_ENCODING"), (0,))
_VERSION = "1.0.0"

Placed = tuple[str, ShardItem]  # the name of a file, and an item in it


def pickled_metadata(wanted: Layout, files: Mapping[str, list[ShardItem]]) -> bytes:
    """Return the pickled `Metadata` of a checkpoint whose files, by name, have these items."""
    placed: dict[str, list[Placed]] = {name: [] for name in (*wanted.tensors, *wanted.blobs)}
    for file, items in files.items():
        for item in items:
            placed[item.name].append((file, item))
    return _MetadataPickle(wanted, files).write_metadata(placed)


def dump_metadata(wanted: Layout, files: Mapping[str, list[ShardItem]], blobs: Mapping[str, Blob]) -> bytes:
    """Return the metadata of a checkpoint with these items in `files`, and non-tensor entries in further files."""
    placed = {name: list(items) for name, items in files.items()}
    for name, blob in blobs.items():
        placed.setdefault(blob.path, []).append(ShardItem(name, None, blob.offset, blob.length, None))
    return pickled_metadata(replace(wanted, blobs=blobs), placed)


class _MetadataPickle:
    """A pickle in progress: first the strings and globals that it needs, then the object, which recalls them."""

    def __init__(self, wanted: Layout, files: Iterable[str]) -> None:
        self.wanted = wanted
        self.pickler = Pickler(by_identity=False)
        keys = {step: None for name in (*wanted.tensors, *wanted.blobs) for step in (name, *wanted.key(name))}
        fields = {field: None for fields in _FIELDS.values() for field in fields}
        texts = (text for text in (_VERSION, *fields, *keys, *files) if isinstance(text, str))
        self.text = {text: self.pickler.memoize_strings_of(text) for text in texts}
        self.new = {name: self.pickler.memoize_strings_of(of) + b")\x81" for name, of in _CLASSES.items()}
        self.pickler.memoize_strings_of(_SIZE)
        self.properties: dict[DType, bytes] = {}  # the `TensorProperties` of plain tensors; their state is a tuple
        for dtype in {tensor.spec.dtype: None for tensor in wanted.tensors.values()}:
            state = (Global("torch", dtype.name), _STRIDED, False, _CONTIGUOUS, False)
            for value in (state[0], _STRIDED, _CONTIGUOUS):
                self.pickler.memoize_strings_of(value)
            self.properties[dtype] = self.new["TensorProperties"] + self.pickler.opcodes_of(state) + b"b"
        self.sizes: dict[Shape, bytes] = {}

    def pickle_size(self, shape: Shape) -> bytes:
        """Return a `torch.Size`, pickled once per shape since the same few recur."""
        if shape not in self.sizes:
            self.sizes[shape] = self.pickler.opcodes_of(Record(_SIZE, (shape,)))
        return self.sizes[shape]

    def write_metadata(self, placed_items: dict[str, list[Placed]]) -> bytes:
        keys = {name: self.wanted.key(name) for name in placed_items}
        parts: tuple[Iterable[bytes], ...] = (
            pickle_dict(self.pickle_entries(placed_items)),
            [self.pickler.opcodes_of(keys)],
            pickle_dict(self.pickle_locations(placed_items)),
            [b"N"],
            [self.text[_VERSION]],
        )
        out = self.pickler.out
        out += self.new["Metadata"] + b"}("
        for field, pieces in zip(_FIELDS["Metadata"], parts, strict=True):
            out += self.text[field]
            for piece in pieces:
                out += piece
        out += b"ub."
        return bytes(out)

    def pickle_entries(self, placed_items: dict[str, list[Placed]]) -> Iterator[bytes]:
        """Yield each name and its metadata: a tensor with its chunks, or bytes."""
        start, properties, size, chunks = self.opening_opcodes("TensorStorageMetadata")
        chunk, offsets, sizes = self.opening_opcodes("ChunkStorageMetadata")
        for name, items in placed_items.items():
            yield self.text[name]
            tensor = self.wanted.tensors.get(name)
            if tensor is None:
                yield self.new["BytesStorageMetadata"]
                continue
            yield start + properties + self.properties[tensor.spec.dtype]
            yield size + self.pickle_size(tensor.spec.shape) + chunks + b"]("
            for _, item in items:
                if item.box is not None:
                    box_start, box_size = self.pickle_size(item.box.start), self.pickle_size(item.box.size)
                    yield chunk + offsets + box_start + sizes + box_size + b"ub"
            yield b"eub"

    def pickle_locations(self, placed_items: dict[str, list[Placed]]) -> Iterator[bytes]:
        """Yield the `MetadataIndex` of each chunk and blob, and its location as a `_StorageInfo`."""
        index, fqn, position, start = self.opening_opcodes("MetadataIndex")
        info, path, offset, length = self.opening_opcodes("_StorageInfo")
        number = self.pickler.opcodes_of
        for name, items in placed_items.items():
            for i, (file, item) in enumerate(items):
                yield index + fqn + self.text[name] + position
                yield b"Nub" if item.box is None else number(i) + start + self.pickle_size(item.box.start) + b"ub"
                yield info + path + self.text[file] + offset + number(item.offset) + length + number(item.nbytes)
                yield b"ub"

    def opening_opcodes(self, name: str) -> tuple[bytes, ...]:
        """Return the opcodes for a new object and the start of its state, and the names of its fields."""
        return self.new[name] + b"}(", *(self.text[field] for field in _FIELDS[name])


def pickle_dict(pairs: Iterable[bytes]) -> Iterator[bytes]:
    """Yield a dict of keys and values that are already pickled."""
    yield b"}("
    yield from pairs
    yield b"u"

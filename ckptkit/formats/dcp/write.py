"""Write a DCP checkpoint: assign the shards to ranks as FSDP2 does, and write the `.metadata` with their positions.

Source: torch.chunk (FSDP2 uses it to split dim 0), and torch/distributed/checkpoint/{filesystem,metadata}.py: each rank
writes its own files. An item is an archive of torch.save, whose CRC-32 follows the data. The pickle has only fields
that torch has read since 2.0. A checkpoint may have a million chunks, so recurring values are pickled once and then
fetched from the memo, and bytes are written directly, without an object per chunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import heapreplace

from ckptkit.errors import CkptError, Unsupported
from ckptkit.formats.archives.write_archive import ZipTemplate, make_zip_template, tensor_rebuild_record
from ckptkit.formats.dcp.read_metadata import tensors_file_name
from ckptkit.formats.pickles.inert_pickle import Global, Record
from ckptkit.formats.pickles.write_pickle import Pickler, dump
from ckptkit.io.crc32 import combine_crc32, crc32
from ckptkit.layout import Blob, Layout, Patch, Spec, StoredTensor
from ckptkit.layout.box import Box, Shape, full_box
from ckptkit.layout.dtypes import DType

_ONLY = "0"  # the key of an item's only storage
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


@dataclass(frozen=True, slots=True)
class ShardItem:
    """An item of one rank's file: `nbytes` bytes from `offset`.

    `box` is the box of a tensor, or None for a non-tensor entry. `envelope` is the archive around the data; None for an
    entry that is copied unchanged.
    """

    name: str
    box: Box | None
    offset: int
    nbytes: int
    envelope: ZipTemplate | None


def items_by_file(wanted: Layout, world_size: int) -> dict[str, list[ShardItem]]:
    return {tensors_file_name(rank): items for rank, items in enumerate(items_per_rank(wanted, world_size))}


def items_per_rank(wanted: Layout, world_size: int) -> list[list[ShardItem]]:
    """Return the items of each rank's file in file order: non-tensor entries first, as in torch.

    Non-tensor entries and scalars go to rank 0. A tensor with one chunk in a sharded checkpoint stays unsharded, on the
    rank with the fewest bytes of such tensors, so the experts of expert parallelism are spread over all ranks.
    """
    files: list[list[ShardItem]] = [[] for _ in range(world_size)]
    for name, blob in wanted.blobs.items():
        if blob.wrapper is not None:
            hint = "save the checkpoint again without `_extensions`, or drop the entry with --exclude"
            raise Unsupported(f"stored through the transform `{blob.wrapper}`", tensor=name, hint=hint)
        envelope = None if blob.content is None else make_zip_template(blob.content, {})
        append_item(files[0], name, None, blob.length if envelope is None else envelope.nbytes, envelope)
    is_sharded = any(len(tensor.chunks) > 1 for tensor in wanted.tensors.values())
    loads = [(0, rank) for rank in range(world_size)]  # a heap of (bytes of unsharded tensors, rank)
    for name, tensor in wanted.tensors.items():
        shape = tensor.spec.shape
        if shape and is_sharded and len(tensor.chunks) == 1:
            load, rank = loads[0]
            heapreplace(loads, (load + tensor.spec.nbytes, rank))
            boxes = [(rank, full_box(shape))]
        else:
            boxes = row_shards(shape, world_size)
        for rank, box in boxes:
            envelope = template_of_chunk(name, tensor, box)
            append_item(files[rank], name, box, envelope.nbytes, envelope)
    return files


def append_item(file: list[ShardItem], name: str, box: Box | None, nbytes: int, template: ZipTemplate | None) -> None:
    file.append(ShardItem(name, box, size_of_file(file), nbytes, template))


def row_shards(shape: Shape, world_size: int) -> list[tuple[int, Box]]:
    """Return rank and box of each shard of dim 0: equal numbers of rows, fewer in the last, then one empty box.

    In torch every rank past the end records the same empty chunk, so one is enough.
    """
    if not shape:
        return [(0, full_box(shape))]
    rows = -(-shape[0] // world_size)
    shards = []
    for rank in range(world_size):
        start = min(rank * rows, shape[0])
        box = Box((start, *(0 for _ in shape[1:])), (min(rows, shape[0] - start), *shape[1:]))
        shards.append((rank, box))
        if not box.size[0]:
            break
    return shards


def template_of_chunk(name: str, tensor: StoredTensor, box: Box) -> ZipTemplate:
    try:
        return template_of_spec(Spec(tensor.spec.dtype, box.size))
    except CkptError as error:
        raise error.blame(tensor=name) from None


@lru_cache(maxsize=4096)
def template_of_spec(spec: Spec) -> ZipTemplate:
    """Return the archive around a tensor. It is the same for all tensors of one shape and dtype."""
    return make_zip_template(dump(tensor_rebuild_record(spec, _ONLY)), {_ONLY: spec.nbytes})


@dataclass(frozen=True, slots=True)
class KnownBytes:
    """The bytes of a file that are known before its data, generated on iteration."""

    items: list[ShardItem]

    def __iter__(self) -> Iterator[Patch]:
        for item in self.items:
            for offset, content in item.envelope.parts if item.envelope else ():
                yield item.offset + offset, content


def size_of_file(items: list[ShardItem]) -> int:
    return items[-1].offset + items[-1].nbytes if items else 0


def bytes_around_data(template: ZipTemplate, checksum: int) -> tuple[bytes, bytes]:
    """Return the bytes before and after a tensor's data. Only those after it depend on its CRC-32, `checksum`."""
    (_, head), (start, known) = template.parts
    (hole,) = template.holes.values()
    tail = bytearray(known)
    for at in hole.crc_offsets:
        tail[at - start : at - start + 4] = checksum.to_bytes(4, "little")
    return head, bytes(tail)


def checksum_of_items(items: Iterable[ShardItem], crc32_by_offset: Mapping[int, int]) -> int:
    """Return the CRC-32 of a file of items.

    `crc32_by_offset` has the CRC-32 of each tensor's data, by its item's offset.
    """
    total = 0
    for item in items:
        assert item.envelope is not None
        checksum = crc32_by_offset[item.offset]
        head, tail = bytes_around_data(item.envelope, checksum)
        total = crc32(head, total)
        total = combine_crc32(total, checksum, item.nbytes - len(head) - len(tail))
        total = crc32(tail, total)
    return total


Placed = tuple[str, ShardItem]  # the name of a file, and an item in it


def pickled_metadata(wanted: Layout, files: Mapping[str, list[ShardItem]]) -> bytes:
    """Return the pickled `Metadata` of a checkpoint whose files, by name, have these items."""
    placed: dict[str, list[Placed]] = {name: [] for name in (*wanted.tensors, *wanted.blobs)}
    for file, items in files.items():
        for item in items:
            placed[item.name].append((file, item))
    return _MetadataPickle(wanted, files).write_metadata(placed)


def pickled_metadata_with_blobs(
    wanted: Layout, files: Mapping[str, list[ShardItem]], blobs: Mapping[str, Blob]
) -> bytes:
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

    def pickle_torch_size(self, shape: Shape) -> bytes:
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
        start, properties, size, chunks = self.opening_and_field_opcodes("TensorStorageMetadata")
        chunk, offsets, sizes = self.opening_and_field_opcodes("ChunkStorageMetadata")
        for name, items in placed_items.items():
            yield self.text[name]
            tensor = self.wanted.tensors.get(name)
            if tensor is None:
                yield self.new["BytesStorageMetadata"]
                continue
            yield start + properties + self.properties[tensor.spec.dtype]
            yield size + self.pickle_torch_size(tensor.spec.shape) + chunks + b"]("
            for _, item in items:
                if item.box is not None:
                    box_start, box_size = self.pickle_torch_size(item.box.start), self.pickle_torch_size(item.box.size)
                    yield chunk + offsets + box_start + sizes + box_size + b"ub"
            yield b"eub"

    def pickle_locations(self, placed_items: dict[str, list[Placed]]) -> Iterator[bytes]:
        """Yield the `MetadataIndex` of each chunk and blob, and its location as a `_StorageInfo`."""
        index, fqn, position, start = self.opening_and_field_opcodes("MetadataIndex")
        info, path, offset, length = self.opening_and_field_opcodes("_StorageInfo")
        number = self.pickler.opcodes_of
        for name, items in placed_items.items():
            for i, (file, item) in enumerate(items):
                yield index + fqn + self.text[name] + position
                yield b"Nub" if item.box is None else number(i) + start + self.pickle_torch_size(item.box.start) + b"ub"
                yield info + path + self.text[file] + offset + number(item.offset) + length + number(item.nbytes)
                yield b"ub"

    def opening_and_field_opcodes(self, class_name: str) -> tuple[bytes, ...]:
        """Return the opcodes for a new object and the start of its state, and the names of its fields."""
        return self.new[class_name] + b"}(", *(self.text[field] for field in _FIELDS[class_name])


def pickle_dict(pairs: Iterable[bytes]) -> Iterator[bytes]:
    """Yield a dict of keys and values that are already pickled."""
    yield b"}("
    yield from pairs
    yield b"u"

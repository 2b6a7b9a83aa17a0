"""Describe where every byte of a checkpoint is: the file and offset, or the reason why no file has it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import NamedTuple

from ckptkit.errors import CkptError, Corrupt, Report, raise_problem
from ckptkit.layout.box import Box, Shape, find_box_outside, find_overlap, find_slab_with_gap, full_box
from ckptkit.layout.dtypes import DType

OWN = "own_state"  # the key of all per-rank state, above `rank_N`
KeyPath = tuple[str | int, ...]


class NumberKey(str):
    """A step of a key path for a dict whose key is an integer or boolean, not a string."""

    __slots__ = ()

    @property
    def number(self) -> int:
        return self == "True" if self in ("True", "False") else int(self)


class DTypeKey(str):
    """A step of a key path for a dict whose key is a dtype or a tuple of them: `(torch.bfloat16, torch.float32)`."""

    __slots__ = ()


class TuplePlace(int):
    """A step of a key path to a member of a tuple, as opposed to a list."""

    __slots__ = ()


Splits = tuple[Shape, ...]  # for each axis of a tensor the sizes that it is split into, row-major


@dataclass(frozen=True, slots=True)
class Spec:
    """The dtype and shape of a tensor, independent of its location."""

    dtype: DType
    shape: Shape

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Return the number of bytes, row-major and without padding."""
        return prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype.name}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class Wrapped:
    """The bytes are inside a wrapper of this name, whose location the chunk has as `offset` and `length`."""

    name: str


@dataclass(frozen=True, slots=True)
class Zeros:
    """All elements are zero; no file stores them."""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """The file is missing or cannot be read, as its reader reported."""


@dataclass(frozen=True, slots=True)
class Fault:
    """The reason why bytes are lost, and the file that should contain them, if it is known."""

    why: str
    path: Path | None

    @classmethod
    def of(cls, error: CkptError) -> Fault:
        return cls(error.message, error.path)


class Chunk(NamedTuple):
    """A box of a tensor, stored as `dtype` in `length` bytes at `offset` of file `path` (relative to the root).

    The elements are row-major unless `strides` (in elements) say otherwise. `crc32` is the checksum that the writer
    recorded for these bytes, None if it recorded none. For a box that was cut out of a chunk, the checksum covers the
    bytes of that chunk: the `run`, an offset and a length.

    `where` is None if the bytes are at that location. Otherwise it says where they are: `Wrapped` in an archive, which
    `locate_all_chunks` opens before planning; in no file because they are `Zeros`; in an `Unreadable` file; or lost
    by a `Fault`. Tensors with a lost chunk are dropped before planning. A chunk that no file contains has the path "",
    and an `offset` that only distinguishes it from other chunks.
    """

    box: Box
    path: str
    offset: int
    length: int
    dtype: DType
    strides: Shape | None = None
    crc32: int | None = None
    where: Wrapped | Zeros | Unreadable | Fault | None = None
    run: tuple[int, int] | None = None

    @classmethod
    def of_zeros(cls, box: Box, dtype: DType, offset: int = 0) -> Chunk:
        """Return a chunk of zeros; `offset` distinguishes it from other chunks of zeros."""
        return cls(box, "", offset, box.numel * dtype.itemsize, dtype, where=Zeros())

    @classmethod
    def unreadable(cls, box: Box, path: str, dtype: DType) -> Chunk:
        """Return a chunk of a file that is missing or cannot be read, as its reader reported."""
        return cls(box, path, 0, box.numel * dtype.itemsize, dtype, where=Unreadable())

    @classmethod
    def lost(cls, box: Box, dtype: DType, fault: Fault) -> Chunk:
        return cls(box, "", 0, box.numel * dtype.itemsize, dtype, where=fault)

    @property
    def checksummed_range(self) -> tuple[int, int]:
        """Return offset and length of the bytes that the checksum covers."""
        return self.run or (self.offset, self.length)

    @property
    def wrapper(self) -> str | None:
        return self.where.name if isinstance(self.where, Wrapped) else None

    @property
    def is_in_file(self) -> bool:
        """Return whether a file contains the bytes, possibly inside a wrapper."""
        return self.where is None or isinstance(self.where, Wrapped)

    @property
    def is_zeros(self) -> bool:
        return isinstance(self.where, Zeros)

    @property
    def is_unreadable(self) -> bool:
        return isinstance(self.where, Unreadable)

    @property
    def is_lost(self) -> bool:
        return isinstance(self.where, Fault)

    @property
    def start(self) -> Shape:
        """Return the index of the first element."""
        return self.box.start

    @property
    def size(self) -> Shape:
        """Return the number of elements along each axis."""
        return self.box.size


class ReadRun(NamedTuple):
    """`length` bytes from byte `start` of a chunk that were read at once. `crc` is their CRC-32, None if not needed."""

    chunk: Chunk
    start: int
    length: int
    crc: int | None


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor and the chunks that tile it. Chunks with another dtype than the tensor are cast on read.

    With `splits` the chunks are boxes of the tensor with its axes split that way.
    """

    spec: Spec
    chunks: tuple[Chunk, ...]
    splits: Splits | None = None

    @property
    def is_lost(self) -> bool:
        return any(chunk.is_lost for chunk in self.chunks)

    @property
    def is_unreadable(self) -> bool:
        """Return whether any of its chunks is in a file that cannot be read, as its reader reported."""
        return any(chunk.is_unreadable for chunk in self.chunks)

    @property
    def shape_tiled_by_chunks(self) -> Shape:
        """Return the shape in which the chunks are boxes."""
        return self.spec.shape if self.splits is None else sum(self.splits, ())


class Blob(NamedTuple):
    """A non-tensor entry: an archive of torch.save, `length` bytes at `offset` of file `path`.

    If it is part of a pickle with other entries, `content` is the pickle of its own value. `where` is None if the
    archive is at that location, else `Wrapped` or `Unreadable` as for a `Chunk`. `crc32` covers all its bytes, and is
    set once its contents were verified with the checksums in the archive.
    """

    path: str
    offset: int
    length: int
    content: bytes | None = None
    where: Wrapped | Unreadable | None = None
    crc32: int | None = None

    @property
    def wrapper(self) -> str | None:
        return self.where.name if isinstance(self.where, Wrapped) else None

    @property
    def is_in_file(self) -> bool:
        """Return whether a readable file contains it."""
        return not isinstance(self.where, Unreadable)


@dataclass(frozen=True, slots=True)
class Extent:
    """A byte range of a file with its own CRC-32, None if none was recorded. `name` names its tensor or blob."""

    path: str
    offset: int
    length: int
    crc32: int | None
    name: str


FileOffset = tuple[str, int]  # a file and a byte offset, which identify a chunk
Patch = tuple[int, bytes]  # offset in a file, and the bytes there


@dataclass(frozen=True, slots=True)
class NewFile:
    """A file to write: its size, and the bytes that are known in advance. The rest is data of tensors and blobs."""

    name: str
    nbytes: int
    parts: Iterable[Patch]


@dataclass(frozen=True, slots=True)
class WriterOptions:
    """The options of a writer: the largest file size, and how many ranks will load the checkpoint.

    `file` is the name of the single file to write, if loaders look for that name; `stem` is the beginning of the file
    names. `places` has the file of each tensor, if tensors are distributed to files as in another checkpoint. A writer
    ignores options that its format does not have.
    """

    max_shard_size: int
    world_size: int = 1
    file: str | None = None
    places: Mapping[str, str] | None = None
    stem: str = "model"


@dataclass(frozen=True, slots=True)
class Layout:
    """One checkpoint: its tensors and blobs by name, and their format and directory.

    `keys` has the recorded key path of each name that a producer flattened from a nested dict (`("model",
    "layers.0.weight")`); other names are their own key path. `world_size` is the number of ranks that wrote the
    checkpoint, if known. `descriptions` are the files with metadata and without data. `file_sums` has the size in bytes
    and the CRC-32 of data files, by name, from a manifest. `keeper` is an object that must live as long as the layout:
    the temporary file with decompressed bytes. `twins` are low-precision copies of tensors by name; their values are
    those of the tensors, rounded or unchanged. `spares` are replicas of chunks that other ranks saved, by tensor name.
    `texts` is additional text in a model's files, such as the `__metadata__` of safetensors. `file` is the name of a
    checkpoint that is one file, "" for a directory.

    A reader that reports problems instead of raising them also describes damaged entries: chunks of files that are
    missing or cannot be read are `Unreadable`; `absent` are the names of tensors that could not be read, each with the
    file that should contain it.
    """

    root: Path
    format: str
    tensors: Mapping[str, StoredTensor]
    blobs: Mapping[str, Blob] = field(default_factory=dict)
    keys: Mapping[str, KeyPath] = field(default_factory=dict)
    world_size: int | None = None
    descriptions: tuple[str, ...] = ()
    file_sums: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    keeper: object = field(default=None, repr=False, compare=False)
    twins: Mapping[str, StoredTensor] = field(default_factory=dict)
    spares: Mapping[str, tuple[Chunk, ...]] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict, compare=False)
    file: str = ""

    @property
    def path(self) -> Path:
        """Return the path of the checkpoint for messages: the directory, or the file in it."""
        return self.root / self.file

    @property
    def specs(self) -> dict[str, Spec]:
        return {name: tensor.spec for name, tensor in self.tensors.items()}

    @property
    def shapes(self) -> dict[str, Shape]:
        return {name: tensor.spec.shape for name, tensor in self.tensors.items()}

    @property
    def nbytes(self) -> int:
        return sum(tensor.spec.nbytes for tensor in self.tensors.values())

    @property
    def chunks_and_blobs(self) -> Iterator[tuple[str, Chunk | Blob]]:
        """Yield every chunk, then every blob, with the name of its entry."""
        for name, tensor in self.tensors.items():
            for chunk in tensor.chunks:
                yield name, chunk
        yield from self.blobs.items()

    @property
    def replica_chunks(self) -> Iterator[tuple[str, Chunk]]:
        """Yield every spare chunk with the name of its tensor."""
        for name, chunks in self.spares.items():
            for chunk in chunks:
                yield name, chunk

    @property
    def paths(self) -> set[str]:
        """Return the names of the files that contain its chunks and blobs, or should contain them."""
        return (
            {chunk.path for tensor in self.tensors.values() for chunk in tensor.chunks}
            | {blob.path for blob in self.blobs.values()}
        ) - {""}

    @property
    def files(self) -> set[str]:
        """Return the names of all files that reading needs: those with data, and those with metadata."""
        return self.paths | set(self.descriptions)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the name of every tensor, then of every blob."""
        return (*self.tensors, *self.blobs)

    def key(self, name: str) -> KeyPath:
        """Return the key path of `name` in the producer's nested dict."""
        return self.keys.get(name) or (name,)


def check_chunks_tile(layout: Layout, report: Report = raise_problem) -> None:
    """Report as `Corrupt` each tensor whose chunks are outside of it, overlap or leave a gap."""
    for name, tensor in layout.tensors.items():
        if len(tensor.chunks) == 1 and tensor.chunks[0].box == full_box(tensor.spec.shape):
            continue
        fault = find_tiling_error(layout.root, tensor)
        if fault is not None:
            report(fault.blame(path=layout.path, tensor=name))


def find_tiling_error(root: Path, tensor: StoredTensor) -> Corrupt | None:
    """Return the error for chunks that do not tile a tensor, None if they do."""
    shape = tensor.shape_tiled_by_chunks
    boxes = [chunk.box for chunk in tensor.chunks]
    outside = find_box_outside(shape, boxes)
    if outside is not None:
        chunk = tensor.chunks[outside]
        message = f"a chunk at {list(chunk.start)} of size {list(chunk.size)} is outside shape {list(shape)}"
        return Corrupt(message, path=root / chunk.path)
    overlap = find_overlap(boxes)
    if overlap is not None:
        one, other, shared = overlap
        return Corrupt(
            f"two chunks overlap: {list(shared.size)} elements at {list(shared.start)} "
            f"are in `{tensor.chunks[one].path}` and in `{tensor.chunks[other].path}`"
        )
    gap = find_slab_with_gap(shape, boxes)
    if gap is not None:
        axis, start, stop = gap
        covered = sum(box.numel for box in boxes)
        return Corrupt(
            f"chunks cover {covered} of {prod(shape)} elements of shape {list(shape)}; "
            f"there is a gap at {start}:{stop} of axis {axis}",
            hint="look for a missing shard; perhaps not every rank finished its save",
        )
    return None

"""Say where every byte of a checkpoint lies. Opens no file and names no format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import NamedTuple

from ckptkit.errors import Corrupt, Report, refuse
from ckptkit.tensors.box import Box, Shape, find_gap, find_outside, find_overlap, whole
from ckptkit.tensors.dtypes import DType

KeyPath = tuple[str | int, ...]
Splits = tuple[Shape, ...]  # for each axis of a tensor the extents that it is split in, row-major


@dataclass(frozen=True, slots=True)
class Spec:
    """The dtype and shape of a tensor, whatever place it lies at."""

    dtype: DType
    shape: Shape

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Return the number of bytes, row-major and without padding."""
        return self.numel * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype.name}[{','.join(map(str, self.shape))}]"


ZEROS = ""  # the path of a chunk that lies in no file: all its elements are zero
NOWHERE = 1 << 62  # the offset of a chunk whose file cannot be read: no file is as long
LOST = "\0"  # begins the path of a chunk whose bytes are gone, before the number of the fault, by whoever found it


class Chunk(NamedTuple):
    """A box of a tensor, stored as `dtype` in `length` bytes at `offset` of file `path` (relative to the root).

    Row-major unless `strides` (in elements) say otherwise. `crc32` is the checksum that the writer
    recorded over those bytes, None where none was; of a box that was cut out of a chunk it is over that chunk's, which
    are the `run`: their offset and length. While `wrapper` is set the bytes are still inside an
    envelope of that name, and `offset` and `length` are the envelope's: the reader's `locate` opens it, and no plan is
    made before. A chunk whose path is `ZEROS` lies in no file; no file that a checkpoint names may be called so.
    One with `LOST` in its path has lost its bytes: its tensor is left out before anything is planned.
    """

    box: Box
    path: str
    offset: int
    length: int
    dtype: DType
    strides: Shape | None = None
    crc32: int | None = None
    wrapper: str | None = None
    run: tuple[int, int] | None = None

    @property
    def bytes(self) -> tuple[int, int]:
        """Return offset and length of the bytes that the checksum is over."""
        return self.run or (self.offset, self.length)

    @property
    def is_lost(self) -> bool:
        """Return whether its bytes are gone."""
        return LOST in self.path

    @property
    def start(self) -> Shape:
        """Return the index of its first element."""
        return self.box.start

    @property
    def size(self) -> Shape:
        """Return its extent along each axis."""
        return self.box.size


class Piece(NamedTuple):
    """A run of bytes of a chunk that were read as they lie: `length` of them from `start`, and their CRC-32."""

    chunk: Chunk
    start: int
    length: int
    crc: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor and the chunks that tile it. Where a chunk's dtype is another, its numbers are to be converted.

    With `splits` the chunks are boxes of the tensor with its axes split so.
    """

    spec: Spec
    chunks: tuple[Chunk, ...]
    splits: Splits | None = None

    @property
    def is_lost(self) -> bool:
        """Return whether any of its bytes are gone."""
        return any(chunk.is_lost for chunk in self.chunks)

    @property
    def is_nowhere(self) -> bool:
        """Return whether any of it was in a file that cannot be read, as its reader knows."""
        return any(chunk.offset >= NOWHERE for chunk in self.chunks)

    @property
    def shape_of_chunks(self) -> Shape:
        """Return the shape that the chunks are boxes of."""
        return self.spec.shape if self.splits is None else sum(self.splits, ())


class Blob(NamedTuple):
    """An entry that is no tensor: an archive of torch.save, `length` bytes at `offset` of file `path`.

    Where it has no bytes to itself, but lies with all others in one pickle, `content` is the pickle of its own value.
    While `wrapper` is set the archive is inside an envelope of that name. `crc32` is that of all its bytes, taken when
    what is in it was compared with the checksums recorded there.
    """

    path: str
    offset: int
    length: int
    content: bytes | None = None
    wrapper: str | None = None
    crc32: int | None = None


@dataclass(frozen=True, slots=True)
class Extent:
    """A run of bytes of a file with a CRC-32 of its own, None where none was recorded; of the tensor or blob `name`."""

    path: str
    offset: int
    length: int
    crc32: int | None
    name: str


Place = tuple[str, int]  # a file and an offset in it: what tells one chunk from another
Part = tuple[int, bytes]  # bytes, and the offset in a file that they lie at


@dataclass(frozen=True, slots=True)
class NewFile:
    """A file that a checkpoint to be written needs: its size, and those of its bytes that are known beforehand.

    The rest are holes, for the data of tensors and blobs.
    """

    name: str
    nbytes: int
    parts: Iterable[Part]


@dataclass(frozen=True, slots=True)
class Options:
    """The wishes to a writer: the most bytes in a file, how many ranks are to load it; each heeds its own.

    `file` is the name of the one file that is to hold all, where loaders look for that.
    """

    max_shard_size: int
    world_size: int = 1
    file: str | None = None


@dataclass(frozen=True, slots=True)
class Layout:
    """One checkpoint: its tensors and blobs by name, and the format and directory they lie in.

    `keys` gives, for a name that a producer flattened from a nested dict, the recorded way to it
    (`("model", "layers.0.weight")`); other names are their own one-step way. `world_size` is the number of ranks that
    wrote it, where that shows. `descriptions` are the files that say all this, and hold no data. `keeper` is what must
    not go before the layout does: the temporary file that some of the bytes were unpacked into. `twins` are second
    copies of tensors, by the names of these, with the same numbers rounded to fewer bits, or as they are.

    Of what is damaged a reader may say more, where its problems are reported and not raised: chunks of files that are
    missing or cannot be read lie `nowhere`; `spares` are further copies of chunks, by the names of their tensors, and
    `absent` the names of tensors that could not be read, each with the file that it should lie in.
    """

    root: Path
    format: str
    tensors: Mapping[str, StoredTensor]
    blobs: Mapping[str, Blob] = field(default_factory=dict)
    keys: Mapping[str, KeyPath] = field(default_factory=dict)
    world_size: int | None = None
    descriptions: tuple[str, ...] = ()
    keeper: object = field(default=None, repr=False, compare=False)
    twins: Mapping[str, StoredTensor] = field(default_factory=dict)
    spares: Mapping[str, tuple[Chunk, ...]] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)

    @property
    def specs(self) -> dict[str, Spec]:
        """Return the dtype and shape of each tensor."""
        return {name: tensor.spec for name, tensor in self.tensors.items()}

    @property
    def shapes(self) -> dict[str, Shape]:
        """Return the shape of each tensor."""
        return {name: tensor.spec.shape for name, tensor in self.tensors.items()}

    @property
    def nbytes(self) -> int:
        """Return the bytes of all tensors."""
        return sum(tensor.spec.nbytes for tensor in self.tensors.values())

    @property
    def stored(self) -> Iterator[tuple[str, Chunk | Blob]]:
        """Yield every chunk, then every blob, with the name that it belongs to."""
        for name, tensor in self.tensors.items():
            for chunk in tensor.chunks:
                yield name, chunk
        yield from self.blobs.items()

    @property
    def names(self) -> tuple[str, ...]:
        """Return the name of every tensor, then of every blob."""
        return (*self.tensors, *self.blobs)

    def key(self, name: str) -> KeyPath:
        """Return the recorded way to `name` through the producer's nested dict."""
        return self.keys.get(name, (name,))


def nowhere(box: Box, path: str, dtype: DType) -> Chunk:
    """Return a chunk of a file that is missing or cannot be read, which its reader has reported."""
    return Chunk(box, path, NOWHERE, box.numel * dtype.itemsize, dtype)


def check_cover(layout: Layout, report: Report = refuse) -> None:
    """Report as `Corrupt` each tensor whose chunks do not lie inside it, overlap or leave a gap."""
    for name, tensor in layout.tensors.items():
        if len(tensor.chunks) == 1 and tensor.chunks[0].box == whole(tensor.spec.shape):
            continue
        fault = find_fault(layout.root, tensor)
        if fault is not None:
            report(fault.blame(path=layout.root, tensor=name))


def find_fault(root: Path, tensor: StoredTensor) -> Corrupt | None:
    """Return the fault in how the chunks tile a tensor, if there is one."""
    shape = tensor.shape_of_chunks
    boxes = [chunk.box for chunk in tensor.chunks]
    outside = find_outside(shape, boxes)
    if outside is not None:
        chunk = tensor.chunks[outside]
        message = f"a chunk at {list(chunk.start)} of size {list(chunk.size)} lies outside shape {list(shape)}"
        return Corrupt(message, path=root / chunk.path)
    overlap = find_overlap(boxes)
    if overlap is not None:
        one, other, shared = overlap
        return Corrupt(
            f"two chunks overlap: {list(shared.size)} elements at {list(shared.start)} "
            f"are in `{tensor.chunks[one].path}` and in `{tensor.chunks[other].path}`"
        )
    gap = find_gap(shape, boxes)
    if gap is not None:
        axis, start, stop = gap
        covered = sum(box.numel for box in boxes)
        return Corrupt(
            f"chunks cover {covered} of {prod(shape)} elements of shape {list(shape)}; "
            f"a gap lies at {start}:{stop} of axis {axis}",
            hint="a shard is missing, or not every rank had finished when the checkpoint was written",
        )
    return None

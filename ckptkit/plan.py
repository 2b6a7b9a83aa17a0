"""Plans: the byte copies that turn one layout into another. Opens no file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from ckptkit.errors import Mismatch
from ckptkit.layout import Blob, Chunk, Layout, StoredTensor
from ckptkit.tensors.box import Box, BoxIndex, whole
from ckptkit.tensors.dtypes import DTYPES


@dataclass(frozen=True, slots=True)
class Copy:
    """A region of a tensor that lies in chunk `src` of the one layout and in chunk `dst` of the other."""

    region: Box
    src: Chunk
    dst: Chunk


@dataclass(frozen=True, slots=True)
class Target:
    """One chunk to be made of the tensor or blob `name`, and the copies that fill it."""

    name: str
    chunk: Chunk
    copies: tuple[Copy, ...]


@dataclass(frozen=True)
class Plan:
    """Every target, in the order in which the destination's bytes lie in its files."""

    src: Layout
    dst: Layout
    targets: tuple[Target, ...]

    @property
    def copies(self) -> Iterator[Copy]:
        """Every copy, in the order of the targets."""
        return (copy for target in self.targets for copy in target.copies)

    @cached_property
    def nbytes(self) -> int:
        """Bytes to be written."""
        return sum(target.chunk.length for target in self.targets)


def make_plan(src: Layout, dst: Layout) -> Plan:
    """Join two layouts by name. Raises `Mismatch` if a tensor, any element of one, or a blob has no source in `src`."""
    targets: list[Target] = []
    for name, wanted in dst.tensors.items():
        source = src.tensors.get(name)
        if source is None:
            raise Mismatch("there is no such tensor in the source", path=src.root, tensor=name)
        if source.spec != wanted.spec:
            raise Mismatch(f"the source has {source.spec}, wanted is {wanted.spec}", path=src.root, tensor=name)
        targets.extend(join(name, source, wanted, src))
    targets += [target for name, blob in dst.blobs.items() if (target := join_blob(name, blob, src)) is not None]
    targets.sort(key=lambda target: (target.chunk.path, target.chunk.offset))
    return Plan(src, dst, tuple(targets))


def join(name: str, source: StoredTensor, wanted: StoredTensor, src: Layout) -> Iterator[Target]:
    """The targets of one tensor: for each chunk of `wanted`, what of `source` it is made of."""
    index = BoxIndex([chunk.box for chunk in source.chunks])
    for chunk in wanted.chunks:
        if not chunk.box.numel:
            continue
        copies = tuple(Copy(shared, source.chunks[i], chunk) for i, shared in index.meeting(chunk.box))
        found = sum(copy.region.numel for copy in copies)
        if found != chunk.box.numel:
            message = f"the source has {found} of the {chunk.box.numel} elements of {chunk.box}"
            raise Mismatch(message, path=src.root, tensor=name)
        yield Target(name, chunk, copies)


def join_blob(name: str, wanted: Blob, src: Layout) -> Target | None:
    """The target of one blob: its bytes as they are. None for one that holds none, or had to be made anew."""
    source = src.blobs.get(name)
    if source is None:
        raise Mismatch("there is no such entry in the source", path=src.root, tensor=name)
    if wanted.content is not None or source.content is not None or not wanted.length:
        return None
    if source.length != wanted.length:
        raise Mismatch(f"the source has {source.length} bytes, wanted are {wanted.length}", path=src.root, tensor=name)
    box = whole((wanted.length,))
    there = Chunk(box, source.path, source.offset, source.length, DTYPES["uint8"], crc32=source.crc32)
    here = Chunk(box, wanted.path, wanted.offset, wanted.length, DTYPES["uint8"])
    return Target(name, here, (Copy(box, there, here),))

"""Plan the byte copies that fill one layout from another, or from several."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

from ckptkit.errors import Mismatch, Usage
from ckptkit.layout import Blob, Chunk, FileOffset, Layout, Spec, StoredTensor
from ckptkit.layout.axes import with_split_chunks, with_unsplit_chunks
from ckptkit.layout.box import Box, BoxIndex, full_box
from ckptkit.layout.dtypes import DTYPES, DType

Region = Callable[[Box], Box]


def identity_region(box: Box) -> Box:
    """Return the box itself: the region of an elementwise operand."""
    return box


class Operand(NamedTuple):
    """A tensor of source number `source` that is an input of another tensor; its elements are read as `dtype`.

    `region` maps a box of the output to the box of the input that it needs. A larger box needs a larger region, or the
    same.
    """

    source: int
    name: str
    dtype: DType
    region: Region = identity_region


class Recipe(Protocol):
    """A pure function that computes a tensor, block by block, from the blocks of its operands."""

    @property
    def operands(self) -> Sequence[Operand]:
        """Return the tensors that it is computed from."""

    def __call__(self, box: Box, dtype: DType, blocks: Sequence[memoryview]) -> tuple[memoryview, bool]:
        """Return the elements of `box` as `dtype`, and whether the recipe has a remark on the tensor for the ledger.

        There is one of `blocks` for each operand: the elements of its region for `box`, row-major, in its dtype. A
        block whose region differs for every box may be overwritten; any other is passed again.
        """


@runtime_checkable
class ByRows(Recipe, Protocol):
    """A recipe that computes `rows` rows of a tensor at once, or fewer at its end. Its operands must be small."""

    rows: int


class RecipeVerdict(Protocol):
    """A summary of tensors, by whether the recipe had a remark on each of them. Recipes have it as `verdict`."""

    def verdict_sentence(self, checked: Sequence[str], noted: Collection[str]) -> str:
        """Return a sentence on all tensors that were `checked`, some of them also `noted`."""


class Copy(NamedTuple):
    """A region of a tensor that is in chunk `src` of source number `source`, and is copied into chunk `dst`.

    `operand` is the index among the operands of the target, or among the sources that are compared.
    """

    region: Box
    src: Chunk
    dst: Chunk
    source: int = 0
    operand: int = 0


class Target(NamedTuple):
    """One chunk to write of the tensor or blob `name`, and the copies that fill it, or are inputs of its recipe."""

    name: str
    chunk: Chunk
    copies: tuple[Copy, ...]
    recipe: Recipe | None = None


@dataclass(frozen=True)
class Plan:
    """Every target, in the order of the destination's files and offsets.

    The sources are `src` and `others`. A target without a recipe is copied from the first, or compared with all. In a
    plan for a part of a destination, `before` and `behind` are the bytes of the destination before and after that part.

    Raises `Usage` for a chunk that has not been located, because its offset is unknown, and for a chunk that is lost or
    unreadable.
    """

    src: Layout
    dst: Layout
    targets: tuple[Target, ...]
    others: tuple[Layout, ...] = ()
    before: int = 0
    behind: int = 0

    def __post_init__(self) -> None:
        for target in self.targets:
            if target.chunk.where is not None:
                raise not_located_error(self.dst, target.chunk, target.name)
            for copy in target.copies:
                if not (copy.src.where is None or copy.src.is_zeros):
                    raise not_located_error(self.sources[copy.source], copy.src, target.name)

    @property
    def sources(self) -> tuple[Layout, ...]:
        return (self.src, *self.others)

    @property
    def copies(self) -> Iterator[Copy]:
        return (copy for target in self.targets for copy in target.copies)

    @cached_property
    def nbytes(self) -> int:
        return sum(target.chunk.length for target in self.targets)

    @property
    def destination_nbytes(self) -> int:
        """Return the bytes of the whole destination."""
        return self.before + self.nbytes + self.behind


def not_located_error(layout: Layout, chunk: Chunk, name: str) -> Usage:
    """Return the error for a chunk that is not located, or whose bytes are lost."""
    message, hint = "the bytes of a chunk are lost or unreadable", "drop the tensor before planning"
    if chunk.wrapper is not None:
        found = f"found the envelope `{chunk.wrapper}`, which must be opened first"
        message = f"expected the elements at {chunk.offset}, {found}"
        hint = "call `ckptkit.formats.locate_all_chunks` before you plan, read or compare a layout"
    return Usage(message, path=layout.root / chunk.path, tensor=name, offset=chunk.offset, hint=hint)


def make_plan(
    src: Layout, dst: Layout, others: Sequence[Layout] = (), recipes: Mapping[str, Recipe] | None = None
) -> Plan:
    """Join layouts by name. Blobs come from `src`. A tensor with a recipe is computed by it, others are copied.

    Raises `Mismatch` if a source lacks a tensor, elements of a tensor, or a blob.
    """
    sources = (src, *others)
    targets: list[Target] = []
    for name, wanted in dst.tensors.items():
        recipe = (recipes or {}).get(name)
        if recipe is not None:
            targets.extend(targets_for(name, wanted, sources, recipe))
            continue
        tensor = src.tensors.get(name)
        if tensor is None:
            raise Mismatch("the source does not have this tensor", path=src.path, tensor=name)
        if tensor.spec != wanted.spec:
            raise Mismatch(f"expected {wanted.spec}, found {tensor.spec}", path=src.path, tensor=name)
        targets.extend(targets_for(name, wanted, [src]))
    targets += [target for name, blob in dst.blobs.items() if (target := find_blob_target(name, blob, src)) is not None]
    return Plan(src, dst, in_file_order(targets), tuple(others))


def filled_entries_in_order(dst: Layout, src: Layout) -> list[tuple[FileOffset, int, str, Chunk | Blob]]:
    """Return everything that `src` fills in `dst`: location, bytes, name and chunk or blob, in file order."""
    chunks = [(name, chunk) for name, tensor in dst.tensors.items() for chunk in tensor.chunks if chunk.box.numel]
    blobs = [(name, blob) for name, blob in dst.blobs.items() if find_blob_target(name, blob, src) is not None]
    data: list[tuple[FileOffset, int, str, Chunk | Blob]] = [
        ((chunk.path, chunk.offset), chunk.box.numel * chunk.dtype.itemsize, name, chunk) for name, chunk in chunks
    ]
    data += (((blob.path, blob.offset), blob.length, name, blob) for name, blob in blobs)
    return sorted(data, key=itemgetter(0))


def restrict_to_needed(src: Layout, dst: Layout, always_needed: Container[str] = ()) -> Layout:
    """Return the part of `src` that fills `dst`, which has the same names, and all tensors in `always_needed`."""
    tensors: dict[str, StoredTensor] = {}
    for name, wanted in dst.tensors.items():
        if (tensor := src.tensors.get(name)) is not None:
            cut = wanted if tensor.splits is None else with_split_chunks(wanted, tensor.splits)
            index = BoxIndex([chunk.box for chunk in tensor.chunks])
            needed = {i for chunk in cut.chunks for i, _ in index.intersections_with(chunk.box)}
            tensors[name] = replace(tensor, chunks=tuple(tensor.chunks[i] for i in sorted(needed)))
    tensors |= {name: tensor for name, tensor in src.tensors.items() if name in always_needed}
    blobs = {name: blob for name, blob in src.blobs.items() if name in dst.blobs}
    return replace(src, tensors=tensors, blobs=blobs)


def targets_for(
    name: str, wanted: StoredTensor, sources: Sequence[Layout], recipe: Recipe | None = None
) -> Iterator[Target]:
    """Yield the targets of a tensor, with the parts of every source, of the recipe's operands or of the same name."""
    numbers = range(len(sources))
    operands = recipe.operands if recipe else [Operand(number, name, wanted.spec.dtype) for number in numbers]
    if recipe is not None:
        check_operands(wanted.spec, operands, sources)
    tensors = [sources[operand.source].tensors[operand.name] for operand in operands]
    # split the axes of all tensors alike; none if an operand has other boxes
    splits = next((tensor.splits for tensor in tensors if tensor.splits), None)
    if any(operand.region is not identity_region for operand in operands):
        wanted, *tensors = map(with_unsplit_chunks, (wanted, *tensors))
    elif splits is not None:
        wanted, *tensors = (with_split_chunks(tensor, splits) for tensor in (wanted, *tensors))
    indices = [BoxIndex([chunk.box for chunk in tensor.chunks]) for tensor in tensors]
    for chunk in wanted.chunks:
        if not chunk.box.numel:
            continue
        copies: list[Copy] = []
        for number, (operand, tensor, index) in enumerate(zip(operands, tensors, indices, strict=True)):
            source, chunks, box = operand.source, tensor.chunks, operand.region(chunk.box)
            ours = [Copy(region, chunks[i], chunk, source, number) for i, region in index.intersections_with(box)]
            covered = sum(copy.region.numel for copy in ours)
            if covered != box.numel:
                message = f"expected {box.numel} elements of {box}, found {covered} in the source"
                raise Mismatch(message, path=sources[source].root, tensor=operand.name)
            copies += ours
        yield Target(name, chunk, tuple(copies), recipe)


def check_operands(wanted: Spec, operands: Sequence[Operand], sources: Sequence[Layout]) -> None:
    """Raise `Mismatch` for an operand that is missing, or cannot be read in the wanted shape and dtype."""
    for operand in operands:
        layout = sources[operand.source]
        tensor = layout.tensors.get(operand.name)
        if tensor is None:
            raise Mismatch("the source does not have this tensor", path=layout.path, tensor=operand.name)
        spec = tensor.spec
        is_alike = operand.region is not identity_region or spec.shape == wanted.shape
        if not (is_alike and (spec.dtype == operand.dtype or spec.dtype.is_castable_to(operand.dtype))):
            message = f"expected {operand.dtype} for {wanted}, found {spec}"
            raise Mismatch(message, path=layout.path, tensor=operand.name)


def find_blob_target(name: str, wanted: Blob, src: Layout) -> Target | None:
    """Return the target that copies one blob; None if it is empty, or was written from a new value."""
    source = src.blobs.get(name)
    if source is None:
        raise Mismatch("the source does not have this entry", path=src.root, tensor=name)
    if wanted.content is not None or source.content is not None or not wanted.length:
        return None
    if source.length != wanted.length:
        raise Mismatch(f"expected {wanted.length} bytes, found {source.length}", path=src.root, tensor=name)
    source_bytes, target_bytes = as_byte_chunk(source), as_byte_chunk(wanted)
    return Target(name, target_bytes, (Copy(target_bytes.box, source_bytes, target_bytes),))


def self_copy_target(name: str, chunk: Chunk, source: int = 0) -> Target:
    """Return a chunk as a target that is copied from itself."""
    return Target(name, chunk, (Copy(chunk.box, chunk, chunk, source),))


def plan_range_reads(root: Path, ranges: Iterable[tuple[str, int, int]]) -> Plan:
    """Return the plan that reads byte ranges of files in turn, each a file name in `root`, an offset and a length."""
    nothing, uint8 = Layout(root, "", {}), DTYPES["uint8"]
    chunks = (Chunk(full_box((length,)), path, offset, length, uint8) for path, offset, length in ranges)
    return Plan(nothing, nothing, tuple(self_copy_target("", chunk) for chunk in chunks))


def as_byte_chunk(stored: Blob | Chunk) -> Chunk:
    """Return the bytes of a chunk or blob as a 1-D chunk of bytes."""
    box = full_box((stored.length,))
    uint8 = DTYPES["uint8"]
    run = stored.run if isinstance(stored, Chunk) else None
    return Chunk(box, stored.path, stored.offset, stored.length, uint8, None, stored.crc32, stored.where, run)


def in_file_order(targets: Iterable[Target]) -> tuple[Target, ...]:
    return tuple(sorted(targets, key=lambda target: (target.chunk.path, target.chunk.offset)))

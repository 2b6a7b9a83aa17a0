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
from ckptkit.layout.axes import resplit, unsplit
from ckptkit.layout.box import Box, BoxIndex, whole
from ckptkit.layout.dtypes import DTYPES, DType

Region = Callable[[Box], Box]


def same(box: Box) -> Box:
    """Return the box itself: the region of an operand of which each element goes into the one at its own place."""
    return box


class Operand(NamedTuple):
    """A tensor of the source of this number that goes into another, its elements as `dtype`.

    A box of the other is made of the box of it that `region` gives; of a larger box that is a larger one, or the same.
    """

    source: int
    name: str
    dtype: DType
    region: Region = same


class Recipe(Protocol):
    """A pure function that makes a tensor, block by block, of the blocks of others: its operands."""

    @property
    def operands(self) -> Sequence[Operand]:
        """Return the tensors that it is made of."""

    def __call__(self, box: Box, dtype: DType, blocks: Sequence[memoryview]) -> tuple[memoryview, bool]:
        """Return the elements of `box` as `dtype`, and whether the tensor is worth a note in the ledger.

        Of each operand there is one of `blocks`: the elements of its region for `box`, row-major, in its dtype. One
        whose region is another for every box may be written over; any other is handed out again.
        """


@runtime_checkable
class ByRows(Recipe, Protocol):
    """A recipe that makes so many rows of a tensor at once, or less at its end, of operands that are small enough."""

    rows: int


class RecipeVerdict(Protocol):
    """What a report says of tensors, by whether each of them was worth a note. A recipe may have one: `verdict`."""

    def words(self, judged: Sequence[str], noted: Collection[str]) -> str:
        """Return a sentence on all tensors that were `judged`, of which some were `noted`."""


class Copy(NamedTuple):
    """A region of a tensor that lies in chunk `src` of a source, given by its number, and goes into chunk `dst`.

    Of several tensors or sources that go into one target, `operand` is the number.
    """

    region: Box
    src: Chunk
    dst: Chunk
    source: int = 0
    operand: int = 0


class Target(NamedTuple):
    """One chunk to be made of the tensor or blob `name`, and the copies that fill it, or that a recipe makes it of."""

    name: str
    chunk: Chunk
    copies: tuple[Copy, ...]
    recipe: Recipe | None = None


@dataclass(frozen=True)
class Plan:
    """Every target, in the order in which the destination's bytes lie in its files.

    The sources are `src` and `others`: a target without a recipe is copied from the first, or compared with all.
    Of a plan for a part of a destination, `before` and `behind` are the bytes that lie on its two sides.
    Raises `Usage` for a chunk that has not been located, since its bytes are not yet known from their envelope, and for
    a chunk that is lost or unreadable.
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
                raise not_located(self.dst, target.chunk, target.name)
            for copy in target.copies:
                if not (copy.src.where is None or copy.src.is_zeros):
                    raise not_located(self.sources[copy.source], copy.src, target.name)

    @property
    def sources(self) -> tuple[Layout, ...]:
        """Return every layout that is read."""
        return (self.src, *self.others)

    @property
    def copies(self) -> Iterator[Copy]:
        return (copy for target in self.targets for copy in target.copies)

    @cached_property
    def nbytes(self) -> int:
        """Return the bytes to be written."""
        return sum(target.chunk.length for target in self.targets)

    @property
    def whole_nbytes(self) -> int:
        """Return the bytes of the whole destination."""
        return self.before + self.nbytes + self.behind


def not_located(layout: Layout, chunk: Chunk, name: str) -> Usage:
    """Return the error for a chunk that is still in its envelope, or whose bytes are not there."""
    message = (
        f"expected the elements at {chunk.offset}, found the envelope `{chunk.wrapper}`, which must be opened first"
    )
    hint = "call `ckptkit.formats.locate` before you plan, read or compare a layout"
    if chunk.wrapper is None:
        message, hint = "the bytes of a chunk are lost or unreadable", "drop the tensor before planning"
    return Usage(message, path=layout.root / chunk.path, tensor=name, offset=chunk.offset, hint=hint)


def make_plan(
    src: Layout, dst: Layout, others: Sequence[Layout] = (), recipes: Mapping[str, Recipe] | None = None
) -> Plan:
    """Join layouts by name; blobs are those of `src`. A tensor with a recipe is made by that, others are copied.

    Raises `Mismatch` if a tensor, any element of one, or a blob is lacking in a source.
    """
    sources = (src, *others)
    targets: list[Target] = []
    for name, wanted in dst.tensors.items():
        recipe = (recipes or {}).get(name)
        if recipe is None:
            check_source(name, wanted.spec, src)
            targets.extend(join(name, wanted, [src]))
        else:
            targets.extend(join(name, wanted, sources, recipe))
    targets += [target for name, blob in dst.blobs.items() if (target := join_blob(name, blob, src)) is not None]
    return Plan(src, dst, in_order(targets), tuple(others))


def data_of(dst: Layout, src: Layout) -> list[tuple[FileOffset, int, str, Chunk | Blob]]:
    """Return all that is to be filled of one layout from another: place, bytes and name, in the order of the files."""
    chunks = [(name, chunk) for name, tensor in dst.tensors.items() for chunk in tensor.chunks if chunk.box.numel]
    blobs = [(name, blob) for name, blob in dst.blobs.items() if join_blob(name, blob, src) is not None]
    found: list[tuple[FileOffset, int, str, Chunk | Blob]] = [
        ((chunk.path, chunk.offset), chunk.box.numel * chunk.dtype.itemsize, name, chunk) for name, chunk in chunks
    ]
    found += (((blob.path, blob.offset), blob.length, name, blob) for name, blob in blobs)
    return sorted(found, key=itemgetter(0))


def needed(src: Layout, dst: Layout, also: Container[str] = ()) -> Layout:
    """Return the part of a layout that another, of tensors of the same names, is made of; and all of those `also`."""
    tensors = {name: part_for(src.tensors[name], wanted) for name, wanted in dst.tensors.items() if name in src.tensors}
    tensors |= {name: tensor for name, tensor in src.tensors.items() if name in also}
    blobs = {name: blob for name, blob in src.blobs.items() if name in dst.blobs}
    return replace(src, tensors=tensors, blobs=blobs)


def part_for(tensor: StoredTensor, wanted: StoredTensor) -> StoredTensor:
    cut = wanted if tensor.splits is None else resplit(wanted, tensor.splits)
    return replace(tensor, chunks=meeting(tensor, cut.chunks))


def meeting(tensor: StoredTensor, wanted: Iterable[Chunk]) -> tuple[Chunk, ...]:
    """Return the chunks of a tensor that have elements in any of the wanted ones."""
    index = BoxIndex([chunk.box for chunk in tensor.chunks])
    found = {i for chunk in wanted for i, _ in index.meeting(chunk.box)}
    return tuple(tensor.chunks[i] for i in sorted(found))


def plan_in_place(layout: Layout) -> Plan:
    """Return the plan by which every chunk of a layout is read as it is, in the order of its files."""
    chunks = ((name, chunk) for name, tensor in layout.tensors.items() for chunk in tensor.chunks if chunk.box.numel)
    return Plan(layout, layout, in_order(itself(name, chunk) for name, chunk in chunks))


def check_source(name: str, wanted: Spec, layout: Layout) -> None:
    """Raise `Mismatch` unless a layout has the tensor, in the shape and dtype that are wanted."""
    found = layout.tensors.get(name)
    if found is None:
        raise Mismatch("the source does not have this tensor", path=layout.path, tensor=name)
    if found.spec != wanted:
        raise Mismatch(f"expected {wanted}, found {found.spec}", path=layout.path, tensor=name)


def join(name: str, wanted: StoredTensor, sources: Sequence[Layout], recipe: Recipe | None = None) -> Iterator[Target]:
    """Yield the targets of one tensor: for each chunk of `wanted`, the parts of every source that it is made of.

    Without a recipe these are of the tensor of its name in each of them.
    """
    numbers = range(len(sources))
    operands = recipe.operands if recipe else [Operand(number, name, wanted.spec.dtype) for number in numbers]
    if recipe is not None:
        check_operands(wanted.spec, operands, sources)
    found = [sources[operand.source].tensors[operand.name] for operand in operands]
    wanted, *found = split_alike(wanted, found, operands)
    indices = [BoxIndex([chunk.box for chunk in tensor.chunks]) for tensor in found]
    for chunk in wanted.chunks:
        if not chunk.box.numel:
            continue
        copies: list[Copy] = []
        for number, (operand, tensor, index) in enumerate(zip(operands, found, indices, strict=True)):
            source, chunks, box = operand.source, tensor.chunks, operand.region(chunk.box)
            ours = [Copy(part, chunks[i], chunk, source, number) for i, part in index.meeting(box)]
            covered = sum(copy.region.numel for copy in ours)
            if covered != box.numel:
                message = f"expected {box.numel} elements of {box}, found {covered} in the source"
                raise Mismatch(message, path=sources[source].root, tensor=operand.name)
            copies += ours
        yield Target(name, chunk, tuple(copies), recipe)


def check_operands(wanted: Spec, operands: Sequence[Operand], sources: Sequence[Layout]) -> None:
    """Raise `Mismatch` for an operand that is not there, or cannot be read as it is wanted."""
    for operand in operands:
        layout = sources[operand.source]
        tensor = layout.tensors.get(operand.name)
        if tensor is None:
            raise Mismatch("the source does not have this tensor", path=layout.path, tensor=operand.name)
        found = tensor.spec
        is_alike = operand.region is not same or found.shape == wanted.shape
        if not (is_alike and (found.dtype == operand.dtype or found.dtype.can_become(operand.dtype))):
            message = f"expected {operand.dtype} for {wanted}, found {found}"
            raise Mismatch(message, path=layout.path, tensor=operand.name)


def split_alike(
    wanted: StoredTensor, tensors: Sequence[StoredTensor], operands: Sequence[Operand]
) -> list[StoredTensor]:
    """Return a tensor and its operands with axes split alike; none are where an operand is needed in other boxes."""
    if any(operand.region is not same for operand in operands):
        return [unsplit(tensor) for tensor in (wanted, *tensors)]
    splits = next((tensor.splits for tensor in tensors if tensor.splits), None)
    if splits is None:
        return [wanted, *tensors]
    return [resplit(tensor, splits) for tensor in (wanted, *tensors)]


def join_blob(name: str, wanted: Blob, src: Layout) -> Target | None:
    """Return the target of one blob: its bytes as they are. None for one that holds none, or had to be made anew."""
    source = src.blobs.get(name)
    if source is None:
        raise Mismatch("the source does not have this entry", path=src.root, tensor=name)
    if wanted.content is not None or source.content is not None or not wanted.length:
        return None
    if source.length != wanted.length:
        raise Mismatch(f"expected {wanted.length} bytes, found {source.length}", path=src.root, tensor=name)
    there, here = as_bytes(source), as_bytes(wanted)
    return Target(name, here, (Copy(here.box, there, here),))


def itself(name: str, chunk: Chunk, source: int = 0) -> Target:
    """Return a chunk as a target that is made of nothing but itself."""
    return Target(name, chunk, (Copy(chunk.box, chunk, chunk, source),))


def plan_bytes(root: Path, runs: Iterable[tuple[str, int, int]]) -> Plan:
    """Return the plan by which bytes of files in directory `root` are read as they lie, run by run in this order.

    A run is the name of a file, an offset and a length.
    """
    nothing, uint8 = Layout(root, "", {}), DTYPES["uint8"]
    chunks = (Chunk(whole((length,)), path, offset, length, uint8) for path, offset, length in runs)
    return Plan(nothing, nothing, tuple(itself("", chunk) for chunk in chunks))


def as_bytes(stored: Blob | Chunk) -> Chunk:
    """Return the bytes of a chunk or blob in the order in which they lie, as a chunk of bytes."""
    box = whole((stored.length,))
    uint8 = DTYPES["uint8"]
    run = stored.run if isinstance(stored, Chunk) else None
    return Chunk(box, stored.path, stored.offset, stored.length, uint8, None, stored.crc32, stored.where, run)


def in_order(targets: Iterable[Target]) -> tuple[Target, ...]:
    """Return targets in the order in which they lie in their files."""
    return tuple(sorted(targets, key=lambda target: (target.chunk.path, target.chunk.offset)))

"""Compute which rank or file has which shard of each tensor, as rectangles. Similar tensors share a row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby, takewhile
from math import prod
from pathlib import PurePath

from ckptkit.formats import get_format
from ckptkit.layout import Layout, Spec
from ckptkit.layout.box import Box, Shape
from ckptkit.words import format_number_ranges


@dataclass(frozen=True, slots=True)
class Rectangle:
    """A rectangle in the unit square; by default the full square."""

    left: float = 0.0
    right: float = 1.0
    top: float = 0.0
    bottom: float = 1.0


@dataclass(frozen=True, slots=True)
class Cut:
    """The rectangles of a tensor's boxes, in the same order, and the sharded axes.

    `is_flat` means that the boxes are runs of elements in row-major order, drawn along one axis.
    """

    rectangles: tuple[Rectangle, ...]
    axes: tuple[int, ...] = ()
    is_flat: bool = False

    @property
    def is_grid(self) -> bool:
        """Return True if the rectangles are laid out along two axes."""
        return len(self.axes) == 2 and not self.is_flat


def boxes_to_rectangles(shape: Shape, boxes: Sequence[Box]) -> Cut:
    """Return the rectangles of boxes that tile a tensor: along one axis, by byte order, or along two axes.

    Boxes cut along more than two axes are side by side, with widths in proportion to their sizes.
    """
    axes = tuple(axis for axis, extent in enumerate(shape) if any(box.size[axis] != extent for box in boxes))
    if not axes:
        return Cut((Rectangle(),) * len(boxes))
    if len(axes) == 1:
        return Cut(tuple(Rectangle(*axis_fractions(box, shape, axes[0])) for box in boxes), axes)
    if all(is_contiguous_box(box, shape) for box in boxes):
        return Cut(tuple(Rectangle(*row_major_fractions(box, shape)) for box in boxes), axes, is_flat=True)
    if len(axes) == 2:
        down, across = axes
        grid = tuple(Rectangle(*axis_fractions(box, shape, across), *axis_fractions(box, shape, down)) for box in boxes)
        return Cut(grid, axes)
    ends = list(accumulate(box.numel / prod(shape) for box in boxes))
    shares = zip([0.0, *ends], ends, strict=False)
    return Cut(tuple(Rectangle(left, right) for left, right in shares), axes)


def axis_fractions(box: Box, shape: Shape, axis: int) -> tuple[float, float]:
    return box.start[axis] / shape[axis], (box.start[axis] + box.size[axis]) / shape[axis]


def is_contiguous_box(box: Box, shape: Shape) -> bool:
    """Return True if the elements of a box are contiguous in row-major order, as in a flat shard."""
    first = next((axis for axis, extent in enumerate(box.size) if extent != 1), len(shape))
    return box.size[first + 1 :] == shape[first + 1 :]


def row_major_fractions(box: Box, shape: Shape) -> tuple[float, float]:
    """Return the start and end of a contiguous box in row-major order, as fractions of all elements."""
    start = sum(index * prod(shape[axis + 1 :]) for axis, index in enumerate(box.start))
    return start / prod(shape), (start + box.numel) / prod(shape)


@dataclass(frozen=True, slots=True)
class Owner:
    """A rank, or a file if file names do not show ranks. `mark` is its number."""

    mark: str
    name: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class DrawnShard:
    """A shard of a tensor: the position of its owner in `ShardMap.owners`, its box, its file, and its bytes."""

    owner: int
    box: Box
    path: str
    nbytes: int


@dataclass(frozen=True)
class Row:
    """Tensors with the same spec and shards, in modules that differ only in their numbers; drawn once."""

    label: str
    repeats: int
    spec: Spec
    shards: tuple[DrawnShard, ...]

    @property
    def nbytes(self) -> int:
        """Return the bytes of all tensors of the row."""
        return self.repeats * self.spec.nbytes

    @property
    def remarks(self) -> tuple[str, ...]:
        """Return remarks for the reader if the shards are not equal slices along axis 0."""
        is_even = len({shard.nbytes for shard in self.shards}) < 2
        axes = self.cut.axes
        along = f"by {'axis' if len(axes) == 1 else 'axes'} {' and '.join(map(str, axes))}"
        shape = [] if axes in ((), (0,)) else ["flat" if self.cut.is_flat else along]
        return (*([] if is_even else ["uneven"]), *shape)

    @cached_property
    def cut(self) -> Cut:
        return boxes_to_rectangles(self.spec.shape, [shard.box for shard in self.shards])


@dataclass(frozen=True, slots=True)
class ShardMap:
    """The owners of a checkpoint's shards, and its tensors in the order of their names. `by` is "rank" or "file"."""

    by: str
    owners: tuple[Owner, ...]
    rows: tuple[Row, ...]

    @property
    def mean(self) -> float:
        return sum(owner.nbytes for owner in self.owners) / max(1, len(self.owners))

    @staticmethod
    def rows_by_prefix(rows: Sequence[Row]) -> list[tuple[str, tuple[Row, ...]]]:
        """Return the rows grouped by the first component of their names, each group with its common prefix."""
        groups = []
        for _, members in groupby(rows, key=lambda row: row.label.partition(".")[0]):
            group = tuple(members)
            modules = [row.label.split(".")[:-1] for row in group]
            common = common_leading_words(modules) if len(group) > 1 else []
            groups.append(("".join(f"{module}." for module in common), group))
        return groups

    def split_off_largest_rows(self, count: int) -> tuple[tuple[Row, ...], tuple[Row, ...]]:
        """Return the `count` rows with the most bytes, in their original order, and the other rows."""
        kept = {id(row) for row in sorted(self.rows, key=lambda row: -row.nbytes)[:count]}
        shown = tuple(row for row in self.rows if id(row) in kept)
        return shown, tuple(row for row in self.rows if id(row) not in kept)


def map_shards(layout: Layout) -> ShardMap:
    """Return the shard map of a layout."""
    used = {chunk.path for tensor in layout.tensors.values() for chunk in tensor.chunks if chunk.box.numel}
    files = sorted(used | {blob.path for blob in layout.blobs.values()})
    ranks = {path: get_format(layout.format).rank_of(PurePath(path).name) for path in files}
    by_rank = bool(files) and None not in ranks.values()
    numbers = {path: rank for path, rank in ranks.items() if rank is not None}
    if not by_rank:
        numbers = {path: at for at, path in enumerate(files, start=1)}
    lengths: dict[tuple[str, int], int] = {}  # by file and offset: data that several names share counts once
    for tensor in layout.tensors.values():
        for chunk in tensor.chunks:
            if chunk.box.numel:
                nbytes = chunk.box.numel * chunk.dtype.itemsize
                lengths[chunk.path, chunk.offset] = max(nbytes, lengths.get((chunk.path, chunk.offset), 0))
    lengths.update({(blob.path, blob.offset): blob.length for blob in layout.blobs.values()})
    sizes: Counter[int] = Counter()
    for (path, _), nbytes in lengths.items():
        sizes[numbers[path]] += nbytes
    # show ranks that have no data too
    if by_rank and layout.world_size is not None and len(sizes) < layout.world_size > max(sizes):
        sizes.update(dict.fromkeys(range(layout.world_size), 0))
    names = {} if by_rank else {number: path for path, number in numbers.items()}
    owners = [Owner(str(number), names.get(number, f"rank {number}"), sizes[number]) for number in sorted(sizes)]
    positions = {number: position for position, number in enumerate(sorted(sizes))}
    positioned = {path: positions[number] for path, number in numbers.items()}
    return ShardMap("rank" if by_rank else "file", tuple(owners), tuple(fold_similar_tensors(layout, positioned)))


def fold_similar_tensors(layout: Layout, owner_of: Mapping[str, int]) -> Iterator[Row]:
    """Yield the rows of a layout. Tensors share a row if spec and shards are equal and only numbers in names differ.

    `owner_of` has the owner's position by file.
    """
    alike: dict[object, list[str]] = {}
    shards: dict[object, tuple[DrawnShard, ...]] = {}
    for name, tensor in layout.tensors.items():
        cuts = tuple(
            DrawnShard(owner_of[chunk.path], chunk.box, chunk.path, chunk.box.numel * chunk.dtype.itemsize)
            for chunk in sorted(tensor.chunks, key=lambda chunk: chunk.start)
            if chunk.box.numel
        )
        # the innermost numbered module, with numbers replaced by 0, or else the tensor's module
        *steps, _ = name.split(".")
        last = max((i for i, step in enumerate(steps) if is_numeric_component(step)), default=len(steps) - 1)
        module = ".".join("0" if is_numeric_component(step) else step for step in steps[: last + 1])
        key = (module, len(steps), tensor.spec, tuple((shard.owner, shard.box) for shard in cuts))
        alike.setdefault(key, []).append(name)
        shards.setdefault(key, cuts)
    for same, names in alike.items():
        yield Row(merged_label(names), len(names), layout.tensors[names[0]].spec, shards[same])


def is_numeric_component(component: str) -> bool:
    """Return True for a component of a name that is a number, such as a layer's."""
    return component.isascii() and component.isdecimal() and len(component) < 10


def merged_label(names: Sequence[str]) -> str:
    """Return one label for names with equally many components: `layers.0-31.self_attn.{q_proj,o_proj}.weight`."""
    return ".".join(map(merge_name_components, zip(*(name.split(".") for name in names), strict=True)))


def merge_name_components(components: Sequence[str]) -> str:
    """Return one component for the same component of several names: ranges of numbers, or up to three words.

    Common parts of words are written once: `{gate,up}_proj`, `exp_avg{,_sq}`.
    """
    words = list(dict.fromkeys(components))
    if len(words) == 1:
        return words[0]
    if all(map(is_numeric_component, words)):
        return format_ranges(set(map(int, words)))
    parts = [word.split("_") for word in words]
    head = common_leading_words(parts)
    rests = [part[len(head) :] for part in parts]
    tail = common_leading_words([rest[::-1] for rest in rests])[::-1]
    middles = ["_".join(rest[: len(rest) - len(tail)]) for rest in rests]
    if "" in middles:
        middles, tail = ["".join(f"_{part}" for part in rest) for rest in rests], []
    elif head:
        head = [*head, ""]
    end = f"_{'_'.join(tail)}" if tail else ""
    return f"{'_'.join(head)}{{{','.join([*middles[:3], *['…'] * (len(middles) > 3)])}}}{end}"


def common_leading_words(sequences: Sequence[Sequence[str]]) -> list[str]:
    columns = zip(*sequences, strict=False)
    return [column[0] for column in takewhile(lambda column: len(set(column)) == 1, columns)]


def format_ranges(numbers: set[int]) -> str:
    """Return numbers as `0-3,5,8-9`; with more than four ranges as `first..last`."""
    text = format_number_ranges(sorted(numbers))
    return f"{min(numbers)}..{max(numbers)}" if text.count(",") > 3 else text

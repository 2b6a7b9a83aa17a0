"""Find who holds which part of a checkpoint, as rectangles, folded so that a thousand tensors fit a picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby, takewhile
from math import prod
from pathlib import PurePath

from ckptkit.formats import get_format
from ckptkit.layout import Layout, Spec, StoredTensor
from ckptkit.layout.box import Box, Shape


@dataclass(frozen=True, slots=True)
class Rectangle:
    """A part of the unit square; by default the whole of it."""

    left: float = 0.0
    right: float = 1.0
    top: float = 0.0
    bottom: float = 1.0


@dataclass(frozen=True, slots=True)
class Cut:
    """The rectangle of each box, in their order, and the axes that are cut. Flat ones are drawn by their bytes."""

    rectangles: tuple[Rectangle, ...]
    axes: tuple[int, ...] = ()
    is_flat: bool = False

    @property
    def is_grid(self) -> bool:
        """Return True if it is drawn along two axes."""
        return len(self.axes) == 2 and not self.is_flat


def cut(shape: Shape, boxes: Sequence[Box]) -> Cut:
    """Draw boxes that tile a tensor: along the axis that is cut, in the order of its bytes, or along two axes.

    Boxes cut along more axes than two lie side by side, each as wide as its share.
    """
    axes = tuple(axis for axis, extent in enumerate(shape) if any(box.size[axis] != extent for box in boxes))
    if not axes:
        return Cut((Rectangle(),) * len(boxes))
    if len(axes) == 1:
        return Cut(tuple(Rectangle(*span(box, shape, axes[0])) for box in boxes), axes)
    if all(is_run(box, shape) for box in boxes):
        return Cut(tuple(Rectangle(*run(box, shape)) for box in boxes), axes, is_flat=True)
    if len(axes) == 2:
        down, across = axes
        grid = tuple(Rectangle(*span(box, shape, across), *span(box, shape, down)) for box in boxes)
        return Cut(grid, axes)
    ends = list(accumulate(box.numel / prod(shape) for box in boxes))
    shares = zip([0.0, *ends], ends, strict=False)
    return Cut(tuple(Rectangle(left, right) for left, right in shares), axes)


def span(box: Box, shape: Shape, axis: int) -> tuple[float, float]:
    return box.start[axis] / shape[axis], (box.start[axis] + box.size[axis]) / shape[axis]


def is_run(box: Box, shape: Shape) -> bool:
    """Return True if the elements of a box follow one another in row-major order, as those of a flat shard do."""
    first = next((axis for axis, extent in enumerate(box.size) if extent != 1), len(shape))
    return box.size[first + 1 :] == shape[first + 1 :]


def run(box: Box, shape: Shape) -> tuple[float, float]:
    """Return the start and the end of a run's elements among all, in row-major order, as fractions."""
    start = sum(index * prod(shape[axis + 1 :]) for axis, index in enumerate(box.start))
    return start / prod(shape), (start + box.numel) / prod(shape)


@dataclass(frozen=True, slots=True)
class Owner:
    """A holder of parts of a checkpoint: a rank, or a file where ranks do not show. `mark` is its number."""

    mark: str
    name: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class DrawnShard:
    """A part of a tensor: the position of its owner, its box, its file, and its bytes."""

    owner: int
    box: Box
    path: str
    nbytes: int


@dataclass(frozen=True)
class Row:
    """Tensors that are alike, of numbered modules that are alike, and cut in the same way; one of them is drawn."""

    label: str
    repeats: int
    spec: Spec
    shards: tuple[DrawnShard, ...]

    @property
    def nbytes(self) -> int:
        """Return the bytes of all of them."""
        return self.repeats * self.spec.nbytes

    @property
    def is_even(self) -> bool:
        """Return True if all parts have the same size."""
        return len({shard.nbytes for shard in self.shards}) < 2

    @property
    def remarks(self) -> tuple[str, ...]:
        """Return words on how its parts differ from equal parts of its rows."""
        axes = self.cut.axes
        along = f"by {'axis' if len(axes) == 1 else 'axes'} {' and '.join(map(str, axes))}"
        by_rows = axes in ((), (0,))
        shape = [] if by_rows else ["flat" if self.cut.is_flat else along]
        return (*([] if self.is_even else ["uneven"]), *shape)

    @cached_property
    def cut(self) -> Cut:
        """Return how to draw the shards."""
        return cut(self.spec.shape, [shard.box for shard in self.shards])


@dataclass(frozen=True, slots=True)
class ShardMap:
    """The owners of a checkpoint's parts, and its tensors in the order of their names. `by` is "rank" or "file"."""

    by: str
    owners: tuple[Owner, ...]
    rows: tuple[Row, ...]

    @property
    def mean(self) -> float:
        """Return the bytes that each owner would hold if all held the same."""
        return sum(owner.nbytes for owner in self.owners) / max(1, len(self.owners))

    @staticmethod
    def headed(rows: Sequence[Row]) -> list[tuple[str, tuple[Row, ...]]]:
        """Return rows grouped by the first step of their names, each group with the start that all its names share."""
        groups = [tuple(group) for _, group in groupby(rows, key=lambda row: row.label.partition(".")[0])]
        return [(shared_start([row.label for row in group]), group) for group in groups]

    def largest(self, count: int) -> tuple[tuple[Row, ...], tuple[Row, ...]]:
        """Return the `count` rows with the most bytes, in the order of all, and the rows left out."""
        kept = {id(row) for row in sorted(self.rows, key=lambda row: -row.nbytes)[:count]}
        shown = tuple(row for row in self.rows if id(row) in kept)
        return shown, tuple(row for row in self.rows if id(row) not in kept)


def map_shards(layout: Layout) -> ShardMap:
    """Return who holds which part of each tensor of a layout."""
    files = files_of(layout)
    ranks = {path: get_format(layout.format).rank_of(PurePath(path).name) for path in files}
    by_rank = bool(files) and None not in ranks.values()
    numbers = {path: rank for path, rank in ranks.items() if rank is not None} if by_rank else number(files)
    held = bytes_by(layout, numbers.__getitem__)
    if by_rank and layout.world_size is not None and len(held) < layout.world_size > max(held):
        held.update(dict.fromkeys(range(layout.world_size), 0))
    names = {} if by_rank else {at: path for path, at in numbers.items()}
    owners = [Owner(str(at), names.get(at, f"rank {at}"), held[at]) for at in sorted(held)]
    positions = {at: position for position, at in enumerate(sorted(held))}
    positioned = {path: positions[at] for path, at in numbers.items()}
    return ShardMap("rank" if by_rank else "file", tuple(owners), tuple(fold(layout, positioned.__getitem__)))


def files_of(layout: Layout) -> list[str]:
    """Return the files with data, by name."""
    used = {chunk.path for tensor in layout.tensors.values() for chunk in tensor.chunks if chunk.box.numel}
    return sorted(used | {blob.path for blob in layout.blobs.values()})


def number(files: Sequence[str]) -> dict[str, int]:
    """Return a number for each file, from 1."""
    return {path: at for at, path in enumerate(files, start=1)}


def bytes_by(layout: Layout, owner_of: Callable[[str], int]) -> Counter[int]:
    """Return the bytes of tensors and blobs by owner. Parts that several names share count once."""
    places: dict[tuple[str, int], int] = {}
    for tensor in layout.tensors.values():
        for chunk in tensor.chunks:
            if chunk.box.numel:
                nbytes = chunk.box.numel * chunk.dtype.itemsize
                places[chunk.path, chunk.offset] = max(nbytes, places.get((chunk.path, chunk.offset), 0))
    places.update({(blob.path, blob.offset): blob.length for blob in layout.blobs.values()})
    held: Counter[int] = Counter()
    for (path, _), nbytes in places.items():
        held[owner_of(path)] += nbytes
    return held


def fold(layout: Layout, owner_of: Callable[[str], int]) -> Iterator[Row]:
    """Yield the tensors as rows: tensors of modules that differ in numbers only are one row if cut alike."""
    alike: dict[object, list[str]] = {}
    shards: dict[object, tuple[DrawnShard, ...]] = {}
    for name, tensor in layout.tensors.items():
        cuts = tuple(shards_of(tensor, owner_of))
        key = (*module_of(name), tensor.spec, tuple((shard.owner, shard.box) for shard in cuts))
        alike.setdefault(key, []).append(name)
        shards.setdefault(key, cuts)
    for same, names in alike.items():
        yield Row(label(names), len(names), layout.tensors[names[0]].spec, shards[same])


def module_of(name: str) -> tuple[str, int]:
    """Return the numbered module that a tensor is in, with 0 for its number, or else its module; and its depth."""
    *steps, _ = name.split(".")
    last = max((i for i, step in enumerate(steps) if is_number(step)), default=len(steps) - 1)
    return ".".join("0" if is_number(step) else step for step in steps[: last + 1]), len(steps)


def is_number(step: str) -> bool:
    """Return True for a step of a name that is a number, like a layer's."""
    return step.isascii() and step.isdecimal() and len(step) < 10


def shards_of(tensor: StoredTensor, owner_of: Callable[[str], int]) -> Iterator[DrawnShard]:
    """Yield the parts of a tensor that hold anything, in the order of their elements."""
    for chunk in sorted(tensor.chunks, key=lambda chunk: chunk.start):
        if chunk.box.numel:
            yield DrawnShard(owner_of(chunk.path), chunk.box, chunk.path, chunk.box.numel * chunk.dtype.itemsize)


def label(names: Sequence[str]) -> str:
    """Return one name for several of as many steps: `layers.0-31.self_attn.{q_proj,o_proj}.weight`."""
    return ".".join(map(merge, zip(*(name.split(".") for name in names), strict=True)))


def shared_start(labels: Sequence[str]) -> str:
    """Return the steps that several names begin with, with a dot at the end; nothing for one name alone."""
    if len(labels) == 1:
        return ""
    return "".join(f"{step}." for step in shared_words([label.split(".")[:-1] for label in labels]))


def merge(steps: Sequence[str]) -> str:
    """Return one step for the steps of several names at one place: ranges of numbers, or up to three words."""
    words = list(dict.fromkeys(steps))
    if len(words) == 1:
        return words[0]
    if all(map(is_number, words)):
        return ranges(set(map(int, words)))
    return brace([word.split("_") for word in words])


def brace(words: Sequence[list[str]]) -> str:
    """Return several words as one, with shared parts written once: `{gate,up}_proj`, `exp_avg{,_sq}`."""
    head = shared_words(words)
    rests = [word[len(head) :] for word in words]
    tail = shared_words([rest[::-1] for rest in rests])[::-1]
    middles = ["_".join(rest[: len(rest) - len(tail)]) for rest in rests]
    if "" in middles:
        middles, tail = ["".join(f"_{part}" for part in rest) for rest in rests], []
    elif head:
        head = [*head, ""]
    end = f"_{'_'.join(tail)}" if tail else ""
    return f"{'_'.join(head)}{{{','.join([*middles[:3], *['…'] * (len(middles) > 3)])}}}{end}"


def shared_words(sequences: Sequence[Sequence[str]]) -> list[str]:
    columns = zip(*sequences, strict=False)
    return [column[0] for column in takewhile(lambda column: len(set(column)) == 1, columns)]


def ranges(numbers: set[int]) -> str:
    """Return numbers as `0-3,5,8-9`; of very many the first and the last."""
    ordered = sorted(numbers)
    starts = [n for n in ordered if n - 1 not in numbers]
    ends = [n for n in ordered if n + 1 not in numbers]
    if len(starts) > 4:
        return f"{ordered[0]}..{ordered[-1]}"
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))

"""Edit the axes of stored tensors: cut, join, split, merge and permute them. Only boxes change; no data is read.

All name maps between model families are built from these operations. A fused, grouped `qkv` is an axis split into
`(groups, heads + 2, width)`, cut, and merged again. Rotary embeddings with another row order are an axis split into
`(heads, width / 2, 2)` whose last two axes are swapped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from math import prod
from typing import NamedTuple

from ckptkit.errors import Corrupt, Mismatch, Unsupported
from ckptkit.layout import Chunk, Spec, Splits, StoredTensor
from ckptkit.layout.box import Box, Shape, intersect, row_major


def boxes_of_range(shape: Shape, start: int, stop: int) -> Iterator[tuple[Box, int]]:
    """Yield boxes that tile elements `start:stop` of a flattened, row-major tensor of `shape`, each with its offset.

    The offset counts elements from `start`, and the elements of a box are contiguous from there. At most `2 * ndim - 1`
    boxes; for a matrix: the end of a row, full rows, and the beginning of a row.
    """
    steps = [prod(shape[axis + 1 :]) for axis in range(len(shape))]  # strides in elements
    at = start
    while at < stop and shape:
        axis = next(axis for axis, step in enumerate(steps) if at % step == 0 and at + step <= stop)
        index = tuple(at // step % extent for step, extent in zip(steps, shape, strict=True))
        count = min(shape[axis] - index[axis], (stop - at) // steps[axis])
        yield Box(index, ((1,) * axis + (count,) + shape[axis + 1 :])), at - start
        at += count * steps[axis]
    if not shape and start < stop:
        yield Box((), ()), 0


_MOST_CHUNKS = 1 << 20  # of one tensor


def cut(tensor: StoredTensor, axis: int, start: int, stop: int) -> StoredTensor:
    """Return the elements `start:stop` of an axis. Raises `Mismatch` if the axis has fewer."""
    shape = tensor.spec.shape
    if not 0 <= start <= stop <= shape[axis]:
        raise Mismatch(f"expected elements {start}:{stop} on axis {axis}, found shape {list(shape)}")
    if tensor.splits is not None:
        inner = prod(tensor.splits[axis][1:])
        if start % inner == 0 == stop % inner:
            return cut_split(tensor, tensor.splits, axis, start // inner, stop // inner)
    tensor = unsplit(tensor)
    corner = tuple(start if d == axis else 0 for d in range(len(shape)))
    kept = Box(corner, replace_at(shape, axis, 1, (stop - start,)))
    chunks = []
    for chunk in tensor.chunks:
        shared = intersect(chunk.box, kept)
        if shared is not None:
            piece = part_of(chunk, shared)
            chunks.append(piece._replace(box=shared.relative_to(kept)))
    return StoredTensor(Spec(tensor.spec.dtype, kept.size), tuple(chunks))


def cut_split(tensor: StoredTensor, splits: Splits, axis: int, start: int, stop: int) -> StoredTensor:
    """Return `start:stop` of the first axis that `axis` is split into; the other axes of the split stay complete."""
    apart = StoredTensor(Spec(tensor.spec.dtype, tensor.shape_of_chunks), tensor.chunks)
    first = sum(map(len, splits[:axis]))
    kept = cut(apart, first, start, stop)
    splits_left = (*splits[:axis], (stop - start, *splits[axis][1:]), *splits[axis + 1 :])
    return folded(kept, splits_left)


def folded(apart: StoredTensor, splits: Splits) -> StoredTensor:
    """Return a tensor with the axes of `apart` merged. Keeps `splits` if its chunks are not boxes then."""
    spec = Spec(apart.spec.dtype, tuple(map(prod, splits)))
    merged, shape = list(apart.chunks), apart.spec.shape
    for axis, extents in enumerate(splits):
        candidates = [merge_chunk(chunk, shape, axis, len(extents)) for chunk in merged]
        merged = [chunk for chunk in candidates if chunk is not None]
        if len(merged) < len(candidates):
            return StoredTensor(spec, apart.chunks, splits)
        shape = replace_at(shape, axis, len(extents), (prod(extents),))
    return StoredTensor(spec, tuple(merged))


def concatenate(tensors: Sequence[StoredTensor], axis: int) -> StoredTensor:
    """Concatenate tensors along an axis. Raises `Mismatch` unless dtypes and all other axes are equal."""
    tensors = [unsplit(tensor) for tensor in tensors]
    first = tensors[0].spec
    rest = {(t.spec.dtype, replace_at(t.spec.shape, axis, 1, ())) for t in tensors}
    if len(rest) != 1:
        raise Mismatch(f"cannot join these tensors along axis {axis}: {', '.join(str(t.spec) for t in tensors)}")
    chunks: list[Chunk] = []
    end = 0
    for tensor in tensors:
        chunks += (chunk._replace(box=shift(chunk.box, axis, end)) for chunk in tensor.chunks)
        end += tensor.spec.shape[axis]
    return StoredTensor(Spec(first.dtype, replace_at(first.shape, axis, 1, (end,))), tuple(chunks))


def stack(tensors: Sequence[StoredTensor]) -> StoredTensor:
    """Stack tensors of one shape along a new first axis. Raises `Mismatch` if shapes or dtypes differ."""
    return concatenate([insert(tensor) for tensor in tensors], 0)


def insert(tensor: StoredTensor) -> StoredTensor:
    """Return the tensor with a new first axis of size 1."""
    tensor = unsplit(tensor)
    chunks = (
        chunk._replace(
            box=Box((0, *chunk.start), (1, *chunk.size)),
            strides=None if chunk.strides is None else (1, *chunk.strides),
        )
        for chunk in tensor.chunks
    )
    return StoredTensor(Spec(tensor.spec.dtype, (1, *tensor.spec.shape)), tuple(chunks))


def take(tensor: StoredTensor, axis: int, index: int) -> StoredTensor:
    """Return the elements at one index of an axis, without the axis, such as one tensor of a stack."""
    at_index = cut(tensor, axis, index, index + 1)
    chunks = (
        chunk._replace(
            box=Box(replace_at(chunk.start, axis, 1, ()), replace_at(chunk.size, axis, 1, ())),
            strides=None if chunk.strides is None else replace_at(chunk.strides, axis, 1, ()),
        )
        for chunk in at_index.chunks
    )
    return StoredTensor(Spec(at_index.spec.dtype, replace_at(at_index.spec.shape, axis, 1, ())), tuple(chunks))


def unstack(tensor: StoredTensor) -> list[StoredTensor]:
    """Return the tensor at each index of the first axis, without the axis."""
    tensor, (count, *rest) = unsplit(tensor), tensor.spec.shape
    parts: list[list[Chunk]] = [[] for _ in range(count)]
    for chunk in tensor.chunks:
        corner, size, steps = chunk.start[1:], chunk.size[1:], steps_of(chunk)
        for i in range(chunk.size[0]):
            piece = view_of(chunk, Box(corner, size), i * steps[0], steps[1:])
            parts[chunk.start[0] + i].append(piece)
    return [StoredTensor(Spec(tensor.spec.dtype, tuple(rest)), tuple(chunks)) for chunks in parts]


def permute(tensor: StoredTensor, order: Sequence[int]) -> StoredTensor:
    """Return the tensor with its axes in another order, as in numpy's `transpose`."""
    tensor = unsplit(tensor)

    def moved(values: Shape) -> Shape:
        return tuple(values[axis] for axis in order)

    chunks = (
        chunk._replace(
            box=Box(moved(chunk.start), moved(chunk.size)),
            strides=are_plain(moved(steps_of(chunk)), moved(chunk.size)),
        )
        for chunk in tensor.chunks
    )
    return StoredTensor(Spec(tensor.spec.dtype, moved(tensor.spec.shape)), tuple(chunks))


def split(tensor: StoredTensor, axis: int, extents: Shape) -> StoredTensor:
    """Return the tensor with one axis split into several, row-major. Raises `Mismatch` if their product differs."""
    tensor, shape = unsplit(tensor), tensor.spec.shape
    if prod(extents) != shape[axis]:
        message = f"expected axis {axis} of size {prod(extents)} to split in {list(extents)}, found shape {list(shape)}"
        raise Mismatch(message)
    chunks = (piece for chunk in tensor.chunks for piece in split_chunk(chunk, axis, extents))
    return StoredTensor(Spec(tensor.spec.dtype, replace_at(shape, axis, 1, extents)), tuple(chunks))


def merge(tensor: StoredTensor, axis: int, count: int) -> StoredTensor:
    """Return the tensor with `count` axes from `axis` on merged into one; see `folded` for chunks that are no boxes."""
    tensor, shape = unsplit(tensor), tensor.spec.shape
    alone = tuple((extent,) for extent in shape)
    return folded(tensor, (*alone[:axis], shape[axis : axis + count], *alone[axis + count :]))


def resplit(tensor: StoredTensor, splits: Splits) -> StoredTensor:
    """Return the same tensor with chunks that are boxes after its axes are split as `splits` says."""
    if tensor.splits == splits:
        return tensor
    apart = unsplit(tensor)
    for axis in reversed(range(len(splits))):
        if len(splits[axis]) > 1:
            apart = split(apart, axis, splits[axis])
    return StoredTensor(tensor.spec, apart.chunks, splits)


def unsplit(tensor: StoredTensor) -> StoredTensor:
    """Return the tensor with boxes of its own axes, perhaps one per row. Raises `Unsupported` for over a million."""
    if tensor.splits is None:
        return tensor
    chunks, shape = list(tensor.chunks), sum(tensor.splits, ())
    for axis, extents in enumerate(tensor.splits):
        apart = [piece for chunk in chunks for piece in parts_that_merge(chunk, shape, axis, len(extents))]
        if len(apart) > _MOST_CHUNKS:
            raise Unsupported(
                f"expected at most {_MOST_CHUNKS} pieces of the tensor, found {len(apart)}: its rows "
                "would be reordered twice"
            )
        merged = (merge_chunk(chunk, shape, axis, len(extents)) for chunk in apart)
        chunks = [chunk for chunk in merged if chunk is not None]
        shape = replace_at(shape, axis, len(extents), (prod(extents),))
    return StoredTensor(tensor.spec, tuple(chunks))


def index_in(splits: Splits, index: Sequence[int]) -> tuple[int, ...]:
    """Return the index of an element in a tensor. `index` is its index with the axes split."""
    remaining, merged = list(index), []
    for extents in splits:
        parts, remaining = remaining[: len(extents)], remaining[len(extents) :]
        merged.append(sum(i * step for i, step in zip(parts, row_major(extents), strict=True)))
    return tuple(merged)


def part_of(chunk: Chunk, box: Box) -> Chunk:
    """Return a box of a chunk in the same file. Its checksum covers the bytes of the original chunk."""
    if box == chunk.box:
        return chunk
    begin = sum(a * step for a, step in zip(box.relative_to(chunk.box).start, steps_of(chunk), strict=True))
    return view_of(chunk, box, begin, steps_of(chunk))


def boxes_of_run(chunk: Chunk, begin: int, shape: Shape, start: int, stop: int) -> Iterator[Chunk]:
    """Yield elements `start:stop` of a flattened `shape` as boxes; a chunk of one axis has them from `begin` on."""
    if len(chunk.size) != 1:
        raise Corrupt(f"expected a flattened tensor with one axis, found shape {list(chunk.size)}")
    (step,) = steps_of(chunk)
    for box, at in boxes_of_range(shape, start, stop):
        yield view_of(chunk, box, (begin + at) * step, tuple(step * inner for inner in row_major(box.size)))


class FlatPiece(NamedTuple):
    """The elements `begin:end` of a flat tensor: the first elements of a chunk with one axis."""

    begin: int
    end: int
    chunk: Chunk


def pieces_in_turn(chunks: Iterable[tuple[Chunk, int]]) -> Iterator[FlatPiece]:
    """Yield consecutive pieces: the first elements of each chunk, as many as its count says, without padding."""
    begin = 0
    for chunk, numel in chunks:
        yield FlatPiece(begin, begin + numel, chunk)
        begin += numel


def cut_out(pieces: Iterable[FlatPiece], start: int, shape: Shape) -> Iterator[Chunk]:
    """Yield the chunks of a tensor of `shape` that begins at element `start` of a flat tensor with these pieces."""
    stop = start + prod(shape)
    for begin, end, chunk in pieces:
        low, high = max(start, begin), min(stop, end)
        if low < high:
            yield from boxes_of_run(chunk, low - begin, shape, low - start, high - start)


def view_of(chunk: Chunk, box: Box, begin: int, steps: Shape) -> Chunk:
    """Return elements of a chunk as box `box`: they begin `begin` elements after its first, with strides `steps`."""
    length = 1 + sum((n - 1) * step for n, step in zip(box.size, steps, strict=True)) if box.numel else 0
    location = (chunk.offset + begin * chunk.dtype.itemsize, length * chunk.dtype.itemsize)
    is_all = location == (chunk.offset, chunk.length)
    run = chunk.run if is_all else chunk.bytes
    return chunk._replace(box=box, offset=location[0], length=location[1], strides=are_plain(steps, box.size), run=run)


def split_chunk(chunk: Chunk, axis: int, extents: Shape) -> list[Chunk]:
    """Return a chunk as boxes of the tensor with one axis split."""
    steps, box = steps_of(chunk), chunk.box
    inner = tuple(steps[axis] * step for step in row_major(extents))
    return [
        view_of(
            chunk,
            Box(replace_at(box.start, axis, 1, part.start), replace_at(box.size, axis, 1, part.size)),
            begin * steps[axis],
            replace_at(steps, axis, 1, inner),
        )
        for part, begin in boxes_of_range(extents, box.start[axis], box.stop[axis])
    ]


def merge_chunk(chunk: Chunk, shape: Shape, axis: int, count: int) -> Chunk | None:
    """Return a chunk as a box of the tensor of `shape` with `count` axes merged; None if it is not a box then."""
    axes = range(axis, axis + count)
    start, size, steps = chunk.start, chunk.size, steps_of(chunk)
    long = [d for d in axes if size[d] > 1]
    if any(size[d] != shape[d] for d in axes if long and d > long[0]):
        return None
    if any(steps[d] != steps[d + 1] * shape[d + 1] for d in axes[:-1] if long and d >= long[0]):
        return None
    inner = row_major(shape[axis : axis + count])
    first = sum(start[d] * step for d, step in zip(axes, inner, strict=True))
    extent = prod(size[d] for d in axes)
    box = Box(replace_at(start, axis, count, (first,)), replace_at(size, axis, count, (extent,)))
    return chunk._replace(
        box=box, strides=are_plain(replace_at(steps, axis, count, (steps[axis + count - 1],)), box.size)
    )


def parts_that_merge(chunk: Chunk, shape: Shape, axis: int, count: int) -> list[Chunk]:
    """Return a chunk as boxes that remain boxes when `count` axes of the tensor of `shape` are merged."""
    for outer in range(count):
        outer_axes = range(axis, axis + outer)  # one index per box along each of these axes
        corners = product(*(range(chunk.start[d], chunk.box.stop[d]) for d in outer_axes))
        boxes = (
            Box(replace_at(chunk.start, axis, outer, corner), replace_at(chunk.size, axis, outer, (1,) * outer))
            for corner in corners
        )
        parts = [part_of(chunk, box) for box in boxes]
        if all(merge_chunk(piece, shape, axis, count) for piece in parts[:1]):
            return parts
    raise AssertionError("a single element is a box")


def steps_of(chunk: Chunk) -> Shape:
    return row_major(chunk.size) if chunk.strides is None else chunk.strides


def are_plain(steps: Shape, size: Shape) -> Shape | None:
    meant = row_major(size)
    return None if all(a == b or n == 1 for a, b, n in zip(steps, meant, size, strict=True)) else steps


def shift(box: Box, axis: int, by: int) -> Box:
    return Box(replace_at(box.start, axis, 1, (box.start[axis] + by,)), box.size)


def replace_at(values: Shape, axis: int, count: int, by: Shape) -> Shape:
    """Return a shape with `count` of its sizes replaced by others."""
    return values[:axis] + by + values[axis + count :]

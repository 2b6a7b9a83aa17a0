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
from ckptkit.layout.box import Box, Shape, intersect, row_major_strides


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


def narrow_axis(tensor: StoredTensor, axis: int, start: int, stop: int) -> StoredTensor:
    """Return the elements `start:stop` of an axis. Raises `Mismatch` if the axis has fewer."""
    shape = tensor.spec.shape
    if not 0 <= start <= stop <= shape[axis]:
        raise Mismatch(f"expected elements {start}:{stop} on axis {axis}, found shape {list(shape)}")
    if tensor.splits is not None:
        splits, inner = tensor.splits, prod(tensor.splits[axis][1:])
        if start % inner == 0 == stop % inner:  # cut the first axis that `axis` is split into; its other axes stay
            apart = StoredTensor(Spec(tensor.spec.dtype, tensor.shape_tiled_by_chunks), tensor.chunks)
            cut = narrow_axis(apart, sum(map(len, splits[:axis])), start // inner, stop // inner)
            extents = ((stop - start) // inner, *splits[axis][1:])
            return with_axes_merged(cut, (*splits[:axis], extents, *splits[axis + 1 :]))
    tensor = with_unsplit_chunks(tensor)
    corner = tuple(start if d == axis else 0 for d in range(len(shape)))
    kept = Box(corner, replace_sizes_at(shape, axis, 1, (stop - start,)))
    chunks = []
    for chunk in tensor.chunks:
        shared = intersect(chunk.box, kept)
        if shared is not None:
            piece = cut_chunk_to_box(chunk, shared)
            chunks.append(piece._replace(box=shared.relative_to(kept)))
    return StoredTensor(Spec(tensor.spec.dtype, kept.size), tuple(chunks))


def with_axes_merged(tensor: StoredTensor, splits: Splits) -> StoredTensor:
    """Return a tensor with the axes of `tensor` merged. Keeps `splits` if its chunks are not boxes then."""
    spec = Spec(tensor.spec.dtype, tuple(map(prod, splits)))
    merged, shape = list(tensor.chunks), tensor.spec.shape
    for axis, extents in enumerate(splits):
        candidates = [try_merge_chunk_axes(chunk, shape, axis, len(extents)) for chunk in merged]
        merged = [chunk for chunk in candidates if chunk is not None]
        if len(merged) < len(candidates):
            return StoredTensor(spec, tensor.chunks, splits)
        shape = replace_sizes_at(shape, axis, len(extents), (prod(extents),))
    return StoredTensor(spec, tuple(merged))


def concatenate(tensors: Sequence[StoredTensor], axis: int) -> StoredTensor:
    """Concatenate tensors along an axis. Raises `Mismatch` unless dtypes and all other axes are equal."""
    tensors = [with_unsplit_chunks(tensor) for tensor in tensors]
    first = tensors[0].spec
    rest = {(t.spec.dtype, replace_sizes_at(t.spec.shape, axis, 1, ())) for t in tensors}
    if len(rest) != 1:
        raise Mismatch(f"cannot join these tensors along axis {axis}: {', '.join(str(t.spec) for t in tensors)}")
    chunks: list[Chunk] = []
    end = 0
    for tensor in tensors:
        chunks += (chunk._replace(box=shift_box(chunk.box, axis, end)) for chunk in tensor.chunks)
        end += tensor.spec.shape[axis]
    return StoredTensor(Spec(first.dtype, replace_sizes_at(first.shape, axis, 1, (end,))), tuple(chunks))


def stack_tensors(tensors: Sequence[StoredTensor]) -> StoredTensor:
    """Stack tensors of one shape along a new first axis. Raises `Mismatch` if shapes or dtypes differ."""
    return concatenate([with_new_first_axis(tensor) for tensor in tensors], 0)


def with_new_first_axis(tensor: StoredTensor) -> StoredTensor:
    """Return the tensor with a new first axis of size 1."""
    tensor = with_unsplit_chunks(tensor)
    chunks = (
        chunk._replace(
            box=Box((0, *chunk.start), (1, *chunk.size)),
            strides=None if chunk.strides is None else (1, *chunk.strides),
        )
        for chunk in tensor.chunks
    )
    return StoredTensor(Spec(tensor.spec.dtype, (1, *tensor.spec.shape)), tuple(chunks))


def take_at_index(tensor: StoredTensor, axis: int, index: int) -> StoredTensor:
    """Return the elements at one index of an axis, without the axis, such as one tensor of a stack."""
    at_index = narrow_axis(tensor, axis, index, index + 1)
    chunks = (
        chunk._replace(
            box=Box(replace_sizes_at(chunk.start, axis, 1, ()), replace_sizes_at(chunk.size, axis, 1, ())),
            strides=None if chunk.strides is None else replace_sizes_at(chunk.strides, axis, 1, ()),
        )
        for chunk in at_index.chunks
    )
    return StoredTensor(Spec(at_index.spec.dtype, replace_sizes_at(at_index.spec.shape, axis, 1, ())), tuple(chunks))


def unstack(tensor: StoredTensor) -> list[StoredTensor]:
    """Return the tensor at each index of the first axis, without the axis."""
    tensor, (count, *rest) = with_unsplit_chunks(tensor), tensor.spec.shape
    parts: list[list[Chunk]] = [[] for _ in range(count)]
    for chunk in tensor.chunks:
        corner, size, steps = chunk.start[1:], chunk.size[1:], strides_of_chunk(chunk)
        for i in range(chunk.size[0]):
            piece = strided_chunk_view(chunk, Box(corner, size), i * steps[0], steps[1:])
            parts[chunk.start[0] + i].append(piece)
    return [StoredTensor(Spec(tensor.spec.dtype, tuple(rest)), tuple(chunks)) for chunks in parts]


def permute_axes(tensor: StoredTensor, order: Sequence[int]) -> StoredTensor:
    """Return the tensor with its axes in another order, as in numpy's `transpose`."""
    tensor = with_unsplit_chunks(tensor)

    def moved(values: Shape) -> Shape:
        return tuple(values[axis] for axis in order)

    chunks = (
        chunk._replace(
            box=Box(moved(chunk.start), moved(chunk.size)),
            strides=strides_unless_row_major(moved(strides_of_chunk(chunk)), moved(chunk.size)),
        )
        for chunk in tensor.chunks
    )
    return StoredTensor(Spec(tensor.spec.dtype, moved(tensor.spec.shape)), tuple(chunks))


def split_axis(tensor: StoredTensor, axis: int, extents: Shape) -> StoredTensor:
    """Return the tensor with one axis split into several, row-major. Raises `Mismatch` if their product differs."""
    tensor, shape = with_unsplit_chunks(tensor), tensor.spec.shape
    if prod(extents) != shape[axis]:
        message = f"expected axis {axis} of size {prod(extents)} to split in {list(extents)}, found shape {list(shape)}"
        raise Mismatch(message)
    chunks = []
    for chunk in tensor.chunks:
        box, steps = chunk.box, strides_of_chunk(chunk)
        inner = tuple(steps[axis] * step for step in row_major_strides(extents))
        strides = replace_sizes_at(steps, axis, 1, inner)
        for part, begin in boxes_of_range(extents, box.start[axis], box.stop[axis]):
            start = replace_sizes_at(box.start, axis, 1, part.start)
            size = replace_sizes_at(box.size, axis, 1, part.size)
            chunks.append(strided_chunk_view(chunk, Box(start, size), begin * steps[axis], strides))
    return StoredTensor(Spec(tensor.spec.dtype, replace_sizes_at(shape, axis, 1, extents)), tuple(chunks))


def merge_axes(tensor: StoredTensor, axis: int, count: int) -> StoredTensor:
    """Return the tensor with `count` axes from `axis` on merged; see `with_axes_merged` for chunks that no box is."""
    tensor, shape = with_unsplit_chunks(tensor), tensor.spec.shape
    alone = tuple((extent,) for extent in shape)
    return with_axes_merged(tensor, (*alone[:axis], shape[axis : axis + count], *alone[axis + count :]))


def with_split_chunks(tensor: StoredTensor, splits: Splits) -> StoredTensor:
    """Return the same tensor with chunks that are boxes after its axes are split as `splits` says."""
    if tensor.splits == splits:
        return tensor
    apart = with_unsplit_chunks(tensor)
    for axis in reversed(range(len(splits))):
        if len(splits[axis]) > 1:
            apart = split_axis(apart, axis, splits[axis])
    return StoredTensor(tensor.spec, apart.chunks, splits)


def with_unsplit_chunks(tensor: StoredTensor) -> StoredTensor:
    """Return the tensor with boxes of its own axes, perhaps one per row. Raises `Unsupported` for over a million."""
    if tensor.splits is None:
        return tensor
    chunks, shape = list(tensor.chunks), sum(tensor.splits, ())
    for axis, extents in enumerate(tensor.splits):
        apart = [
            piece for chunk in chunks for piece in split_chunk_before_merging_axes(chunk, shape, axis, len(extents))
        ]
        if len(apart) > _MOST_CHUNKS:
            needed = f"it would need {len(apart):,} byte ranges (at most {_MOST_CHUNKS:,})"
            raise Unsupported(f"ckptkit cannot rearrange this tensor: its rows are interleaved already, and {needed}")
        merged = (try_merge_chunk_axes(chunk, shape, axis, len(extents)) for chunk in apart)
        chunks = [chunk for chunk in merged if chunk is not None]
        shape = replace_sizes_at(shape, axis, len(extents), (prod(extents),))
    return StoredTensor(tensor.spec, tuple(chunks))


def unsplit_index(splits: Splits, index: Sequence[int]) -> tuple[int, ...]:
    """Return the index of an element in a tensor. `index` is its index with the axes split."""
    remaining, merged = list(index), []
    for extents in splits:
        parts, remaining = remaining[: len(extents)], remaining[len(extents) :]
        merged.append(sum(i * step for i, step in zip(parts, row_major_strides(extents), strict=True)))
    return tuple(merged)


def cut_chunk_to_box(chunk: Chunk, box: Box) -> Chunk:
    """Return a box of a chunk in the same file. Its checksum covers the bytes of the original chunk."""
    if box == chunk.box:
        return chunk
    begin = sum(a * step for a, step in zip(box.relative_to(chunk.box).start, strides_of_chunk(chunk), strict=True))
    return strided_chunk_view(chunk, box, begin, strides_of_chunk(chunk))


def chunks_of_flat_range(chunk: Chunk, first_in_chunk: int, shape: Shape, start: int, stop: int) -> Iterator[Chunk]:
    """Yield elements `start:stop` of a flattened `shape` as boxes; a flat chunk has them from `first_in_chunk` on."""
    if len(chunk.size) != 1:
        raise Corrupt(f"expected a flattened tensor with one axis, found shape {list(chunk.size)}")
    (step,) = strides_of_chunk(chunk)
    for box, at in boxes_of_range(shape, start, stop):
        yield strided_chunk_view(
            chunk, box, (first_in_chunk + at) * step, tuple(step * inner for inner in row_major_strides(box.size))
        )


class FlatPiece(NamedTuple):
    """The elements `begin:end` of a flat tensor: the first elements of a chunk with one axis."""

    begin: int
    end: int
    chunk: Chunk


def flat_pieces_of_chunks(chunks: Iterable[tuple[Chunk, int]]) -> Iterator[FlatPiece]:
    """Yield consecutive pieces: the first elements of each chunk, as many as its count says, without padding."""
    begin = 0
    for chunk, numel in chunks:
        yield FlatPiece(begin, begin + numel, chunk)
        begin += numel


def cut_tensor_from_flat(pieces: Iterable[FlatPiece], start: int, shape: Shape) -> Iterator[Chunk]:
    """Yield the chunks of a tensor of `shape` that begins at element `start` of a flat tensor with these pieces."""
    stop = start + prod(shape)
    for begin, end, chunk in pieces:
        low, high = max(start, begin), min(stop, end)
        if low < high:
            yield from chunks_of_flat_range(chunk, low - begin, shape, low - start, high - start)


def strided_chunk_view(chunk: Chunk, box: Box, begin: int, strides: Shape) -> Chunk:
    """Return elements of a chunk as box `box`: they begin `begin` elements after its first, with strides `strides`."""
    length = 1 + sum((n - 1) * step for n, step in zip(box.size, strides, strict=True)) if box.numel else 0
    location = (chunk.offset + begin * chunk.dtype.itemsize, length * chunk.dtype.itemsize)
    is_all = location == (chunk.offset, chunk.length)
    run = chunk.run if is_all else chunk.checksummed_range
    return chunk._replace(
        box=box, offset=location[0], length=location[1], strides=strides_unless_row_major(strides, box.size), run=run
    )


def try_merge_chunk_axes(chunk: Chunk, shape: Shape, axis: int, count: int) -> Chunk | None:
    """Return a chunk as a box of the tensor of `shape` with `count` axes merged; None if it is not a box then."""
    axes = range(axis, axis + count)
    start, size, steps = chunk.start, chunk.size, strides_of_chunk(chunk)
    long = [d for d in axes if size[d] > 1]
    if any(size[d] != shape[d] for d in axes if long and d > long[0]):
        return None
    if any(steps[d] != steps[d + 1] * shape[d + 1] for d in axes[:-1] if long and d >= long[0]):
        return None
    inner = row_major_strides(shape[axis : axis + count])
    first = sum(start[d] * step for d, step in zip(axes, inner, strict=True))
    extent = prod(size[d] for d in axes)
    box = Box(replace_sizes_at(start, axis, count, (first,)), replace_sizes_at(size, axis, count, (extent,)))
    return chunk._replace(
        box=box,
        strides=strides_unless_row_major(replace_sizes_at(steps, axis, count, (steps[axis + count - 1],)), box.size),
    )


def split_chunk_before_merging_axes(chunk: Chunk, shape: Shape, axis: int, count: int) -> list[Chunk]:
    """Return a chunk as boxes that remain boxes when `count` axes of the tensor of `shape` are merged."""
    for outer in range(count):
        outer_axes = range(axis, axis + outer)  # one index per box along each of these axes
        corners = product(*(range(chunk.start[d], chunk.box.stop[d]) for d in outer_axes))
        boxes = (
            Box(
                replace_sizes_at(chunk.start, axis, outer, corner),
                replace_sizes_at(chunk.size, axis, outer, (1,) * outer),
            )
            for corner in corners
        )
        parts = [cut_chunk_to_box(chunk, box) for box in boxes]
        if all(try_merge_chunk_axes(piece, shape, axis, count) for piece in parts[:1]):
            return parts
    raise AssertionError("a single element is a box")


def strides_of_chunk(chunk: Chunk) -> Shape:
    return row_major_strides(chunk.size) if chunk.strides is None else chunk.strides


def strides_unless_row_major(strides: Shape, size: Shape) -> Shape | None:
    meant = row_major_strides(size)
    return None if all(a == b or n == 1 for a, b, n in zip(strides, meant, size, strict=True)) else strides


def shift_box(box: Box, axis: int, by: int) -> Box:
    return Box(replace_sizes_at(box.start, axis, 1, (box.start[axis] + by,)), box.size)


def replace_sizes_at(values: Shape, axis: int, count: int, replacement: Shape) -> Shape:
    """Return a shape with `count` of its sizes replaced by others."""
    return values[:axis] + replacement + values[axis + count :]

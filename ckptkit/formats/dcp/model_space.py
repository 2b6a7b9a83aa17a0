"""Give flattened optimizer states the shape of their parameters.

Source: megatron/core/dist_checkpointing/strategies/torch.py of core 0.12, for `fully_sharded_model_space` of its
distributed optimizer. For a parameter of shape [X, Y] that tensor-parallel ranks store as blocks of [x, y], `exp_avg`
has shape [X/x, Y/y, x y]: the position of a block in the grid of blocks, then the elements of the block in row-major
order. Each data-parallel rank has a contiguous range of the last axis.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from operator import add

from ckptkit.errors import Corrupt, Report
from ckptkit.formats.archives.locate import locate_in_archives
from ckptkit.layout import Chunk, Layout, Spec, StoredTensor
from ckptkit.layout.axes import chunks_of_flat_range
from ckptkit.layout.box import Box, Shape
from ckptkit.layout.edits import select_entries


def with_unflattened_states(layout: Layout, report: Report) -> Layout:
    """Return the layout with the optimizer states that are grids of flattened blocks in the shape of their parameters.

    Locates their chunks, which costs two small reads each. Reports a chunk that cannot be located and leaves its tensor
    unchanged, as well as all other tensors, and states whose parameter is missing.
    """
    shapes = {
        name: shape
        for name, key in layout.keys.items()
        if len(key) > 2 and name in layout.tensors and (shape := find_shape_of_parameter(layout, name)) is not None
    }
    if not shapes:
        return layout
    located = locate_in_archives(select_entries(replace(layout, blobs={}), shapes.__contains__), report)
    unfolded = {
        name: StoredTensor(Spec(tensor.spec.dtype, shapes[name]), tuple(unfold_chunks(located, name, shapes[name])))
        for name, tensor in located.tensors.items()
        if all(chunk.wrapper is None for chunk in tensor.chunks)
    }
    return replace(layout, tensors={**layout.tensors, **unfolded})


def find_shape_of_parameter(layout: Layout, name: str) -> Shape | None:
    """Return the shape of a state's parameter if the state is a grid of the parameter's blocks; else None."""
    key = layout.key(name)
    parameter = layout.tensors.get(str(key[-1])) if len(key) > 2 and key[-3] == "state" else None
    if parameter is None:
        return None
    shape, folded = parameter.spec.shape, layout.tensors[name].spec.shape
    if len(folded) != len(shape) + 1 or 0 in shape or 0 in folded:
        return None
    is_grid = all(n % parts == 0 for n, parts in zip(shape, folded, strict=False))
    return shape if is_grid and prod(folded) == prod(shape) else None


def unfold_chunks(layout: Layout, name: str, shape: Shape) -> Iterator[Chunk]:
    """Yield the chunks of a state as boxes of its parameter. Raises `Corrupt` for a chunk that spans several blocks."""
    tensor = layout.tensors[name]
    block = tuple(n // parts for n, parts in zip(shape, tensor.spec.shape, strict=False))
    for chunk in tensor.chunks:
        *grid, start = chunk.start
        *ones, length = chunk.size
        if set(ones) - {1} or chunk.strides is not None:
            what = f"a chunk at {list(chunk.start)} of size {list(chunk.size)}"
            message = f"{what} is not one contiguous run of a parameter"
            raise Corrupt(message, path=layout.root / chunk.path, tensor=name)
        corner = [i * n for i, n in zip(grid, block, strict=True)]
        row = chunk._replace(box=Box((start,), (length,)))
        for piece in chunks_of_flat_range(row, 0, block, start, start + length):
            yield piece._replace(box=Box(tuple(map(add, corner, piece.start)), piece.size))

"""Give flattened optimizer states the shape of their parameters.

Source: megatron/core/dist_checkpointing/strategies/torch.py of core 0.12, for `fully_sharded_model_space` of its
distributed optimizer. A parameter of shape [X, Y] that ranks of tensors hold in parts of [x, y] has moments of shape
[X/x, Y/y, x y]: the place of a part in the grid of all parts, and in the last axis its elements in their order, of
which each data-parallel rank has a run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from operator import add

from ckptkit.errors import Corrupt, Report
from ckptkit.formats.archives.locate import locate
from ckptkit.layout import Chunk, Layout, Spec, StoredTensor
from ckptkit.layout.axes import boxes_of_run
from ckptkit.layout.box import Box, Shape
from ckptkit.layout.edits import select


def unfold(layout: Layout, report: Report) -> Layout:
    """Return the layout with the moments that lie in a grid of flattened parts in the shape of their parameters.

    Their chunks are located, which costs two small reads for each; one that cannot be is reported, and its tensor left
    as it is, as are all others, and moments of a parameter that is not here.
    """
    shapes = {name: shape for name in layout.tensors if (shape := shape_of_parameter(layout, name)) is not None}
    if not shapes:
        return layout
    found = locate(select(replace(layout, blobs={}), shapes.__contains__), report)
    unfolded = {
        name: StoredTensor(Spec(tensor.spec.dtype, shapes[name]), tuple(unfold_chunks(found, name, shapes[name])))
        for name, tensor in found.tensors.items()
        if all(chunk.wrapper is None for chunk in tensor.chunks)
    }
    return replace(layout, tensors={**layout.tensors, **unfolded})


def shape_of_parameter(layout: Layout, name: str) -> Shape | None:
    """Return the shape of the parameter that a moment is of, if the moment lies in a grid of its parts; else None."""
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
    """Yield the boxes of a parameter that the chunks of a moment are of. Raises `Corrupt` for one of several parts."""
    tensor = layout.tensors[name]
    part = tuple(n // parts for n, parts in zip(shape, tensor.spec.shape, strict=False))
    for chunk in tensor.chunks:
        *grid, start = chunk.start
        *ones, length = chunk.size
        if set(ones) - {1} or chunk.strides is not None:
            message = (
                f"a chunk at {list(chunk.start)} of size {list(chunk.size)} is not one contiguous run of a parameter"
            )
            raise Corrupt(message, path=layout.root / chunk.path, tensor=name)
        corner = [i * n for i, n in zip(grid, part, strict=True)]
        row = chunk._replace(box=Box((start,), (length,)))
        for piece in boxes_of_run(row, 0, part, start, start + length):
            yield piece._replace(box=Box(tuple(map(add, corner, piece.start)), piece.size))

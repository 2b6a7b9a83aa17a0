"""Join the slices of tensor-parallel ranks, using the map that AutoTP saves with the model.

Source: deepspeed/checkpoint/affine.py and affine_ir_spec.md of DeepSpeed 0.19.8. For each rank the map lists pieces of
a parameter, with their position in the full tensor and in the slice of the rank, as offset and strides. Here both
positions are boxes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ckptkit.errors import Corrupt, Unsupported
from ckptkit.formats.shards.dtensors import unravel
from ckptkit.layout import Chunk, Spec, StoredTensor
from ckptkit.layout.axes import narrow_axis
from ckptkit.layout.box import Box, Shape, find_overlap, full_box, row_major_strides
from ckptkit.plugins.deepspeed.values import (
    dict_or_empty,
    require_count,
    require_counts,
    require_dict,
    require_each,
    require_type,
)

INFO, _MAP = "universal_checkpoint_info", "affine_map"
_VERSION = 1
_HINT = "gather it with DeepSpeed: `save_16bit_model`"


class SlicePiece(NamedTuple):
    """A box of the full parameter, and the box with the same elements in the slice of a rank."""

    in_whole: Box
    in_slice: Box
    is_first: bool  # no earlier rank has these elements


@dataclass(frozen=True, slots=True)
class SlicedParameter:
    """A parameter of full shape `shape`: for each rank the shape of its slice and the pieces in it."""

    name: str
    shape: Shape
    slices: tuple[tuple[Shape, tuple[SlicePiece, ...]], ...]

    def join_parts(self, parts: Sequence[StoredTensor]) -> StoredTensor:
        """Return the full tensor. Raises `Corrupt` if a slice has another shape or dtype than the map says."""
        chunks: list[Chunk] = []
        for rank, (part, (shape, pieces)) in enumerate(zip(parts, self.slices, strict=True)):
            if part.spec.shape != shape or part.spec.dtype != parts[0].spec.dtype:
                message = f"expected {list(shape)} on rank {rank} of tensor parallelism, found {part.spec}"
                raise Corrupt(message, tensor=self.name)
            for piece in pieces:
                chunks += chunks_of_slice_piece(part, piece) if piece.is_first else ()
        return StoredTensor(Spec(parts[0].spec.dtype, self.shape), tuple(chunks))

    def replicated_chunks(self, parts: Sequence[StoredTensor]) -> tuple[Chunk, ...]:
        """Return the chunks of all pieces that an earlier rank also has."""
        pairs = zip(parts, self.slices, strict=True)
        return tuple(
            chunk
            for part, (_, pieces) in pairs
            for piece in pieces
            if not piece.is_first
            for chunk in chunks_of_slice_piece(part, piece)
        )


class SliceMap:
    """The map in a model-states file: which pieces of each parameter each of `ranks` ranks has."""

    def __init__(self, params: Mapping[str | int, Any], ranks: int) -> None:
        self._params = params
        self.ranks = ranks

    def slicing_of(self, name: str) -> SlicedParameter:
        """Return how a parameter is sliced. Raises `Unsupported` if the map does not contain the parameter."""
        entry = dict_or_empty(self._params.get(f"^{re.escape(name)}$"), _MAP)
        if not entry:
            message = "tensor parallelism cut this parameter, and the map of AutoTP does not have it"
            raise Unsupported(message, tensor=name, hint=_HINT)
        shape = require_counts(entry.get("logical_shape"), _MAP)
        ranks = require_dict(entry.get("ranks"), "ranks")
        if {str(rank) for rank in ranks} != set(map(str, range(self.ranks))):
            raise Corrupt(f"expected slices of {self.ranks} ranks, found {len(ranks)}", tensor=name)
        by_rank = {int(rank): require_dict(entry_of_rank, "ranks") for rank, entry_of_rank in ranks.items()}
        slices = tuple(read_slice(by_rank[rank], rank, shape, name) for rank in range(self.ranks))
        boxes = [piece.in_whole for _, pieces in slices for piece in pieces if piece.is_first]
        covered = sum(box.numel for box in boxes)
        if covered != full_box(shape).numel:
            message = f"expected pieces of {full_box(shape).numel} elements, found {covered}"
            raise Corrupt(message, tensor=name, hint=_HINT)
        if overlap := find_overlap(boxes):
            start, size = map(list, overlap[2])
            message = f"two pieces of the parameter overlap: {size} elements at {start}"
            raise Corrupt(message, tensor=name, hint=_HINT)
        return SlicedParameter(name, shape, slices)


def find_slice_map(saved: Mapping[str | int, Any], ranks: int) -> SliceMap | None:
    """Return the map in the model-states file of a run with `ranks` ranks; None if the file has no map.

    Raises `Unsupported` for another version of the map.
    """
    saved_map = dict_or_empty(dict_or_empty(saved.get(INFO), INFO).get(_MAP), _MAP)
    if not saved_map:
        return None
    if saved_map.get("version") != _VERSION:
        message = f"expected version {_VERSION} of AutoTP's map, found {saved_map.get('version')!r}"
        raise Unsupported(message, hint=_HINT)
    return SliceMap(require_dict(saved_map.get("params"), "params"), ranks)


def read_slice(
    saved: Mapping[str | int, Any], rank: int, shape: Shape, name: str
) -> tuple[Shape, tuple[SlicePiece, ...]]:
    slice_shape = require_counts(saved.get("shard_shape"), _MAP)
    pieces = []
    for piece in require_each(saved.get("pieces"), require_dict, "pieces"):
        if piece.get("scale", 1) != 1:
            message = f"a rank's slice is the parameter times {piece['scale']}"
            raise Unsupported(message, tensor=name, hint=_HINT)
        size = require_counts(piece.get("shape"), _MAP)
        holders = require_counts(piece.get("locations"), "locations")
        in_whole, in_slice = (
            parse_box(piece.get(key), size, of, name) for key, of in (("source", shape), ("dest", slice_shape))
        )
        pieces.append(SlicePiece(in_whole, in_slice, is_first=rank == min(holders, default=rank)))
    return slice_shape, tuple(pieces)


def parse_box(offsets: Any, size: Shape, shape: Shape, name: str) -> Box:
    """Return the box of shape `size` at the offset that `offsets` records, in a tensor of `shape`.

    Raises `Unsupported` if the strides are not those of a row-major tensor, `Corrupt` if the box exceeds the tensor.
    """
    offset_and_strides = require_type(offsets, list, "pieces")
    if len(offset_and_strides) != 2:
        raise Corrupt(f"expected an offset and strides of a piece, found {len(offset_and_strides)} values", tensor=name)
    offset, piece_strides = require_count(offset_and_strides[0], "pieces"), require_counts(offset_and_strides[1], _MAP)
    strides = row_major_strides(shape)
    is_row_major = len(size) == len(piece_strides) == len(shape) and all(
        n < 2 or step == stride for n, step, stride in zip(size, piece_strides, strides, strict=True)
    )
    if not is_row_major:
        raise Unsupported("a piece of the parameter is not a box of it", tensor=name, hint=_HINT)
    if offset >= full_box(shape).numel:
        raise Corrupt(f"a piece at element {offset} is outside the shape {list(shape)}", tensor=name)
    box = Box(unravel(offset, shape), size)
    if any(stop > extent for stop, extent in zip(box.stop, shape, strict=True)):
        raise Corrupt(f"a piece reaches out of the shape {list(shape)}", tensor=name)
    return box


def chunks_of_slice_piece(part: StoredTensor, piece: SlicePiece) -> list[Chunk]:
    """Return the chunks of a piece, at their position in the full tensor."""
    for axis, (start, stop) in enumerate(zip(piece.in_slice.start, piece.in_slice.stop, strict=True)):
        if (start, stop) != (0, part.spec.shape[axis]):
            part = narrow_axis(part, axis, start, stop)
    corner = piece.in_whole.start
    return [
        chunk._replace(box=Box(tuple(a + b for a, b in zip(chunk.box.start, corner, strict=True)), chunk.box.size))
        for chunk in part.chunks
    ]

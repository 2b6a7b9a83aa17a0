"""Collect the damage of a checkpoint, and replace lost chunks by copies.

Copies are replicas from other ranks, and second copies of full tensors.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import add
from pathlib import Path

from ckptkit.checkpoints.salvage_account import Filled, Lost
from ckptkit.errors import Corrupt
from ckptkit.layout import Chunk, Fault, Layout, StoredTensor, axes, find_tiling_error
from ckptkit.layout.box import Box, find_box_outside, find_overlap, full_box, intersect, subtract_boxes


@dataclass(slots=True)
class Faults:
    """The damage of a checkpoint except lost chunks, which have their own faults, and replacements for damaged data.

    `entries` are the lost non-tensor entries, `unplaced` the tensors whose shape is unknown, both by name in the
    checkpoint. `unnamed` are faults of files with unknown contents, and `places` the paths of components that cannot be
    read at all. `filled` maps the absolute path of each chunk from another source to a description of that source; no
    other chunks have absolute paths. `repaired` are names of tensors that were restored from another copy of the same
    bytes. `described_by` is the checkpoint whose metadata describes the files, if their own is missing.
    """

    entries: dict[str, Fault] = field(default_factory=dict)
    unplaced: dict[str, Fault] = field(default_factory=dict)
    unnamed: list[Fault] = field(default_factory=list)
    places: list[Path] = field(default_factory=list)
    filled: dict[str, str] = field(default_factory=dict)
    filled_entries: dict[str, str] = field(default_factory=dict)
    repaired: dict[str, None] = field(default_factory=dict)
    described_by: Path | None = None

    def record_fill_source(self, chunks: Iterable[Chunk], source: str) -> None:
        self.filled.update((chunk.path, source) for chunk in chunks if chunk.is_in_file)


def records_of_lost_tensors(tensors: Mapping[str, StoredTensor]) -> Iterator[Lost]:
    """Yield a record for each tensor that has lost chunks."""
    for name, tensor in tensors.items():
        lost_chunks = [(chunk.box, chunk.where) for chunk in tensor.chunks if isinstance(chunk.where, Fault)]
        if lost_chunks:
            fault, spec = lost_chunks[0][1], tensor.spec
            boxes = () if tensor.splits else tuple(sorted(box for box, _ in lost_chunks))
            is_all = boxes == (full_box(spec.shape),)
            yield Lost(name, fault.why, fault.path, () if is_all else boxes, spec.shape, spec.nbytes)


def records_of_filled_tensors(layout: Layout, faults: Faults) -> Iterator[Filled]:
    """Yield a record for each tensor with bytes from another source."""
    for name, tensor in layout.tensors.items() if faults.filled else ():
        taken = [chunk for chunk in tensor.chunks if chunk.path in faults.filled]
        if taken:
            before, after = taken[0].dtype, tensor.spec.dtype
            cast = f"{before} => {after}" if before != after else ""
            yield Filled(name, faults.filled[taken[0].path], cast)


def replace_lost_by_replicas(
    tensor: StoredTensor, root: Path, replicas: Sequence[Chunk], why: Fault | None = None
) -> StoredTensor:
    """Return a tensor with spares for lost chunks. The rest is lost, for the reason `why` if it is known."""
    broken = find_tiling_error(root, tensor)
    if broken is None and not tensor.is_lost:
        return tensor
    shape = tensor.shape_tiled_by_chunks
    boxes = [chunk.box for chunk in tensor.chunks]
    if find_box_outside(shape, boxes) is not None or find_overlap(boxes) is not None:
        assert broken is not None
        return replace(tensor, chunks=(Chunk.lost(full_box(shape), tensor.spec.dtype, Fault.of(broken)),))
    good = [chunk for chunk in tensor.chunks if not chunk.is_lost]
    # a spare must not overlap chunks that are still readable
    for spare in replicas:
        if not any(intersect(spare.box, chunk.box) for chunk in good):
            good.append(spare)
    covered = [chunk.box for chunk in good]
    lost = [
        chunk._replace(box=box)
        for chunk in tensor.chunks
        if chunk.is_lost
        for box in subtract_boxes(chunk.box, covered)
    ]
    gaps = subtract_boxes(full_box(shape), [*covered, *(chunk.box for chunk in lost)])
    fault = why or Fault.of(broken or Corrupt("no file contains it"))
    lost += [Chunk.lost(box, tensor.spec.dtype, fault) for box in gaps]
    return replace(tensor, chunks=(*good, *lost))


def replace_lost_from_copy(
    tensor: StoredTensor, other: StoredTensor | None, root: Path, faults: Faults, source_description: str
) -> StoredTensor:
    """Return a tensor whose lost chunks are replaced by chunks of `other`, a tensor with the same values.

    The chunks of `other` get absolute paths. A chunk stays lost if `other` does not have all of it.
    """
    if other is None or not can_replace(tensor, other) or any(chunk.wrapper for chunk in other.chunks):
        return tensor
    chunks: list[Chunk] = []
    for chunk in tensor.chunks:
        parts = chunks_cut_to_box(other, chunk.box) if chunk.is_lost else ()
        is_whole = sum(part.box.numel for part in parts) == chunk.box.numel
        if parts and is_whole and not any(part.is_lost for part in parts):
            taken = [with_absolute_path(part, root) for part in parts]
            faults.record_fill_source(taken, source_description)
            chunks += taken
        else:
            chunks.append(chunk)
    return replace(tensor, chunks=tuple(chunks))


def can_replace(tensor: StoredTensor, replacement: StoredTensor) -> bool:
    spec, other_spec = tensor.spec, replacement.spec
    is_castable = spec.dtype == other_spec.dtype or other_spec.dtype.is_castable_to(spec.dtype)
    return spec.shape == other_spec.shape and is_castable and tensor.splits is None


def chunks_cut_to_box(tensor: StoredTensor, box: Box) -> Sequence[Chunk]:
    """Return the chunks of a tensor, cut to a box of it."""
    cut = tensor
    for axis, (start, size) in enumerate(zip(box.start, box.size, strict=True)):
        cut = axes.narrow_axis(cut, axis, start, start + size)
    return [chunk._replace(box=Box(tuple(map(add, chunk.start, box.start)), chunk.size)) for chunk in cut.chunks]


def with_absolute_path(chunk: Chunk, root: Path) -> Chunk:
    """Return a chunk of a file in directory `root` with its absolute path, to use it in other layouts."""
    return chunk._replace(path=os.path.abspath(root / chunk.path)) if chunk.is_in_file else chunk

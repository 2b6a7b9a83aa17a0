"""Find the elements whose bits differ between two checkpoints, block by block.

Also loads and merges the changes that deltas contain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ckptkit.engine.blocks import Block
from ckptkit.engine.check_sources import Sources
from ckptkit.engine.compare import are_equal_buffers, unsharded_tensors
from ckptkit.engine.copy import reread_unchecked_ranges
from ckptkit.engine.read import read_box
from ckptkit.engine.visit import Pieces, Worker, visit_blocks
from ckptkit.errors import Corrupt
from ckptkit.io.crc32 import Checksums, crc32
from ckptkit.io.progress import BytesDone
from ckptkit.layout import Layout
from ckptkit.layout.box import full_box
from ckptkit.layout.dtypes import SMALL_FLOATS
from ckptkit.layout.plan import Plan, targets_for
from ckptkit.plugins.deltas.open_delta import INDICES, VALUES, Delta
from ckptkit.words import count


def load_changes(delta: Delta, name: str) -> Changes:
    """Return positions and new values of a tensor that the delta does not contain in full.

    Raises `Corrupt` for positions that are not strictly increasing or outside the tensor, and for damaged bytes.
    """
    tensor = delta.record.tensors[name]
    (positions, values) = (read_delta_tensor(delta, name + suffix) for suffix in (INDICES, VALUES))
    indices: Array = np.frombuffer(positions, delta.layout.tensors[name + INDICES].spec.dtype.name)
    path, numel = delta.payload_path_of(name), tensor.spec.numel
    if indices[0] < 0 or indices[-1] >= numel or indices.max() >= numel or indices.min() < 0:
        wrong = int(indices[(indices < 0) | (indices >= numel)][0])
        raise Corrupt(f"expected positions from 0 to {numel - 1}, found {wrong}", path=path, tensor=name)
    steps = np.diff(indices)
    if (steps <= 0).any():
        at = int((steps <= 0).argmax())
        previous, following = int(indices[at]), int(indices[at + 1])
        problem = f"position {previous} twice" if previous == following else f"position {following} after {previous}"
        raise Corrupt(f"expected strictly increasing positions, found {problem}", path=path, tensor=name)
    return Changes(indices, as_unsigned_elements(values, tensor.spec.dtype.itemsize))


def read_delta_tensor(delta: Delta, key: str) -> memoryview:
    return read_box(delta.layout, key, full_box(delta.layout.tensors[key].spec.shape))


def merge_changes(changes_in_order: Sequence[Changes]) -> Changes:
    """Return the changes of several deltas to one tensor as one; later deltas win."""
    if len(changes_in_order) == 1:
        return changes_in_order[0]
    positions = np.concatenate([changes.positions for changes in changes_in_order])
    order = np.argsort(positions, kind="stable")
    positions = positions[order]
    is_last = np.append(positions[1:] != positions[:-1], np.ones(1, np.bool_))
    values = np.concatenate([changes.values for changes in changes_in_order])[order]
    return Changes(positions[is_last], values[is_last])


Array = NDArray[Any]


class Changes(NamedTuple):
    """Changed elements of a tensor: increasing positions in row-major order, and the new values as stored bits."""

    positions: Array
    values: Array


_INFINITY = {"bfloat16": 0x7F80, "float16": 0x7C00}  # bit patterns; without the sign bit, NaN is greater than infinity


def count_nan(values: Array, dtype: str) -> int:
    """Return how many of the values, given as stored bits, are NaN: some inference engines refuse them."""
    if dtype in ("float32", "float64"):
        return int(np.isnan(values.view(dtype)).sum())
    if dtype in _INFINITY:
        return int(((values & 0x7FFF) > _INFINITY[dtype]).sum())
    if dtype in SMALL_FLOATS and SMALL_FLOATS[dtype].nbits == 8:
        return int(np.isnan(np.array(SMALL_FLOATS[dtype].value_by_bits)[values]).sum())
    return 0


def nan_warnings(number: int) -> tuple[str, ...]:
    return (f"{count(number, 'new value', 'is')} NaN: vLLM refuses such a patch",) if number else ()


Take = Callable[[str, int, Changes], None]  # tensor name, first element of the block, changes in the block


def as_unsigned_elements(data: memoryview | bytes | bytearray, itemsize: int) -> Array:
    """Return the elements as unsigned integers of their width, or as raw bytes above 8 bytes."""
    elements: Array = np.frombuffer(data, f"u{itemsize}" if itemsize <= 8 else f"V{itemsize}")
    return elements


def differing_elements(old: memoryview, new: memoryview, itemsize: int) -> Changes:
    """Return the elements of `new` whose bits differ from `old`; positions start at 0."""
    word_size = min(itemsize, 8)
    differ = as_unsigned_elements(old, word_size) != as_unsigned_elements(new, word_size)
    if itemsize > word_size:
        differ = differ.reshape(-1, itemsize // word_size).any(axis=1)
    positions = np.flatnonzero(differ)
    return Changes(positions, as_unsigned_elements(new, itemsize)[positions])


def pass_changes_to(
    before: Layout, after: Layout, sink: Take, *, jobs: int | None = None, progress: BytesDone | None = None
) -> tuple[dict[str, int], dict[str, int], int]:
    """Compare two located layouts with the same tensors, dtypes and shapes, and pass each change to `sink`.

    `sink` gets the blocks of a tensor in any order, from one thread at a time. The checksum of every chunk that has one
    is verified. Returns the CRC-32 of each tensor before and after, and the source bytes with a verified checksum.
    """
    specs = before.specs
    pair, unsharded = (before, after), unsharded_tensors(specs)
    targets = tuple(target for name, wanted in unsharded.items() for target in targets_for(name, wanted, pair))
    plan = Plan(before, after, targets, (after,))
    sources = Sources(plan)
    sums: tuple[Checksums[str], Checksums[str]] = (Checksums(), Checksums())

    def compare_block(worker: Worker, block: Block) -> tuple[int, int, Changes | None]:
        old, new = worker.read_input(block, 0), worker.read_input(block, 1)
        crc = crc32(old)
        if are_equal_buffers(old, new):
            return crc, crc, None
        return crc, crc32(new), differing_elements(old, new, block.target.chunk.dtype.itemsize)

    def record_block(block: Block, seen: tuple[int, int, Changes | None], pieces: Pieces) -> None:
        sources.record_reads(pieces)
        name, changes = block.target.name, seen[2]
        for checksums, crc in zip(sums, seen[:2], strict=True):
            checksums.add(name, block.start, block.nbytes, crc)
        if changes is not None:
            sink(name, block.start // block.target.chunk.dtype.itemsize, changes)
        if progress:
            progress(2 * block.nbytes)

    visit_blocks(plan, compare_block, record_block, jobs, sums=sources.is_awaiting_comparison)
    reread_unchecked_ranges(sources, jobs)
    before_sums, after_sums = (
        {name: checksums.find_complete_crc(name, spec.nbytes) or 0 for name, spec in specs.items()}
        for checksums in sums
    )
    return before_sums, after_sums, sources.checked_bytes

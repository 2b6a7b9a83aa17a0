"""Compare layouts: read both block by block, and measure the difference where blocks are not equal.

Equal blocks cost only the reads: numpy is imported when two blocks differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ckptkit.engine.blocks import Block, blocks_of_target
from ckptkit.engine.check_sources import Sources
from ckptkit.engine.copy import reread_unchecked_ranges
from ckptkit.engine.ledger import Ledger
from ckptkit.engine.visit import Pieces, Progress, Worker, visit_blocks
from ckptkit.io.crc32 import Checksums, crc32
from ckptkit.layout import Chunk, Layout, StoredTensor
from ckptkit.layout.axes import unsplit_index
from ckptkit.layout.box import full_box
from ckptkit.layout.distance import Distance, Tolerance
from ckptkit.layout.plan import Plan, in_file_order, make_plan, targets_for


@dataclass(frozen=True, slots=True)
class Comparison:
    """The distance of each tensor that differs, or of all with `measure_all`; and how many bytes were verified."""

    distances: Mapping[str, Distance]
    checked_bytes: int

    @property
    def differing_names(self) -> list[str]:
        return sorted(name for name, distance in self.distances.items() if distance.different)


def compare_layouts(
    a: Layout,
    b: Layout,
    *,
    tolerance: Tolerance | None = None,
    measure_all: bool = False,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Compare two layouts that have the same tensors in the same shapes, with `jobs` threads.

    The dtypes may differ where the difference can be measured. With `measure_all` equal tensors are measured too.
    Verifies every chunk that has a recorded CRC-32: `Corrupt` names one that differs. Raises `Usage` for a layout that
    has not been located. `progress` receives the bytes read, from one thread at a time.
    """
    targets = (
        one for name, tensor in b.tensors.items() for one in targets_for(name, with_zero_chunks_located(tensor), (a, b))
    )
    plan = Plan(a, b, in_file_order(targets), (b,))
    sources = Sources(plan, Ledger())
    found: dict[str, Distance] = {}

    def measure_block(worker: Worker, block: Block) -> tuple[Distance | None, int]:
        a_dtype, b_dtype = (layout.tensors[block.target.name].spec.dtype for layout in (a, b))
        ours, theirs = worker.read_input(block, 0, a_dtype), worker.read_input(block, 1, b_dtype)
        nbytes = len(ours) + len(theirs)
        if not measure_all and a_dtype == b_dtype and are_equal_buffers(ours, theirs):
            return None, nbytes
        from ckptkit.layout.measuring import measure_distance

        return measure_distance((ours, a_dtype), (theirs, b_dtype), block.box, tolerance), nbytes

    def record(block: Block, seen: tuple[Distance | None, int], pieces: Pieces) -> None:
        distance, nbytes = seen
        name = block.target.name
        sources.record_reads(pieces)
        if distance is not None:
            found[name] = found.get(name, Distance()).merge(distance)
        if progress:
            progress(nbytes)

    # a block fits the buffers in the dtypes of both layouts
    itemsizes = {name: max(layout.tensors[name].spec.dtype.itemsize for layout in (a, b)) for name in b.tensors}
    blocks = (block for target in plan.targets for block in blocks_of_target(plan, target, itemsizes[target.name]))
    visit_blocks(plan, measure_block, record, jobs, sums=sources.is_awaiting_comparison, among=blocks)
    reread_unchecked_ranges(sources, jobs)
    found = {name: with_tensor_index(distance, a.tensors[name], b.tensors[name]) for name, distance in found.items()}
    return Comparison(with_norms(a, found, jobs), sources.checked_bytes)


def with_tensor_index(distance: Distance, *tensors: StoredTensor) -> Distance:
    """Return a distance whose first index refers to the tensor, where blocks were compared with axes split."""
    splits = next((tensor.splits for tensor in tensors if tensor.splits), None)
    if splits is None or distance.first is None:
        return distance
    return replace(distance, first=unsplit_index(splits, distance.first))


def are_equal_buffers(a: memoryview, b: memoryview) -> bool:
    """Return True if two buffers of equal length are equal. Uses memcmp; memoryviews compare element by element."""
    whole_buffer = a.obj
    assert isinstance(whole_buffer, bytearray)
    return whole_buffer.startswith(b)


def with_zero_chunks_located(tensor: StoredTensor) -> StoredTensor:
    """Return a tensor whose chunks of zeros can be targets: targets need a file location."""
    return replace(
        tensor, chunks=tuple(chunk._replace(where=None) if chunk.is_zeros else chunk for chunk in tensor.chunks)
    )


def with_norms(a: Layout, distances: Mapping[str, Distance], jobs: int | None) -> dict[str, Distance]:
    """Return the distances with the norm of all of `a`: equal blocks of a tensor were not measured before."""
    lacking = {
        name: a.tensors[name]
        for name, distance in distances.items()
        if distance.different and distance.elements < a.tensors[name].spec.numel
    }
    sizes = dict.fromkeys(lacking, 0.0)

    def measure_block(worker: Worker, block: Block) -> float:
        from ckptkit.layout.measuring import sum_of_finite_squares

        return sum_of_finite_squares((worker.read_input(block), block.target.chunk.dtype))

    def record(block: Block, size: float, _pieces: Pieces) -> None:
        sizes[block.target.name] += size

    visit_blocks(unsharded_plan(replace(a, tensors=lacking)), measure_block, record, jobs)
    return {name: replace(distance, size_a=sizes.get(name, distance.size_a)) for name, distance in distances.items()}


def row_major_checksums(layout: Layout, *, jobs: int | None = None) -> dict[str, int]:
    """Return the CRC-32 of each tensor's elements in row-major order, regardless of how they are sharded."""
    sums: Checksums[str] = Checksums()

    def sum_block(worker: Worker, block: Block) -> int:
        return crc32(worker.read_input(block))

    def record(block: Block, crc: int, _pieces: Pieces) -> None:
        sums.add(block.target.name, block.start, block.nbytes, crc)

    visit_blocks(unsharded_plan(layout), sum_block, record, jobs)
    return {name: sums.find_complete(name, spec.nbytes) or 0 for name, spec in layout.specs.items()}


def unsharded_plan(layout: Layout) -> Plan:
    """Return the plan that would write each tensor row-major and as one chunk."""
    tensors = {
        name: StoredTensor(spec, (Chunk(full_box(spec.shape), name, 0, spec.nbytes, spec.dtype),))
        for name, spec in layout.specs.items()
    }
    return make_plan(layout, replace(layout, tensors=tensors, blobs={}))

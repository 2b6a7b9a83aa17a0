"""Compare layouts: read both block by block, and measure the difference where blocks are not equal.

Equal blocks cost only the reads: numpy is imported when two blocks differ. `compare_computed` is for tensors that must
be computed first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from ckptkit.engine.blocks import Block, blocks_of_target
from ckptkit.engine.check_sources import Sources
from ckptkit.engine.copy import reread_unchecked_ranges
from ckptkit.engine.distance import Distance, Tolerance
from ckptkit.engine.visit import Pieces, Worker, visit_blocks
from ckptkit.io.crc32 import Checksums, crc32
from ckptkit.io.progress import BytesDone
from ckptkit.layout import Chunk, Layout, Spec, StoredTensor
from ckptkit.layout.axes import unsplit_index
from ckptkit.layout.box import Box, full_box
from ckptkit.layout.dtypes import DTYPES, DType
from ckptkit.layout.plan import Plan, Recipe, Target, in_file_order, make_plan, targets_for

Computed = tuple[Recipe, Spec]  # the recipe that computes a tensor, and its dtype and shape


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
    progress: BytesDone | None = None,
) -> Comparison:
    """Compare two layouts that have the same tensors in the same shapes, with `jobs` threads.

    The dtypes may differ where the difference can be measured. With `measure_all` equal tensors are measured too.
    Verifies every chunk that has a recorded CRC-32: `Corrupt` names one that differs. Raises `Usage` for a layout that
    has not been located. `progress` receives the bytes read, from one thread at a time.
    """
    targets: list[Target] = []
    for name, tensor in b.tensors.items():
        # a target needs a file location, so chunks of zeros get one
        chunks = tuple(chunk._replace(where=None) if chunk.is_zeros else chunk for chunk in tensor.chunks)
        targets += targets_for(name, replace(tensor, chunks=chunks), (a, b))
    plan = Plan(a, b, in_file_order(targets), (b,))

    def measure_block(worker: Worker, block: Block) -> tuple[Distance | None, int]:
        a_dtype, b_dtype = (layout.tensors[block.target.name].spec.dtype for layout in (a, b))
        ours, theirs = worker.read_input(block, 0, a_dtype), worker.read_input(block, 1, b_dtype)
        nbytes = len(ours) + len(theirs)
        if not measure_all and a_dtype == b_dtype and are_equal_buffers(ours, theirs):
            return None, nbytes
        from ckptkit.engine.measure_distance import measure_distance

        return measure_distance((ours, a_dtype), (theirs, b_dtype), block.box, tolerance), nbytes

    # a block fits the buffers in the dtypes of both layouts
    itemsizes = {name: max(layout.tensors[name].spec.dtype.itemsize for layout in (a, b)) for name in b.tensors}
    blocks = (block for target in plan.targets for block in blocks_of_target(plan, target, itemsizes[target.name]))
    found, checked_bytes = measure_blocks(plan, blocks, measure_block, jobs, progress)
    for name, distance in found.items():
        # blocks were compared with axes split, and the index of the first difference refers to the tensor
        splits = a.tensors[name].splits or b.tensors[name].splits
        if splits and distance.first is not None:
            found[name] = replace(distance, first=unsplit_index(splits, distance.first))
    return Comparison(with_norms(a, found, jobs), checked_bytes)


class Both:
    """The recipe of two tensors of one shape. Its operands are those of the first, then those of the second."""

    def __init__(self, first: Computed, second: Computed) -> None:
        self._sides = first, second
        self.spec = first[1]
        self.operands = (*first[0].operands, *second[0].operands)

    def measure_block(self, worker: Worker, block: Block) -> tuple[Distance, int]:
        """Return the distance of the two tensors in a block, and the bytes read for it."""
        from ckptkit.engine.measure_distance import measure_distance

        inputs = iter([worker.read_operand(block, i, operand.dtype) for i, operand in enumerate(self.operands)])
        ours, theirs = (
            (recipe(block.box, spec.dtype, list(islice(inputs, len(recipe.operands))))[0], spec.dtype)
            for recipe, spec in self._sides
        )
        nbytes = sum(piece.length for of_source in worker.pieces for piece in of_source)
        return measure_distance(ours, theirs, block.box), nbytes

    def __call__(self, box: Box, dtype: DType, blocks: Sequence[memoryview]) -> tuple[memoryview, bool]:
        recipe, _ = self._sides[0]
        return recipe(box, dtype, blocks[: len(recipe.operands)])


def compare_computed(
    a: Layout,
    b: Layout,
    sides: Mapping[str, tuple[Computed, Computed]],
    *,
    jobs: int | None = None,
    progress: BytesDone | None = None,
) -> dict[str, Distance]:
    """Return the distance of each pair of tensors of one shape in `sides`, by name, computed with `jobs` threads.

    The operands of the first tensor of a pair are in source 0, which is `a`, and the operands of the second in source
    1, `b`. Verifies every chunk that has a recorded CRC-32. `progress` receives the bytes read, from one thread at a
    time.
    """
    recipes = {name: Both(*pair) for name, pair in sides.items()}
    wanted = unsharded_tensors({name: Spec(DTYPES["float32"], both.spec.shape) for name, both in recipes.items()})
    targets = (one for name in sides for one in targets_for(name, wanted[name], (a, b), recipes[name]))
    plan = Plan(a, b, tuple(targets), (b,))

    def measure_block(worker: Worker, block: Block) -> tuple[Distance, int]:
        return recipes[block.target.name].measure_block(worker, block)

    return dict.fromkeys(sides, Distance()) | measure_blocks(plan, None, measure_block, jobs, progress)[0]


def measure_blocks(
    plan: Plan,
    among: Iterable[Block] | None,
    measure: Callable[[Worker, Block], tuple[Distance | None, int]],
    jobs: int | None,
    progress: BytesDone | None,
) -> tuple[dict[str, Distance], int]:
    """Return the distance of each tensor for which `measure` returned any, and how many bytes were verified.

    `measure` returns the distance in a block, None for an equal block, and the bytes to report to `progress`.
    """
    sources = Sources(plan)
    found: dict[str, Distance] = {}

    def record(block: Block, seen: tuple[Distance | None, int], pieces: Pieces) -> None:
        distance, nbytes = seen
        name = block.target.name
        sources.record_reads(pieces)
        if distance is not None:
            found[name] = found.get(name, Distance()).merge(distance)
        if progress:
            progress(nbytes)

    visit_blocks(plan, measure, record, jobs, sums=sources.is_awaiting_comparison, among=among)
    reread_unchecked_ranges(sources, jobs)
    return found, sources.checked_bytes


def are_equal_buffers(a: memoryview, b: memoryview) -> bool:
    """Return True if two buffers of equal length are equal. Uses memcmp; memoryviews compare element by element."""
    whole_buffer = a.obj
    assert isinstance(whole_buffer, bytearray)
    return whole_buffer.startswith(b)


def with_norms(a: Layout, distances: Mapping[str, Distance], jobs: int | None) -> dict[str, Distance]:
    """Return the distances with the norm of all of `a`: equal blocks of a tensor were not measured before."""
    lacking = {
        name: a.tensors[name]
        for name, distance in distances.items()
        if distance.different and distance.elements < a.tensors[name].spec.numel
    }
    sizes = dict.fromkeys(lacking, 0.0)

    def measure_block(worker: Worker, block: Block) -> float:
        from ckptkit.engine.measure_distance import sum_of_finite_squares

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
    return {name: sums.find_complete_crc(name, spec.nbytes) or 0 for name, spec in layout.specs.items()}


def unsharded_plan(layout: Layout) -> Plan:
    """Return the plan that would write each tensor row-major and as one chunk."""
    return make_plan(layout, replace(layout, tensors=unsharded_tensors(layout.specs), blobs={}))


def unsharded_tensors(specs: Mapping[str, Spec]) -> dict[str, StoredTensor]:
    """Return tensors of one chunk each, as if each were to be written to a file of its name."""
    return {
        name: StoredTensor(spec, (Chunk(full_box(spec.shape), name, 0, spec.nbytes, spec.dtype),))
        for name, spec in specs.items()
    }

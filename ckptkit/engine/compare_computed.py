"""Compare tensors block by block where one or both of them must be computed first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ckptkit.engine.blocks import Block
from ckptkit.engine.check_sources import Sources
from ckptkit.engine.copy import reread_unchecked_ranges
from ckptkit.engine.ledger import Ledger
from ckptkit.engine.visit import Pieces, Progress, Worker, visit_blocks
from ckptkit.layout import Chunk, Layout, Spec, StoredTensor
from ckptkit.layout.box import Box, Shape, full_box
from ckptkit.layout.distance import Distance
from ckptkit.layout.dtypes import DTYPES, DType
from ckptkit.layout.measuring import Elements, measure_distance
from ckptkit.layout.plan import Plan, Recipe, Target, targets_for

_FLOAT32 = DTYPES["float32"]


class ComparedTensor(NamedTuple):
    """One of two compared tensors: the recipe that computes its elements, and their dtype."""

    recipe: Recipe
    dtype: DType


class Both:
    """The recipe of two tensors of one shape. Its operands are those of the first, then those of the second."""

    def __init__(self, first: ComparedTensor, second: ComparedTensor) -> None:
        self._first, self._second = first, second
        self.operands = (*first.recipe.operands, *second.recipe.operands)

    def elements_of_both(self, box: Box, blocks: Sequence[memoryview]) -> tuple[Elements, Elements]:
        """Return the elements of a box of each of the two tensors."""
        first, second, count = self._first, self._second, len(self._first.recipe.operands)
        ours, _ = first.recipe(box, first.dtype, blocks[:count])
        theirs, _ = second.recipe(box, second.dtype, blocks[count:])
        return (ours, first.dtype), (theirs, second.dtype)

    def __call__(self, box: Box, dtype: DType, blocks: Sequence[memoryview]) -> tuple[memoryview, bool]:
        """Return the elements of the first tensor as `dtype`."""
        return self._first.recipe(box, dtype, blocks[: len(self._first.recipe.operands)])


def compare_computed(
    a: Layout,
    b: Layout,
    shapes: Mapping[str, Shape],
    sides: Mapping[str, tuple[ComparedTensor, ComparedTensor]],
    *,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> dict[str, Distance]:
    """Return the distance of each pair of tensors in `sides`, by name, computed with `jobs` threads.

    `shapes` has their shapes. The operands of the first tensor of a pair are in source 0, which is `a`, and the
    operands of the second in source 1, `b`. Verifies every chunk that has a recorded CRC-32. `progress` receives the
    bytes read, from one thread at a time.
    """
    recipes = {name: Both(*pair) for name, pair in sides.items()}
    targets: list[Target] = []  # as if each tensor were to be written
    for name, shape in shapes.items():
        spec = Spec(_FLOAT32, shape)
        chunk = Chunk(full_box(shape), name, 0, spec.nbytes, _FLOAT32)
        targets += targets_for(name, StoredTensor(spec, (chunk,)), (a, b), recipes[name])
    plan = Plan(a, b, tuple(targets), (b,))
    sources = Sources(plan, Ledger())
    distances = dict.fromkeys(shapes, Distance())

    def measure_block(worker: Worker, block: Block) -> Distance:
        recipe = recipes[block.target.name]
        inputs = [worker.read_operand(block, number, operand.dtype) for number, operand in enumerate(recipe.operands)]
        return measure_distance(*recipe.elements_of_both(block.box, inputs), block.box)

    def record(block: Block, seen: Distance, pieces: Pieces) -> None:
        sources.record_reads(pieces)
        distances[block.target.name] = distances[block.target.name].merge(seen)
        if progress:
            progress(sum(piece.length for of_source in pieces for piece in of_source))

    visit_blocks(plan, measure_block, record, jobs, sums=sources.is_awaiting_comparison)
    reread_unchecked_ranges(sources, jobs)
    return distances

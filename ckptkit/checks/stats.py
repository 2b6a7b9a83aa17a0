"""Compute statistics of a checkpoint's values, tensor by tensor, or measure which tensors changed most to another."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import reduce
from pathlib import Path
from typing import Self, overload

from ckptkit import words
from ckptkit.checkpoints.checkpoint import Checkpoint, Source
from ckptkit.checkpoints.component import require_archives_of_one_save
from ckptkit.checks.parameter_changes import Moved, moved
from ckptkit.checks.tree import Branch, folded_tree_lines
from ckptkit.engine.blocks import Block, blocks_of_plan
from ckptkit.engine.check_sources import Sources
from ckptkit.engine.copy import reread_unchecked_ranges
from ckptkit.engine.counting import Count, count_values
from ckptkit.engine.visit import Pieces, Worker, visit_blocks
from ckptkit.errors import Usage
from ckptkit.formats import locate_all_chunks
from ckptkit.io.progress import BytesDone, Progress, make_progress_reporter
from ckptkit.layout import KeyPath, Layout, Spec, edits
from ckptkit.layout.plan import Plan, in_file_order, self_copy_target
from ckptkit.models.names.rename_parameters import key_within_optimizer
from ckptkit.models.names.weights import find_weights_or_none
from ckptkit.state.selection import Edits
from ckptkit.summary import Summarized

_STATE, _STEP = "state", "step"


def find_tensors_outside_totals(layout: Layout) -> set[str]:
    """Return the names of the tensors that are neither parameters nor optimizer states of the same size.

    These are steps of optimizers, single numbers beside a model, such as a learning rate, single integers in a model,
    and integers beside it, such as the states of random generators.
    """
    largest: Counter[KeyPath] = Counter()  # elements of the largest tensor in each parameter's state
    states: dict[str, KeyPath] = {}  # the parameter's state that contains an entry
    counters: set[str] = set()
    for name, tensor in layout.tensors.items():
        key = layout.key(name)
        state_path = key_within_optimizer(key)
        if state_path is not None and state_path[0] == _STATE:
            states[name] = (*key[:-1], state_path[1])
            if state_path[2] == _STEP:
                counters.add(name)
            else:
                largest[states[name]] = max(largest[states[name]], tensor.spec.numel)
    model = find_weights_or_none(layout)
    own = set(model.came_from.values() if model else layout.tensors)
    for name, spec in layout.specs.items():
        is_integer, is_other = spec.dtype.kind in ("int", "bool"), name not in own
        if name in states:
            is_counter = spec.numel == 1 < largest[states[name]]
        else:
            is_counter = (is_integer or is_other) if spec.numel == 1 else (is_integer and is_other)
        if is_counter:
            counters.add(name)
    return counters


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorStats(Count):
    """The counted values of a tensor. Integers and booleans are never NaN, infinite or denormal.

    Sums over several tensors exclude one that is not `in_total`: a counter, such as the step of an optimizer.
    """

    name: str
    spec: Spec
    in_total: bool = True

    @classmethod
    def of(cls, name: str, spec: Spec, count: Count, *, in_total: bool) -> Self:
        counted = {field.name: getattr(count, field.name) for field in fields(Count)}
        return cls(name=name, spec=spec, in_total=in_total, **counted)


@dataclass(frozen=True, slots=True)
class Stats(Summarized):
    """The counted values of the checkpoint at `path`, by tensor, in the order of the checkpoint."""

    path: Path
    format: str
    tensors: tuple[TensorStats, ...]

    @property
    def total(self) -> Count:
        """Return the counts over all parameters and their optimizer states."""
        return total_count_of(self.tensors)

    def summary(self) -> Iterator[str]:
        yield f"{self.path}: {words.count(len(self.tensors), 'tensor')}, {words.count(self.total.numbers, 'element')}"
        left_out = sum(not tensor.in_total for tensor in self.tensors)
        if 0 < left_out < len(self.tensors):
            yield f"not in the totals: {words.count(left_out, 'counter')}, such as the steps of an optimizer"

    def by_module(self) -> Iterator[tuple[Branch, Count]]:
        """Yield the tensors folded as in `inspect --tree`, each line with the counts of its tensors."""
        by_name = {tensor.name: tensor for tensor in self.tensors}
        for branch in folded_tree_lines({tensor.name: tensor.spec for tensor in self.tensors}):
            yield branch, total_count_of([by_name[name] for name in branch.names])


def total_count_of(tensors: Sequence[TensorStats]) -> Count:
    """Return the combined counts of tensors, without counters unless there are no other tensors."""
    summed = [tensor for tensor in tensors if tensor.in_total] or tensors
    return reduce(Count.merge, summed, Count())


@overload
def stats(
    source: Source,
    other: None = None,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    allow_unmatched: bool = False,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Stats: ...


@overload
def stats(source: Source, other: Source, *, jobs: int | None = None, progress: Progress | None = None) -> Moved: ...


def stats(
    source: Source,
    other: Source | None = None,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    allow_unmatched: bool = False,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Stats | Moved:
    """Return statistics of the numbers in the checkpoint at `source`, or in the latest of the run there.

    Uses `jobs` threads. `include` and `exclude` are globs of names; a glob that matches nothing is an error unless you
    pass `allow_unmatched`. With `other`, a checkpoint of the same model, returns how much each parameter changed from
    `source` to `other`. Raises `Corrupt` with the tensor's name if bytes are missing or a checksum differs, and
    `Mismatch` if the two share no parameter.
    """
    if other is not None:
        if include or exclude:
            raise Usage("--include and --exclude cannot be combined with OTHER", hint="drop them or OTHER")
        return moved(source, other, jobs=jobs, progress=progress)
    checkpoint = Checkpoint.open(source)
    whole = checkpoint.layout
    asked = Edits(include, exclude, allow_unmatched=allow_unmatched)
    asked.check_globs([whole], checkpoint.path)
    require_archives_of_one_save(whole)
    layout = locate_all_chunks(edits.select_entries(replace(whole, blobs={}), asked.is_selected))
    if not layout.tensors and (include or exclude):
        raise Usage("no tensor is left to measure", path=checkpoint.path, hint="check --include and --exclude")
    counts = count_values_by_tensor(layout, jobs=jobs, progress=make_progress_reporter(progress, layout.nbytes))
    counters = find_tensors_outside_totals(whole)
    specs = layout.specs.items()
    tensors = tuple(TensorStats.of(name, spec, counts[name], in_total=name not in counters) for name, spec in specs)
    return Stats(checkpoint.path, layout.format, tensors)


def count_values_by_tensor(
    layout: Layout, *, jobs: int | None = None, progress: BytesDone | None = None
) -> dict[str, Count]:
    """Return the counts of each tensor of a layout, computed with `jobs` threads.

    Verifies every chunk that has a recorded CRC-32. `progress` receives the bytes read, from one thread at a time.
    Raises `Corrupt` where bytes are missing or a CRC-32 differs, and `Usage` for a layout that has not been located.
    """
    chunks = ((name, chunk) for name, tensor in layout.tensors.items() for chunk in tensor.chunks if chunk.box.numel)
    plan = Plan(layout, layout, in_file_order(self_copy_target(name, chunk) for name, chunk in chunks))
    sources = Sources(plan)
    counts = {name: Count() for name in layout.tensors}
    expected: deque[Block] = deque()  # the blocks whose counts are not merged yet, in the order of the plan
    early: dict[int, Count] = {}  # the counts of those that came before their turn, by id() of the block

    def blocks_in_order() -> Iterator[Block]:
        for block in blocks_of_plan(plan):
            expected.append(block)
            yield block

    def count_block(worker: Worker, block: Block) -> Count:
        return count_values(worker.read_input(block), block.target.chunk.dtype)

    def record(block: Block, fresh: Count, pieces: Pieces) -> None:
        sources.record_reads(pieces)
        early[id(block)] = fresh
        # merged in the order of the blocks, so that one checkpoint always gives the same numbers
        while expected and id(expected[0]) in early:
            first = expected.popleft()
            counts[first.target.name] = counts[first.target.name].merge(early.pop(id(first)))
        if progress:
            progress(block.nbytes)

    visit_blocks(plan, count_block, record, jobs, sums=sources.is_awaiting_comparison, among=blocks_in_order())
    reread_unchecked_ranges(sources, jobs)
    return counts

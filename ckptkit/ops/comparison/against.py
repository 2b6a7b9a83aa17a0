"""Holds a checkpoint against another: is it the same, tensor by tensor? What proves a conversion. Changes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptkit import edits
from ckptkit.checkpoints.checkpoint import Checkpoint, Source
from ckptkit.checkpoints.part import Part
from ckptkit.engine.compare import compare
from ckptkit.errors import CkptError, Mismatch
from ckptkit.formats import locate
from ckptkit.layout import Layout, Spec
from ckptkit.ops.comparison.matching import match, pair_parts
from ckptkit.progress import Progress, telling
from ckptkit.tensors.dtypes import DType


@dataclass(frozen=True, slots=True)
class Compared:
    """What was found between two checkpoints: tensors and bytes that were compared, and whatever is not the same."""

    path: Path
    other: Path
    tensors: int
    nbytes: int
    problems: tuple[CkptError, ...]
    notes: tuple[str, ...] = ()


def compare_with(
    path: Source,
    other: Source,
    *,
    allow_cast: bool = False,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> list[Compared]:
    """Hold the checkpoint at `path` against `other`, of any format and world size, part by part.

    All tensors are compared where both have an optimizer, the model's where one has none. A tensor of another dtype is
    a problem, unless `allow_cast`: then `other` is converted as a conversion would do it. Raises a `CkptError` if one
    of them cannot be read.
    """
    notes: list[str] = []
    pairs = pair_parts(Checkpoint.open(path), Checkpoint.open(other), notes)
    return [compare_parts(*pair, notes, allow_cast=allow_cast, jobs=jobs, progress=progress) for pair in pairs]


def compare_parts(
    one: Part, two: Part, known: Sequence[str], *, allow_cast: bool, jobs: int | None, progress: Progress | None
) -> Compared:
    """Hold one directory or file against another."""
    notes = list(known)
    path, other = one.path, two.path
    here, there = (side.layout for side in match(one.layout, two.layout, notes))
    problems = list(find_differences(here, there, allow_cast=allow_cast))
    at_fault = {problem.tensor for problem in problems}
    names = {name for name in here.tensors if name in there.tensors and name not in at_fault}
    if allow_cast:
        there = cast_to(there, here.specs, notes)
    ours, theirs = (locate(only(layout, names)) for layout in (here, there))
    tell = telling(progress, ours.nbytes + theirs.nbytes)
    different = compare(theirs, ours, jobs=jobs, progress=tell).different
    problems += [Mismatch(f"its bytes are not those in {other}", path=path, tensor=name) for name in different]
    if here.blobs.keys() | there.blobs.keys():
        notes.append("entries that are no tensor were not compared")
    return Compared(path, other, len(names), ours.nbytes, tuple(problems), tuple(notes))


def find_differences(here: Layout, there: Layout, *, allow_cast: bool) -> list[Mismatch]:
    """The tensors that only one has, or that are not the same kind of thing in both."""
    problems = [Mismatch(f"not in {there.root}", path=here.root, tensor=name) for name in lacking(here, there)]
    problems += [Mismatch(f"only in {there.root}", path=here.root, tensor=name) for name in lacking(there, here)]
    for name, tensor in here.tensors.items():
        found = there.tensors[name].spec if name in there.tensors else tensor.spec
        is_cast = found.shape == tensor.spec.shape and found.dtype.can_become(tensor.spec.dtype)
        if found != tensor.spec and not (is_cast and allow_cast):
            hint = "--allow-cast compares it after conversion" if is_cast else None
            message = f"{tensor.spec} here, {found} in {there.root}"
            problems.append(Mismatch(message, path=here.root, tensor=name, hint=hint))
    return problems


def lacking(one: Layout, other: Layout) -> list[str]:
    """The tensors of one layout that the other has not."""
    return sorted(one.tensors.keys() - other.tensors.keys())


def cast_to(layout: Layout, specs: Mapping[str, Spec], notes: list[str]) -> Layout:
    """The layout in the dtypes of `specs`, wherever its numbers can be converted."""

    def choose(name: str, spec: Spec) -> DType:
        wanted = specs[name].dtype if name in specs else spec.dtype
        return wanted if spec.dtype.can_become(wanted) else spec.dtype

    changed = edits.cast(layout, choose)
    count = sum(changed.specs[name] != spec for name, spec in layout.specs.items())
    if count:
        notes.append(f"{count} tensors were converted to be compared")
    return changed


def only(layout: Layout, names: set[str]) -> Layout:
    """The layout with these tensors, and nothing else."""
    return edits.select(layout, names.__contains__)

"""Report the differences between two checkpoints as problems."""

from __future__ import annotations

from collections.abc import Iterator

from ckptkit.checks.differences import Diff, Difference
from ckptkit.errors import Mismatch
from ckptkit.models.computation import describe_differences


def problems_of(found: Diff) -> Iterator[Mismatch]:
    """Return a problem for each tensor that differs, or that only one has, and one for configs that differ."""
    path, other = found.a, found.b
    if certain := [one for one in found.configs if one.is_certain]:
        message = f"the config lets the model compute something else: {describe_differences(certain, str(other))}"
        yield Mismatch(message, path=path)
    for name in found.only_in_a:
        yield Mismatch(f"not in {other}", path=path, tensor=name)
    for name in found.only_in_b:
        yield Mismatch(f"only in {other}", path=path, tensor=name)
    for one in found.different:
        yield problem_of(found, one)


def problem_of(found: Diff, one: Difference) -> Mismatch:
    """Return the problem that a tensor of both differs."""
    path, other = found.a, found.b
    if one.reason == "values" or one.a is None or one.b is None:
        return Mismatch(f"the bytes differ from those in {other}", path=path, tensor=one.name)
    is_cast = one.reason == "dtype" and one.b.dtype.can_become(one.a.dtype)
    hint = "pass --allow-cast to compare after a cast" if is_cast else None
    return Mismatch(f"expected {one.b} as in {other}, found {one.a}", path=path, tensor=one.name, hint=hint)

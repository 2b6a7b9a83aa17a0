"""Put the weights of several checkpoints side by side for their mean: the same names, shapes and kinds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ckptkit.checkpoints.manifest import source_of
from ckptkit.checkpoints.part import Part
from ckptkit.errors import Mismatch
from ckptkit.layout import Layout, Spec, edits
from ckptkit.layout.plan import Recipe
from ckptkit.models.companions import find_companions
from ckptkit.models.fit import restore_tied
from ckptkit.names.weights import Weights
from ckptkit.tensors.dtypes import DType
from ckptkit.trainers.steps import step_of


def align(parts: Sequence[Part], found: Sequence[Weights]) -> Sequence[Weights]:
    """Return the weights with the same names, tied ones in all or in none.

    Raises `Mismatch` where they are not those of one model.
    """
    names = {name for weights in found for name in weights.layout.tensors}
    if any(weights.layout.tensors.keys() != names for weights in found):
        found = [with_tied(part, weights) for part, weights in zip(parts, found, strict=True)]
    for part, weights in zip(parts[1:], found[1:], strict=True):
        check_same(parts[0].path, found[0].layout, part.path, weights.layout)
    return found


def with_tied(part: Part, weights: Weights) -> Weights:
    return replace(weights, layout=restore_tied(weights.layout, find_companions(part.path, None).config or {}))


def check_same(path: Path, layout: Layout, other_path: Path, other: Layout) -> None:
    """Raise `Mismatch` for a tensor that only one model has, or that has another shape or kind in the other."""
    for here, names, there, others in ((path, layout, other_path, other), (other_path, other, path, layout)):
        missing = sorted(names.tensors.keys() - others.tensors.keys())
        if missing:
            message = f"{here} has it and {len(missing) - 1} more that are not here"
            hint = "choose what both have with --include and --exclude"
            raise Mismatch(message, path=there, tensor=missing[0], hint=hint)
    for name, spec in layout.specs.items():
        found = other.tensors[name].spec
        if found.shape != spec.shape or not (found.dtype == spec.dtype or found.dtype.can_become(spec.dtype)):
            raise Mismatch(f"{found} here, {spec} in {path}", path=other_path, tensor=name)


def cast_to(layout: Layout, specs: Mapping[str, Spec]) -> Layout:
    """Return the layout with the names and in the dtypes of `specs`."""

    def choose(name: str, _: Spec) -> DType:
        return specs[name].dtype

    return edits.cast(edits.select(layout, specs.__contains__), choose)


def average(layout: Layout, weights: Sequence[float]) -> Mapping[str, Recipe]:
    """Return the recipe of each tensor of the mean by `weights`; none without any."""
    if not weights:
        return {}
    from ckptkit.engine.mean import means  # imports numpy, which no copy needs

    return means(layout.specs, weights)


def describe(layouts: Sequence[Layout], weights: Sequence[float]) -> dict[str, str]:
    """Return what a manifest says of the sources; of all but the first no path, so that none is pushed."""
    if not weights:
        return source_of(layouts[0])
    terms = [f"{weight:.6g} x {name_of(layout.root)}" for layout, weight in zip(layouts, weights, strict=True)]
    return source_of(layouts[0]) | {"mean": " + ".join(terms)}


def name_of(root: Path) -> str:
    """Return the name of a checkpoint: the one with its step, also where the model is a part of it."""
    return root.parent.name if step_of(root.parent) is not None else root.absolute().name

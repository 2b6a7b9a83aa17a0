"""Models: the weights of several checkpoints, whatever their nesting, under the same names. Moves no bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ckptkit import edits
from ckptkit.checkpoints.companions import Companions, find_companions
from ckptkit.checkpoints.fit import drop_tied, fit, restore_tied
from ckptkit.checkpoints.part import Part
from ckptkit.checkpoints.weights import LeftOut, find_weights
from ckptkit.errors import Mismatch
from ckptkit.layout import Layout, Spec
from ckptkit.ops.selection import Edits
from ckptkit.tensors.dtypes import DType


@dataclass(frozen=True, slots=True)
class Model:
    """The weights of the checkpoint at `path`, by the model's own names, each of which `came_from` a name there.

    `whole` is all that was chosen of the checkpoint.
    """

    path: Path
    whole: Layout
    layout: Layout
    came_from: Mapping[str, str]
    wrapper: str
    left_out: Sequence[LeftOut]


def open_model(part: Part, asked: Edits) -> Model:
    """The weights of a checkpoint, as far as they are asked for."""
    whole = part.layout
    asked.check_globs([whole])
    chosen = edits.select(whole, asked.admit)
    found = find_weights(chosen)
    return Model(part.path, chosen, found.layout, found.came_from, found.wrapper, found.left_out)


def align(models: Sequence[Model]) -> list[Model]:
    """The models with the same names, tied ones in all or in none. Raises `Mismatch` where they are not one model."""
    names = {name for model in models for name in model.layout.tensors}
    if any(model.layout.tensors.keys() != names for model in models):
        models = [replace(model, layout=with_tied(model)) for model in models]
    for model in models[1:]:
        check_same(models[0], model)
    return list(models)


def with_tied(model: Model) -> Layout:
    """The weights of a model with the one that was left out because it is tied to another."""
    return restore_tied(model.layout, find_companions(model.path, None).config or {})


def check_same(one: Model, other: Model) -> None:
    """Raise `Mismatch` for a tensor that only one model has, or that has another shape or kind in the other."""
    for here, there in ((one, other), (other, one)):
        missing = sorted(here.layout.tensors.keys() - there.layout.tensors.keys())
        if missing:
            message = f"{here.path} has it and {len(missing) - 1} more that are not here"
            hint = "choose what both have with --include and --exclude"
            raise Mismatch(message, path=there.path, tensor=missing[0], hint=hint)
    for name, spec in one.layout.specs.items():
        found = other.layout.tensors[name].spec
        if found.shape != spec.shape or not (found.dtype == spec.dtype or found.dtype.can_become(spec.dtype)):
            raise Mismatch(f"{found} here, {spec} in {one.path}", path=other.path, tensor=name)


def arrange(models: Sequence[Model], companions: Companions, to: str) -> tuple[list[Layout], list[str]]:
    """The weights under the names that they will have in format `to`, and what there is to say of them."""
    first = models[0]
    if to == "hf":
        layout, notes = fit(first.layout, companions, strict=False)
        others = [model.layout for model in models[1:]]
        if layout.tensors.keys() != first.layout.tensors.keys():
            others = [drop_tied(other, []) for other in others]
        return [layout, *others], notes
    if not first.layout.tensors.keys() <= first.came_from.keys():  # a tied one was restored: there are no key paths
        return [model.layout for model in models], []
    names = frozenset(first.came_from.values())
    others = [edits.rename(model.layout, first.came_from.__getitem__) for model in models[1:]]
    return [edits.select(first.whole, names.__contains__), *others], []


def cast_to(layout: Layout, specs: Mapping[str, Spec]) -> Layout:
    """The layout in the dtypes of `specs`."""

    def choose(name: str, _: Spec) -> DType:
        return specs[name].dtype

    return edits.cast(edits.select(layout, specs.__contains__), choose)

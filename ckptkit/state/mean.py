"""Join the models of several checkpoints for their mean: the same names, shapes and kinds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from ckptkit.checkpoints.manifest import source_of
from ckptkit.errors import Caution, Mismatch, and_more
from ckptkit.layout import Layout, Spec, edits
from ckptkit.layout.dtypes import DType
from ckptkit.models.companions import Companions, find_companions
from ckptkit.models.computation import describe_differences, find_differences
from ckptkit.models.fit import restore_tied
from ckptkit.state.model import Model
from ckptkit.state.options import ConvertOptions
from ckptkit.trainers import step_of
from ckptkit.words import count


def align(models: Sequence[Model]) -> Model:
    """Return the first model, with the tensors of the others beside it: tied ones in all or in none.

    Raises `Mismatch` if they are not checkpoints of one model.
    """
    unknown = check_configs(models)
    names = {name for model in models for name in model.layout.tensors}
    if any(model.layout.tensors.keys() != names for model in models):
        models = [with_tied(model) for model in models]
    first, *others = models
    for other in others:
        check_same(first.part.path, first.layout, other.part.path, other.layout)
    remarks = [*unknown, *(remark for model in others for remark in model.remarks)]
    origins = tuple(path for model in models for path in model.origins)
    return replace(first, origins=origins, siblings=tuple(other.layout for other in others)).say(*remarks)


def check_configs(models: Sequence[Model]) -> list[str]:
    """Return remarks on sources without config.json, and on keys of which nobody knows whether they matter.

    Raises `Mismatch` if two sources describe models that compute differently with equal shapes. If a base says which
    config.json is right, that is a warning.
    """
    found = [find_companions(model.part.path, None) for model in models]
    described = [one for one in found if one.config is not None]
    first, *others = described or [Companions()]
    remarks: list[str] = []
    for other in others:
        different = find_differences(first.config or {}, other.config or {})
        if different and different[0].is_certain and models[0].ask_base is None:
            key, here, there, _ = different[0]
            more = and_more(sum(one.is_certain for one in different) - 1)
            message = f"`{key}` in config.json: expected {here} as in {first.found_in}, found {there}{more}"
            hint = "average checkpoints of one model, or pass --base MODEL, whose config.json is right for all"
            raise Mismatch(message, path=other.found_in, hint=hint)
        if different:
            differ = (
                f"the config.json in {first.found_in} differs: {describe_differences(different, str(other.found_in))}"
            )
            remarks.append(Caution(differ))
    missing = len(models) - len(described)
    if missing:
        remarks.append(
            f"{missing} of {len(models)} sources have no config.json, so their heads and rope were not compared"
        )
    return remarks


def with_tied(model: Model) -> Model:
    """Return a model with the tensor that was left out because it is tied to another."""
    return model.with_layout(restore_tied(model.layout, find_companions(model.part.path, None).config or {}))


def check_same(path: Path, layout: Layout, other_path: Path, other: Layout) -> None:
    """Raise `Mismatch` for a tensor that only one model has, or that has another shape or kind in the other."""
    for here, names, there, others in ((path, layout, other_path, other), (other_path, other, path, layout)):
        missing = sorted(names.tensors.keys() - others.tensors.keys())
        if missing:
            message = f"missing: {here} has this tensor{and_more(len(missing) - 1)}"
            hint = "select the tensors that both have with --include and --exclude"
            raise Mismatch(message, path=there, tensor=missing[0], hint=hint)
    for name, spec in layout.specs.items():
        found = other.tensors[name].spec
        if found.shape != spec.shape or not (found.dtype == spec.dtype or found.dtype.can_become(spec.dtype)):
            raise Mismatch(f"expected {spec} as in {path}, found {found}", path=other_path, tensor=name)


def average(model: Model, options: ConvertOptions) -> Model:
    """Make each tensor the weighted mean of those in all sources. The first says which dtypes they have."""
    from ckptkit.engine.mean import Mean  # imports numpy, which no copy needs

    ask = options.edits.wanted_dtype
    kept = {name: spec for name, spec in model.layout.specs.items() if ask(name, is_weight=True) is None}
    remarks = describe_dtypes(model.layout.root, kept, model.siblings)
    return replace(
        model.say(*remarks),
        others=tuple(cast_to(other, model.layout.specs) for other in model.siblings),
        recipes=dict.fromkeys(model.layout.tensors, partial(Mean, weights=options.weights)),
        made_of=describe((model.layout, *model.siblings), options.weights),
    )


def cast_to(layout: Layout, specs: Mapping[str, Spec]) -> Layout:
    """Return the layout with the names and in the dtypes of `specs`."""

    def choose(name: str, _: Spec) -> DType:
        return specs[name].dtype

    return edits.cast(edits.select(layout, specs.__contains__), choose)


def describe_dtypes(first: Path, specs: Mapping[str, Spec], others: Sequence[Layout]) -> Iterator[str]:
    """Yield, for each source with other dtypes than these of the first, how many tensors have those of the first."""
    for other in others:
        there = other.specs
        names = [name for name, spec in specs.items() if there[name].dtype != spec.dtype]
        if names:
            here, its = specs[names[0]].dtype, there[names[0]].dtype
            have = "has" if len(names) == 1 else "have"
            example = f"`{names[0]}` is {here}, in {other.root} {its}"
            yield f"{count(len(names), 'tensor')} {have} the dtype of {first}: {example} (--dtype chooses another)"


def describe(layouts: Sequence[Layout], weights: Sequence[float]) -> dict[str, str]:
    """Return what a manifest says of the sources; of all but the first no path, so that none is pushed."""
    terms = [f"{weight:.6g} x {name_of(layout.root)}" for layout, weight in zip(layouts, weights, strict=True)]
    return source_of(layouts[0]) | {"mean": " + ".join(terms)}


def name_of(root: Path) -> str:
    """Return the name of a checkpoint: the one with its step, also where the model is a part of it."""
    return root.parent.name if step_of(root.parent) is not None else root.absolute().name

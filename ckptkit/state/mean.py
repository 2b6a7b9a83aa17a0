"""Average the models of several checkpoints, which must have the same names, shapes and kinds of dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from ckptkit.checkpoints.manifest import source_record_of
from ckptkit.checkpoints.model_facts import ModelFacts
from ckptkit.errors import Caution, Mismatch, and_more
from ckptkit.layout import Layout, edits
from ckptkit.models.companions import find_companions
from ckptkit.models.config_differences import describe_differences
from ckptkit.models.fit import restore_tied
from ckptkit.state.model import Model
from ckptkit.state.options import ConvertOptions
from ckptkit.state.selection import find_wanted_dtype
from ckptkit.trainers import find_step_of_path
from ckptkit.words import count


def join_models_to_average(models: Sequence[Model]) -> Model:
    """Return the first model, with the tensors of the others in `siblings`.

    Restores tied tensors if not all models lack them. Raises `Mismatch` if the checkpoints are not of one model.
    """
    unknown = notes_on_config_differences(models)
    names = {name for model in models for name in model.layout.tensors}
    if any(model.layout.tensors.keys() != names for model in models):
        configs = [find_companions(model.part.path, None).config or {} for model in models]
        pairs = zip(models, configs, strict=True)
        models = [model.with_layout(restore_tied(model.layout, config)) for model, config in pairs]
    first, *others = models
    for other in others:
        require_averageable(first.part.path, first.layout, other.part.path, other.layout)
    remarks = [*unknown, *(remark for model in others for remark in model.remarks)]
    origins = tuple(path for model in models for path in model.origins)
    return replace(first, origins=origins, siblings=tuple(other.layout for other in others)).with_remarks(*remarks)


def notes_on_config_differences(models: Sequence[Model]) -> list[str]:
    """Return notes on sources whose computation is unknown, and on facts that may matter.

    Raises `Mismatch` if two sources describe models that compute differently with equal shapes. With a base, whose
    config.json is used for all, this is a warning.
    """
    facts = [ModelFacts.of(model.part) for model in models]
    described = [one for one in facts if one.library or one.reported]
    remarks: list[str] = []
    for other in described[1:]:
        first = described[0]
        different, notes, where = first.compare(other)
        remarks += notes
        if different and different[0].is_certain and models[0].ask_base is None:
            key, here, there, _ = different[0]
            more = and_more(sum(one.is_certain for one in different) - 1)
            message = f"`{key}` in {where}: expected {here} as in {first.config_directory}, found {there}{more}"
            hint = "average checkpoints of one model, or pass --base MODEL, whose config.json is right for all"
            raise Mismatch(message, path=other.config_directory, hint=hint)
        if different:
            change = "change" if different[0].is_certain else "may change"
            words = describe_differences(different, str(other.config_directory))
            both = f"{first.config_directory} and {other.config_directory}"
            remarks.append(Caution(f"{both} differ in keys that {change} the computation: {words}"))
    if missing := len(models) - len(described):
        lack = f"{missing} of {len(models)} sources have no config.json"
        remarks.append(f"{lack}, so their heads and rope were not compared")
    return remarks


def require_averageable(path: Path, layout: Layout, other_path: Path, other: Layout) -> None:
    """Raise `Mismatch` for a tensor that only one model has, or whose shape or kind of dtype differs."""
    for here, names, there, others in ((path, layout, other_path, other), (other_path, other, path, layout)):
        missing = sorted(names.tensors.keys() - others.tensors.keys())
        if missing:
            message = f"missing: {here} has this tensor{and_more(len(missing) - 1)}"
            hint = "select the tensors that both have with --include and --exclude"
            raise Mismatch(message, path=there, tensor=missing[0], hint=hint)
    for name, spec in layout.specs.items():
        other_spec = other.tensors[name].spec
        fits = other_spec.dtype == spec.dtype or other_spec.dtype.is_castable_to(spec.dtype)
        if other_spec.shape != spec.shape or not fits:
            raise Mismatch(f"expected {spec} as in {path}, found {other_spec}", path=other_path, tensor=name)


def average_siblings(model: Model, options: ConvertOptions) -> Model:
    """Make each tensor the weighted mean of all sources. The dtypes are those of the first source."""
    from ckptkit.engine.recipes import Mean  # imports numpy, which plain copies do not need

    made_of = model.weights.origins_by_name(model.layout.tensors)
    rules = options.edits.dtype_rules(model.weights.origins_of(made_of))
    specs = model.layout.specs
    kept = {name: spec for name, spec in specs.items() if find_wanted_dtype(rules, name, made_of[name]) is None}
    remarks = []
    for other in model.siblings:
        other_specs = other.specs
        names = [name for name, spec in kept.items() if other_specs[name].dtype != spec.dtype]
        if names:
            have = "has" if len(names) == 1 else "have"
            example = f"`{names[0]}` is {kept[names[0]].dtype}, in {other.root} {other_specs[names[0]].dtype}"
            which = f"{count(len(names), 'tensor')} {have} the dtype of {model.layout.root}"
            remarks.append(f"{which}: {example} (--dtype chooses another)")
    others = (edits.select_entries(other, specs.__contains__) for other in model.siblings)
    terms = []  # for the manifest, which publishes the names of the sources but not their paths
    for layout, weight in zip((model.layout, *model.siblings), options.weights, strict=True):
        root = layout.root  # the model may be a component of the directory with the step
        name = root.parent.name if find_step_of_path(root.parent) is not None else root.absolute().name
        terms.append(f"{weight:.6g} x {name}")
    return replace(
        model.with_remarks(*remarks),
        others=tuple(edits.cast_to_specs(other, specs) for other in others),
        recipes=dict.fromkeys(model.layout.tensors, partial(Mean, weights=options.weights)),
        made_of=source_record_of(model.layout) | {"mean": " + ".join(terms)},
    )

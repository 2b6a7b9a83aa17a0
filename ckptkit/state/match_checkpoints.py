"""Match two checkpoints for a comparison: components with components, entries by common names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.checkpoints.component import Component
from ckptkit.checkpoints.optimizers.keys import (
    IDS,
    NAMES,
    find_optimizers,
    find_parameter_key_kind,
    with_parameter_keys,
    with_separate_group_settings,
)
from ckptkit.checkpoints.optimizers.parameter_names import ORDER, Order
from ckptkit.errors import Mismatch, Unsupported, Usage
from ckptkit.formats import get_format
from ckptkit.layout import KeyPath, Layout, edits
from ckptkit.layout.wrappers import parameter_name_in_model
from ckptkit.models.companions import find_companions
from ckptkit.models.expected import forms_of_model
from ckptkit.models.fit import restore_tied
from ckptkit.models.names import HUB
from ckptkit.models.names.naming import AskedNames, rename_checkpoint_parameters
from ckptkit.models.names.rename_parameters import NewName, rename_in_group_lists, rename_in_key_path
from ckptkit.models.names.weights import LeftOut, Weights, find_model_key, find_weights_or_none, has_weights
from ckptkit.state.names import AS_THEY_ARE, NameOptions, collect_name_arguments
from ckptkit.state.optimizers import describe_assigned_names, parameter_names_from_models


@dataclass(frozen=True, slots=True)
class Side:
    """One of two compared checkpoints or components, at `path`, and remarks on how its layout was changed for that.

    Once both are matched, the other one has the same entries under the same names, `weights` are the names of the
    model's tensors, `wrapper` is the removed key above the model, and `left_out` are the entries outside the model.
    """

    path: Path
    layout: Layout
    remarks: tuple[str, ...] = ()
    weights: frozenset[str] = frozenset()
    wrapper: str = ""
    left_out: tuple[LeftOut, ...] = ()

    @classmethod
    def of(cls, component: Component) -> Self:
        return cls(component.path, with_separate_group_settings(component.layout))

    def with_layout_and_remarks(self, layout: Layout, *remarks: str) -> Self:
        return replace(self, layout=layout, remarks=(*self.remarks, *remarks))

    def select(self, keep: Callable[[str], bool]) -> Self:
        return replace(
            self, layout=edits.select_entries(self.layout, keep), weights=frozenset(filter(keep, self.weights))
        )

    def only_tensors(self) -> Self:
        return replace(self, layout=replace(self.layout, blobs={}))

    def only_weights(self) -> Self:
        return replace(self.select(self.weights.__contains__), left_out=())

    def with_renamed_parameters(self, new_name: NewName) -> Self:
        """Return the side with other names for parameters, in the optimizer too."""
        own = {str(self.layout.key(name)[-1]) for name in self.weights}
        keys = {
            name: rename_in_key_path(self.layout.key(name), new_name, name in self.weights, own)
            for name in self.layout.names
        }
        weights = frozenset(new_name(name) for name in self.weights)
        return replace(
            self, layout=edits.with_new_key_paths(rename_in_group_lists(self.layout, new_name), keys), weights=weights
        )


Pair = tuple[Side, Side]


def pair_components(one: Checkpoint, two: Checkpoint, order: Order | None = None) -> tuple[list[Pair], list[str]]:
    """Return the pairs of components to compare.

    These are all components if both checkpoints have the same ones, else those of the model. Files beside a model are
    compared with it if the other checkpoint has everything in one component. `order` is the user's order of the
    parameters, for an optimizer with parameter indices. Also returns remarks on components that are not compared.
    Raises `Mismatch` or `Unsupported` if the order does not fit.
    """
    ours, theirs = ({part.place: part for part in checkpoint.components} for checkpoint in (one, two))
    if len(ours) > 1 and ours.keys() == theirs.keys():
        pairs = [((one, Side.of(part)), (two, Side.of(theirs[place]))) for place, part in ours.items()]
        return [with_same_optimizer_keys(*pair, order) for pair in pairs], []
    joined = join_files_beside_model(one), join_files_beside_model(two)
    if joined[0] is not None and joined[1] is not None:
        return [with_same_optimizer_keys((one, joined[0]), (two, joined[1]), order)], []
    remarks = []
    for checkpoint in (one, two):
        model = checkpoint.model_component
        rest = ", ".join(part.path.name for part in checkpoint.components if part is not model)
        remarks += [f"compared only {model.path.name} of {model.path.parent}, not {rest}"] if rest else []
    return [(Side.of(one.model_component), Side.of(two.model_component))], remarks


def join_files_beside_model(checkpoint: Checkpoint) -> Side | None:
    """Return a checkpoint with the files beside its model; None if it has other components."""
    model = checkpoint.model_component
    if any(part.under is None for part in checkpoint.components if part is not model):
        return None
    return Side(model.path, with_separate_group_settings(checkpoint.layout))


def rename_parameters_in_sides(sides: Sequence[Side], named: NameOptions) -> list[Side]:
    """Return the sides (components of one checkpoint) with parameters renamed as the user asks."""
    layouts = named.rename_parameters_in_layouts([side.layout for side in sides])
    return [side.with_layout_and_remarks(layout) for side, layout in zip(sides, layouts, strict=True)]


def with_hub_names_on_both(one: Checkpoint, two: Checkpoint, pair: Pair, named: NameOptions = AS_THEY_ARE) -> Pair:
    """Return both sides under the Hub's names, if their families differ and a config.json describes one of the models.

    With the user's table, a side with names of the table gets the Hub's names by it.
    """
    config = named.find_config_of(one) or two.companions.config
    tables = [
        named.find_table_for(model.layout.tensors) if (model := find_weights_or_none(side.layout)) else None
        for side in pair
    ]
    if named.table is not None and not any(tables):
        message = f"no tensor of {pair[0].path} or {pair[1].path} has a name of the table `{named.table.name}`"
        raise Usage(message, hint="drop --map, or correct the names under `own` in the table")
    if tables[0] is tables[1] and one.family is two.family and not may_have_different_names(one, two, config):
        return pair
    named_sides = []
    for checkpoint, side, table in zip((one, two), pair, tables, strict=True):
        if not has_weights(side.layout):
            named_sides.append(side)
            continue
        asked = collect_name_arguments(checkpoint, HUB, config, table)
        layout, remarks = rename_parameters_if_possible(side.layout, asked, side.path, must=table is not None)
        named_sides.append(side.with_layout_and_remarks(layout, *remarks))
    return named_sides[0], named_sides[1]


def may_have_different_names(one: Checkpoint, two: Checkpoint, config: Mapping[str, Any] | None) -> bool:
    """Return whether names without a known family may still differ: the model has several forms on disk."""
    if config is None or one.family is not None:
        return False
    try:
        ours, theirs = (checkpoint.weights.layout.tensors.keys() for checkpoint in (one, two))
        return not (ours <= theirs or theirs <= ours) and len(forms_of_model(config)) > 1
    except (Mismatch, Unsupported):  # no model, several models, or an unknown one
        return False


def rename_parameters_if_possible(
    layout: Layout, asked: AskedNames, path: Path, *, must: bool = False
) -> tuple[Layout, list[str]]:
    """Return a layout under the names that were asked for; unchanged, with a remark, if that is impossible."""
    try:
        return rename_checkpoint_parameters(layout, asked)
    except (Mismatch, Unsupported) as error:
        if must:
            raise
        return layout, [f"did not translate the names in {path}: {error.message}"]


def with_same_optimizer_keys(one: tuple[Checkpoint, Side], two: tuple[Checkpoint, Side], order: Order | None) -> Pair:
    """Return both sides with parameter names in optimizers, if only one of them has parameter indices."""
    kinds = {find_parameter_key_kind(side.layout) for _, side in (one, two)}
    if kinds != {NAMES, IDS}:
        return one[1], two[1]
    return with_named_parameters(*one, order), with_named_parameters(*two, order)


def with_named_parameters(checkpoint: Checkpoint, side: Side, order: Order | None) -> Side:
    """Return a side with names for parameter indices, where they are certain or the user gives their order."""
    for optimizer in find_optimizers(side.layout):
        if optimizer.has_parameter_names:
            continue
        try:
            certain_names = parameter_names_from_models(checkpoint, side.layout, optimizer, order)
        except (Mismatch, Unsupported) as error:
            if order is not None:
                raise
            remark = f"`{optimizer.name}` in {side.path} lists its parameters by number: {error.message}; see {ORDER}"
            side = side.with_layout_and_remarks(side.layout, remark)
        else:
            renamed = with_parameter_keys(side.layout, optimizer, certain_names.names)
            side = side.with_layout_and_remarks(
                renamed, *([describe_assigned_names(optimizer, certain_names)] if order else ())
            )
    return side


def with_comparable_names(one: Side, two: Side) -> Pair:
    """Return both sides under comparable names; only the model if only one side has other entries.

    Names that are already equal do not change. Remarks are added to the second side.
    """
    remarks: list[str] = []
    a, b = one.layout, two.layout
    if a.tensors.keys() == b.tensors.keys() and not (has_unstorable_entries(a, b) or has_unstorable_entries(b, a)):
        return with_found_weights(one), with_found_weights(two)
    one, two = with_model_names(one), with_model_names(two)
    if one.weights and two.weights and bool(one.left_out) != bool(two.left_out):
        larger = one if one.left_out else two
        rest = ", ".join(f"{entry.name} ({entry.entries:,})" for entry in larger.left_out[:4])
        more = ", ..." if larger.left_out[4:] else ""
        remarks.append(f"compared only the model: {larger.layout.path} also has {rest}{more}")
        one, two = one.only_weights(), two.only_weights()
    wrapped = [side for side in (one, two) if side.wrapper and one.wrapper != two.wrapper]
    remarks += [f"removed the prefix `{side.wrapper}.` from the names in {side.layout.path}" for side in wrapped]
    tied = with_ties_of(two, one)
    return with_ties_of(one, two), tied.with_layout_and_remarks(tied.layout, *remarks)


def has_unstorable_entries(layout: Layout, written_as: Layout) -> bool:
    """Return whether a layout has non-tensor entries, and the other one has a format that cannot store them."""
    return bool(layout.blobs) and get_format(written_as.format).is_model_only


def with_found_weights(side: Side) -> Side:
    weights = find_weights_or_none(side.layout)
    return replace(side, weights=frozenset(weights.came_from.values()) if weights else frozenset())


def with_model_names(side: Side) -> Side:
    """Return the side with the model's own names for its parameters; unchanged if no model is found."""
    weights = find_weights_or_none(side.layout)
    keys = comparison_keys(side.layout, weights) if weights else {}
    if weights is None or len(set(keys.values())) < len(keys):  # two entries would get one name
        return side
    renamed = rename_in_group_lists(side.layout, partial(parameter_name_in_model, known=weights.came_from))
    return replace(
        side,
        layout=edits.with_new_key_paths(renamed, keys),
        weights=frozenset(weights.came_from),
        wrapper=weights.dotted_prefix,
        left_out=weights.summarize_left_out(),
    )


def comparison_keys(layout: Layout, weights: Weights) -> dict[str, KeyPath]:
    """Return the key path for the comparison of each entry, without the key above the model and torch's prefixes."""
    keys: dict[str, KeyPath] = {old: (new,) for new, old in weights.came_from.items()}
    above, clean = find_model_key(layout)[:-1], partial(parameter_name_in_model, known=weights.came_from)
    for name in layout.names:
        if name not in keys:
            key = layout.key(name)
            inner = key[len(above) :] if key[: len(above)] == above else key
            keys[name] = rename_in_key_path(inner, clean, False, weights.came_from)
    return keys


def with_ties_of(side: Side, other: Side) -> Side:
    """Return the side with the tied tensors, such as the head, that the other side has and this one left out."""
    missing = other.weights - side.layout.tensors.keys()
    config = find_companions(side.layout.root, None).config if missing else None
    if config is None:
        return side
    restored = restore_tied(replace(side.layout, keys={}), config)
    restorable = missing & restored.tensors.keys()
    tensors = {**side.layout.tensors, **{name: restored.tensors[name] for name in sorted(restorable)}}
    return replace(side, layout=replace(side.layout, tensors=tensors), weights=side.weights | restorable)

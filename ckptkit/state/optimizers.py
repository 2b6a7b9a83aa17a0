"""Optimizer keys and states: choose names or indices for the parameters, find the names, complete missing states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.checkpoints.optimizers.flattened_state_dict import find_flattened_optimizers, with_nested_optimizer
from ckptkit.checkpoints.optimizers.keys import (
    IDS,
    NAMES,
    Optimizer,
    find_optimizers,
    find_parameter_key_kind,
    indices_by_name,
    with_parameter_keys,
    with_separate_group_settings,
)
from ckptkit.checkpoints.optimizers.missing_states import States, find_optimizer_states, with_complete_states
from ckptkit.checkpoints.optimizers.parameter_names import (
    ORDER,
    ORDER_HINT,
    NamedNumbers,
    OneModel,
    Order,
    find_models,
    find_parameter_names,
    parameter_order_in_models,
)
from ckptkit.checkpoints.optimizers.parameter_order import is_buffer, model_tensors_by_key
from ckptkit.errors import Mismatch, Unsupported
from ckptkit.formats import get_format
from ckptkit.layout import Layout, StoredTensor
from ckptkit.layout.wrappers import parameter_name_in_model, without_wrapper_prefixes
from ckptkit.models.names.weights import find_model_key, find_weights
from ckptkit.state.options import ConvertOptions
from ckptkit.trainers import is_non_model_component_name
from ckptkit.words import count


@dataclass(frozen=True, slots=True)
class Completed:
    """The layouts of a checkpoint with a state for every parameter that an optimizer lists, and the new entries."""

    layouts: Sequence[Layout]
    entries: Mapping[str, str] = field(default_factory=dict)
    remarks: Sequence[str] = ()


def complete_optimizers(checkpoint: Checkpoint, layouts: Sequence[Layout], options: ConvertOptions) -> Completed:
    """Complete the optimizers in the layouts of a checkpoint, if `options` ask for it.

    Raises `Unsupported` if there is no optimizer with groups, or if the form of a state is uncertain.
    """
    if not options.complete_optimizer:
        return Completed(layouts)
    states_by_layout = [find_optimizer_states(layout) for layout in layouts]
    if not any(states_by_layout):
        raise missing_groups_error(checkpoint, layouts, "--complete-optimizer")
    completed: list[Layout] = []
    new_entries: dict[str, str] = {}
    remarks: list[str] = []
    for before, optimizers in zip(layouts, states_by_layout, strict=True):
        layout = before
        for states in optimizers:
            parameters = (
                parameters_by_optimizer_key(checkpoint, layout, states, options.order)
                if states.parameters_without_state
                else {}
            )
            layout, more = with_complete_states(layout, states, parameters)
            chosen = {name: spec for name, spec in more.items() if options.edits.is_selected(name)}
            new_entries |= {name: "0" if spec is None else str(spec) for name, spec in chosen.items()}
            remarks += describe_completed(checkpoint, states, parameters)
        completed.append(layout)
    return Completed(completed, new_entries, remarks)


def parameters_by_optimizer_key(
    checkpoint: Checkpoint, layout: Layout, states: States, order: Order | None
) -> dict[str, StoredTensor]:
    """Return the parameters by the optimizer's names or indices. Raises `Unsupported` or `Mismatch` if uncertain."""
    if states.optimizer is not None and not states.optimizer.has_parameter_names:
        named = parameter_names_from_models(checkpoint, layout, states.optimizer, order)
        tensors = model_tensors_by_key(named.model.layout)
        return {str(number): tensors[name] for number, name in named.names.items()}
    names = {one for group in states.groups for one in group} | states.of.keys()
    candidates: list[dict[str, StoredTensor]] = []  # of each model, by the names that the optimizer uses
    for model in models_in_checkpoint(checkpoint):
        known = find_weights(model.layout).layout.tensors
        own = {name: parameter_name_in_model(name, known) for name in names}
        candidates.append({name: known[known_name] for name, known_name in own.items() if known_name in known})
    fitting = [
        one for one in candidates if one.keys() == names and has_state_shapes_of(layout, states, one)
    ] or candidates[:1]
    for other in fitting[1:]:
        name = next((one for one in states.parameters_without_state if other[one].spec != fitting[0][one].spec), None)
        if name is not None:
            message = f"two models contain this tensor: one as {fitting[0][name].spec}, the other as {other[name].spec}"
            raise Unsupported(message, path=layout.path, tensor=name, hint="drop --complete-optimizer")
    return fitting[0]


def has_state_shapes_of(layout: Layout, states: States, parameters: Mapping[str, StoredTensor]) -> bool:
    """Return whether the states of an optimizer have the shapes of these parameters."""
    for key, kinds in states.of.items():
        shapes = {layout.tensors[name].spec.shape for name in kinds.values() if name in layout.tensors} - {()}
        if shapes and parameters[key].spec.shape not in shapes:
            return False
    return True


def describe_completed(checkpoint: Checkpoint, states: States, parameters: Mapping[str, StoredTensor]) -> list[str]:
    """Return notes on the states that were completed, and on parameters that are in no group."""
    if not states.parameters_without_state:
        return [f"`{states.name}` has a state for every parameter in its groups: nothing to complete"]
    parameter_count = count(sum(map(len, states.groups)), "parameter")
    lacking = f"`{states.name}` had no state for {len(states.parameters_without_state)} of its {parameter_count}"
    notes = [f"{lacking}: wrote zeros, the optimizer's initial state"]
    trained = {tensor.chunks for tensor in parameters.values()}
    floats = {name: one for name, one in checkpoint.weights.layout.tensors.items() if one.spec.dtype.kind == "float"}
    others = [name for name, one in floats.items() if one.chunks not in trained and not is_buffer(name)]
    if others:
        lack = f"{count(len(others), 'tensor')} of the model are not in any group of `{states.name}` and have no state"
        notes.append(f"{lack}; this is normal if frozen: `{others[0]}`")
    return notes


@dataclass(frozen=True, slots=True)
class Rekeying:
    """The new names or indices of an optimizer's parameters, and a remark.

    `members` maps each old key to the new one. It is empty if the optimizer does not change.
    """

    optimizer: Optimizer
    members: Mapping[Any, str | int]
    remark: str = ""

    def apply_to(self, layout: Layout) -> Layout:
        return with_parameter_keys(layout, self.optimizer, self.members) if self.members else layout


def nest_optimizers(
    checkpoint: Checkpoint, layout: Layout, order: Order | None, *, is_numbered: bool = False
) -> tuple[Layout, list[str]]:
    """Return a layout with parameter groups for the optimizers that torch has flattened, and remarks on their order.

    With `is_numbered`, the order of parameters within groups matters too, because they become indices. Raises
    `Unsupported` if the order is uncertain, `Mismatch` if the user's order does not fit.
    """
    remarks = []
    layout = with_separate_group_settings(layout)
    for optimizer in find_flattened_optimizers(layout):
        names = list(optimizer.settings)
        is_any = not is_numbered and len(optimizer.group_parameters(layout, names)) == 1
        # one process saved the entries in torch's order, and no tool has written them again; torch concatenates the
        # entries of all ranks (`create_default_global_save_plan` in torch/distributed/checkpoint/default_planner.py)
        is_of_one_rank = layout.format == "dcp" and layout.world_size in (None, 1)
        if is_any or (is_of_one_rank and not any(part.has_manifest for part in checkpoint.components)):
            layout = with_nested_optimizer(layout, optimizer, names)
            continue
        if order is None:
            message = f"torch has flattened `{optimizer.name}` on several ranks: the order of its parameters is unknown"
            raise Unsupported(message, path=layout.path, hint=ORDER_HINT)
        listed = order.names or parameter_order_in_models(
            models_in_checkpoint(checkpoint), names, checkpoint.model_component.path
        )
        by_bare_name = {without_wrapper_prefixes(name): name for name in names}
        layout = with_nested_optimizer(
            layout, optimizer, [by_bare_name.get(without_wrapper_prefixes(name), name) for name in listed]
        )
        remarks.append(f"`{optimizer.name}` got groups, each in the order that {ORDER} {order.text} says: assumed")
    return layout, remarks


def choose_optimizer_keys(
    checkpoint: Checkpoint, layouts: Sequence[Layout], options: ConvertOptions
) -> list[list[Rekeying]]:
    """Return, for each layout, the new keys of its optimizers.

    Raises `Unsupported` if names were requested and are uncertain, or indices for an optimizer without groups.
    """
    wanted = options.wanted_optimizer_keys
    to_shards = options.writer.is_sharded  # then an optimizer in one file gets names, if they are certain
    by_layout = [
        find_optimizers(layout) if wanted or (to_shards and not get_format(layout.format).is_sharded) else []
        for layout in layouts
    ]
    is_done = options.optimizer_keys == NAMES and any(find_parameter_key_kind(layout) == NAMES for layout in layouts)
    if wanted is not None and not any(by_layout) and (options.order or not is_done):
        raise missing_groups_error(checkpoint, layouts, "--optimizer-keys" if options.optimizer_keys else ORDER)
    chosen: list[list[Rekeying]] = [[] for _ in layouts]
    for layout, optimizers, rekeyings in zip(layouts, by_layout, chosen, strict=True):
        for optimizer in optimizers:
            if options.optimizer_keys == IDS and not optimizer.has_parameter_indices:
                rekeyings.append(Rekeying(optimizer, indices_by_name(layout, optimizer)))
            elif options.optimizer_keys != IDS and not optimizer.has_parameter_names:
                must = wanted == NAMES
                rekeyings.append(rekeying_by_name(checkpoint, layout, optimizer, options.order, is_required=must))
    return chosen


def missing_groups_error(checkpoint: Checkpoint, layouts: Sequence[Layout], option: str) -> Unsupported:
    """Return the error for a checkpoint without parameter groups, which `option` needs."""
    message = "found no optimizer with parameter groups, such as torch's own"
    kind = next(filter(None, map(find_parameter_key_kind, layouts)), None)
    if kind is not None:
        message = f"the optimizer's states have the {kind} of their parameters, but no group lists the parameters"
    return Unsupported(message, path=checkpoint.path, hint=f"drop {option}")


def rekeying_by_name(
    checkpoint: Checkpoint, layout: Layout, optimizer: Optimizer, order: Order | None, *, is_required: bool
) -> Rekeying:
    """Return names for an optimizer's indices; no change for uncertain ones, or an error if names are required."""
    try:
        certain = parameter_names_from_models(checkpoint, layout, optimizer, order)
    except (Mismatch, Unsupported) as error:
        if is_required:
            raise
        why = f"{error.tensor}: {error.message}" if error.tensor else error.message
        keeps = f"`{optimizer.name}` keeps its parameter indices, because the names are not certain"
        return Rekeying(optimizer, {}, f"{keeps} ({why}); see {ORDER}")
    return Rekeying(optimizer, {**certain.names}, describe_assigned_names(optimizer, certain))


def describe_assigned_names(optimizer: Optimizer, named: NamedNumbers) -> str:
    return f"`{optimizer.name}` got names for its {count(len(named.names), 'parameter')}: {named.proof}"


def parameter_names_from_models(
    checkpoint: Checkpoint, layout: Layout, optimizer: Optimizer, order: Order | None = None
) -> NamedNumbers:
    """Return the names for an optimizer's indices. Raises `Unsupported` or `Mismatch` for uncertain ones."""
    path = checkpoint.model_component.path
    return find_parameter_names(layout, optimizer, models_in_checkpoint(checkpoint), path, order)


def models_in_checkpoint(checkpoint: Checkpoint) -> list[OneModel]:
    """Return the models in a checkpoint, those of its model component first. Raises `Mismatch` if it has no model."""
    main = checkpoint.model_component
    parts = [
        main,
        *(part for part in checkpoint.components if part is not main and not is_non_model_component_name(part.place)),
    ]
    models = [model for part in parts for model in find_models(part.layout)]
    if not models:
        find_model_key(main.layout)
    return models

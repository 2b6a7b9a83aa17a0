"""Decide whether an optimizer is written with names or with numbers, and which they are, and complete it with zeros."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.checkpoints.optimizers.flattened import find_flattened, nest
from ckptkit.checkpoints.optimizers.keys import (
    IDS,
    NAMES,
    Optimizer,
    find_optimizers,
    kind_of_keys,
    numbers_of,
    rekeyed,
    split_groups,
)
from ckptkit.checkpoints.optimizers.missing_states import States, complete_states, find_states
from ckptkit.checkpoints.optimizers.owners import (
    ORDER,
    ORDER_HINT,
    NamedNumbers,
    OneModel,
    Order,
    find_models,
    find_names,
    order_in_models,
)
from ckptkit.checkpoints.optimizers.parameter_order import is_buffer, own_tensors
from ckptkit.errors import Mismatch, Unsupported
from ckptkit.formats import get_format
from ckptkit.layout import Layout, StoredTensor
from ckptkit.layout.wrappers import bare, own_name
from ckptkit.models.names.weights import find_model_key, find_weights
from ckptkit.state.options import ConvertOptions
from ckptkit.trainers import is_other_part
from ckptkit.words import count


@dataclass(frozen=True, slots=True)
class Completed:
    """The layouts of a checkpoint with a state of every parameter that an optimizer lists, and the new entries."""

    layouts: Sequence[Layout]
    entries: Mapping[str, str] = field(default_factory=dict)
    remarks: Sequence[str] = ()


def complete_optimizers(checkpoint: Checkpoint, layouts: Sequence[Layout], order: Order | None) -> Completed:
    """Complete the optimizers in the layouts of a checkpoint; `order` is what the user says of a numbered one.

    Raises `Unsupported` where there is no optimizer with groups, or nothing that tells for certain what a state is
    like.
    """
    found = [find_states(layout) for layout in layouts]
    if not any(found):
        raise without_groups(checkpoint, layouts, "--complete-optimizer")
    completed: list[Layout] = []
    made: dict[str, str] = {}
    remarks: list[str] = []
    for before, optimizers in zip(layouts, found, strict=True):
        layout = before
        for states in optimizers:
            parameters = parameters_for(checkpoint, layout, states, order) if states.lacking else {}
            layout, more = complete_states(layout, states, parameters)
            made |= {name: "0" if spec is None else str(spec) for name, spec in more.items()}
            remarks += say(checkpoint, states, parameters)
        completed.append(layout)
    return Completed(completed, made, remarks)


def parameters_for(
    checkpoint: Checkpoint, layout: Layout, states: States, order: Order | None
) -> dict[str, StoredTensor]:
    """Return the model's parameters by what an optimizer calls them; those that it has by name, or by its numbers.

    Raises `Unsupported` where it is not certain which parameter a number is, `Mismatch` where there is no model.
    """
    if states.optimizer is not None and not states.optimizer.is_named:
        found = names_in(checkpoint, layout, states.optimizer, order)
        tensors = own_tensors(found.model.layout)
        return {str(number): tensors[name] for number, name in found.names.items()}
    names = {one for group in states.groups for one in group} | states.of.keys()
    every = [parameters_called(names, find_weights(model.layout).layout) for model in models_of(checkpoint)]
    fitting = [one for one in every if one.keys() == names and is_of(layout, states, one)] or every[:1]
    for other in fitting[1:]:
        name = next((one for one in states.lacking if other[one].spec != fitting[0][one].spec), None)
        if name is not None:
            message = f"two models contain this tensor: one as {fitting[0][name].spec}, the other as {other[name].spec}"
            raise Unsupported(message, path=layout.path, tensor=name, hint="drop --complete-optimizer")
    return fitting[0]


def parameters_called(names: Iterable[str], model: Layout) -> dict[str, StoredTensor]:
    """Return the tensors of a model by what an optimizer calls them, as far as the model has them."""
    own = {name: own_name(name, model.tensors) for name in names}
    return {name: model.tensors[found] for name, found in own.items() if found in model.tensors}


def is_of(layout: Layout, states: States, parameters: Mapping[str, StoredTensor]) -> bool:
    """Return whether the states of an optimizer have the shapes of these parameters."""
    for one, kinds in states.of.items():
        shapes = {layout.tensors[name].spec.shape for name in kinds.values() if name in layout.tensors} - {()}
        if shapes and parameters[one].spec.shape not in shapes:
            return False
    return True


def say(checkpoint: Checkpoint, states: States, parameters: Mapping[str, StoredTensor]) -> list[str]:
    """Return in words whose states were completed, and what has none because it is in no group."""
    if not states.lacking:
        return [f"`{states.name}` has a state for every parameter in its groups: nothing to complete"]
    total = sum(map(len, states.groups))
    lacking = f"`{states.name}` had no state for {len(states.lacking)} of its {count(total, 'parameter')}"
    notes = [f"{lacking}: wrote zeros, the optimizer's initial state"]
    trained = {tensor.chunks for tensor in parameters.values()}
    floats = {name: one for name, one in checkpoint.weights.layout.tensors.items() if one.spec.dtype.kind == "float"}
    others = [name for name, one in floats.items() if one.chunks not in trained and not is_buffer(name)]
    if others:
        notes.append(
            f"{count(len(others), 'tensor')} of the model are not in any group of `{states.name}` and have no state; "
            f"this is normal if frozen: `{others[0]}`"
        )
    return notes


@dataclass(frozen=True, slots=True)
class Rekeying:
    """The other names or numbers that an optimizer's parameters get, and what there is to say of it.

    `members` has the new one of each old. It is empty if the optimizer stays as it is.
    """

    optimizer: Optimizer
    members: Mapping[Any, str | int]
    remark: str = ""

    def edit(self, layout: Layout) -> Layout:
        """Return a layout with the new ones, wherever the optimizer occurs in it."""
        return rekeyed(layout, self.optimizer, self.members) if self.members else layout


def nest_optimizers(
    checkpoint: Checkpoint, layout: Layout, order: Order | None, *, is_numbered: bool = False
) -> tuple[Layout, list[str]]:
    """Return a layout with groups for the optimizers that torch has flattened, and remarks on their order.

    If their parameters become numbers, their order in the groups counts, else the order of the groups alone. Raises
    `Unsupported` where that is not certain, `Mismatch` if the order that the user says does not fit.
    """
    remarks = []
    layout = split_groups(layout)
    for optimizer in find_flattened(layout):
        names = list(optimizer.settings)
        is_any = not is_numbered and len(optimizer.groups(layout, names)) == 1
        if is_any or is_in_order(checkpoint, layout):
            layout = nest(layout, optimizer, names)
            continue
        if order is None:
            message = f"torch has flattened `{optimizer.name}` on several ranks: the order of its parameters is unknown"
            raise Unsupported(message, path=layout.path, hint=ORDER_HINT)
        listed = order.names or order_in_models(models_of(checkpoint), names, checkpoint.model_component.path)
        called = {bare(name): name for name in names}
        layout = nest(layout, optimizer, [called.get(bare(name), name) for name in listed])
        remarks.append(f"`{optimizer.name}` got groups, each in the order that {ORDER} {order.text} says: assumed")
    return layout, remarks


def is_in_order(checkpoint: Checkpoint, layout: Layout) -> bool:
    """Return whether the entries have the order in which torch wrote them: one process wrote, and nobody rewrote them.

    Source: `create_default_global_save_plan` in torch/distributed/checkpoint/default_planner.py, which concatenates the
    entries of all ranks.
    """
    is_rewritten = any(part.has_manifest for part in checkpoint.components)
    return layout.format == "dcp" and layout.world_size in (None, 1) and not is_rewritten


def key_optimizers(checkpoint: Checkpoint, layouts: Sequence[Layout], options: ConvertOptions) -> list[list[Rekeying]]:
    """Return, for each layout, what becomes of the keys of its optimizers.

    Raises `Unsupported` where names were asked for and are not certain, or numbers of an optimizer without groups.
    """
    wanted = options.wanted_keys
    if wanted is None:
        becomes_shards = options.writer.is_sharded
        wants = [NAMES if becomes_shards and not get_format(each.format).is_sharded else None for each in layouts]
    else:
        wants = [wanted] * len(layouts)
    found = [find_optimizers(layout) if want else [] for layout, want in zip(layouts, wants, strict=True)]
    is_done = options.optimizer_keys == NAMES and any(kind_of_keys(layout) == NAMES for layout in layouts)
    if wanted is not None and not any(found) and (options.order or not is_done):
        raise without_groups(checkpoint, layouts, "--optimizer-keys" if options.optimizer_keys else ORDER)
    return [
        [rekeying for optimizer in optimizers if (rekeying := rekey(checkpoint, layout, optimizer, options))]
        for layout, optimizers in zip(layouts, found, strict=True)
    ]


def without_groups(checkpoint: Checkpoint, layouts: Sequence[Layout], option: str) -> Unsupported:
    """Return the error for a checkpoint in which no group of an optimizer lists parameters, as `option` needs."""
    message = "found no optimizer with parameter groups, such as torch's own"
    kind = next(filter(None, map(kind_of_keys, layouts)), None)
    if kind is not None:
        message = f"the optimizer's states have the {kind} of their parameters, but no group lists the parameters"
    return Unsupported(message, path=checkpoint.path, hint=f"drop {option}")


def rekey(checkpoint: Checkpoint, layout: Layout, optimizer: Optimizer, options: ConvertOptions) -> Rekeying | None:
    """Return what becomes of the keys of an optimizer; None if it has those that are wanted."""
    if options.optimizer_keys == IDS:
        return None if optimizer.is_numbered else Rekeying(optimizer, numbers_of(layout, optimizer))
    if optimizer.is_named:
        return None
    must = options.wanted_keys == NAMES
    return by_name(checkpoint, layout, optimizer, options.order, must=must)


def by_name(
    checkpoint: Checkpoint, layout: Layout, optimizer: Optimizer, order: Order | None, *, must: bool
) -> Rekeying:
    """Return an optimizer with names for its numbers; with its numbers if no names are certain.

    Raises `Unsupported` or `Mismatch` for names that are not certain and `must` be.
    """
    try:
        found = names_in(checkpoint, layout, optimizer, order)
    except (Mismatch, Unsupported) as error:
        if must:
            raise
        why = f"{error.tensor}: {error.message}" if error.tensor else error.message
        keeps = (
            f"`{optimizer.name}` keeps its parameter numbers, because the names are not certain ({why}); see {ORDER}"
        )
        return Rekeying(optimizer, {}, keeps)
    return Rekeying(optimizer, {**found.names}, describe_names(optimizer, found))


def describe_names(optimizer: Optimizer, found: NamedNumbers) -> str:
    """Return in words that an optimizer got names, and what proves them."""
    return f"`{optimizer.name}` got names for its {count(len(found.names), 'parameter')}: {found.proof}"


def names_in(checkpoint: Checkpoint, layout: Layout, optimizer: Optimizer, order: Order | None = None) -> NamedNumbers:
    """Return the names for the numbers of an optimizer in a layout, by the models of the checkpoint.

    Raises `Unsupported` or `Mismatch` if they are not certain, or not in the `order` that the user says.
    """
    path = checkpoint.model_component.path
    return find_names(layout, optimizer, models_of(checkpoint), path, order)


def models_of(checkpoint: Checkpoint) -> list[OneModel]:
    """Return the models in a checkpoint, first those of its model part. Raises `Mismatch` if it has no model."""
    main = checkpoint.model_component
    parts = [main, *(part for part in checkpoint.components if part is not main and not is_other_part(part.place))]
    models = [model for part in parts for model in find_models(part.layout)]
    if not models:
        find_model_key(main.layout)
    return models

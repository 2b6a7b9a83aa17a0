"""Complete the optimizers of a checkpoint: zeros for the parameters that they have no state of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.checkpoints.optimizers.missing_states import States, complete_states, find_states
from ckptkit.checkpoints.optimizers.owners import Order
from ckptkit.checkpoints.optimizers.parameter_order import is_buffer, own_tensors
from ckptkit.errors import Unsupported
from ckptkit.layout import Layout, StoredTensor
from ckptkit.layout.wrappers import own_name
from ckptkit.models.names.weights import find_weights
from ckptkit.state.optimizers import models_of, names_in, without_groups
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

"""Complete the optimizers of a checkpoint: zeros for the parameters that they have no state of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.errors import Unsupported
from ckptkit.layout import Layout, StoredTensor
from ckptkit.names.wrappers import own_name
from ckptkit.optimizers.missing_states import States, complete_states, find_states
from ckptkit.optimizers.parameter_order import find_names, is_buffer
from ckptkit.pictures.words import count


@dataclass(frozen=True, slots=True)
class Completed:
    """The layouts of a checkpoint with a state of every parameter that an optimizer lists, and the new entries."""

    layouts: Sequence[Layout]
    entries: Mapping[str, str] = field(default_factory=dict)
    remarks: Sequence[str] = ()


def complete_optimizers(checkpoint: Checkpoint, layouts: Sequence[Layout]) -> Completed:
    """Complete the optimizers in the layouts of a checkpoint.

    Raises `Unsupported` where there is no optimizer with groups, or nothing that tells for certain what a state is
    like.
    """
    found = [find_states(layout) for layout in layouts]
    if not any(found):
        message = "no optimizer with groups of parameters is here, as torch's own have them"
        raise Unsupported(message, path=checkpoint.path, hint="leave --complete-optimizer out")
    completed: list[Layout] = []
    made: dict[str, str] = {}
    remarks: list[str] = []
    for before, optimizers in zip(layouts, found, strict=True):
        layout = before
        for states in optimizers:
            parameters = parameters_for(checkpoint, layout, states) if states.lacking else {}
            layout, more = complete_states(layout, states, parameters)
            made |= {name: "0" if spec is None else str(spec) for name, spec in more.items()}
            remarks += say(checkpoint, states, parameters)
        completed.append(layout)
    return Completed(completed, made, remarks)


def parameters_for(checkpoint: Checkpoint, layout: Layout, states: States) -> dict[str, StoredTensor]:
    """Return the model's parameters by what an optimizer calls them; those that it has by name, or by its numbers.

    Raises `Unsupported` where it is not certain which parameter a number is, `Mismatch` where there is no model.
    """
    tensors = checkpoint.weights.layout.tensors
    called: Mapping[str, str] = {one: one for group in states.groups for one in group} | {one: one for one in states.of}
    if states.optimizer is not None and not states.optimizer.is_named:
        model = checkpoint.model_part
        names = find_names(layout, states.optimizer, model.layout, model.path)
        called = {str(number): str(name) for number, name in names.items()}
    own = {one: own_name(name, tensors) for one, name in called.items()}
    return {one: tensors[name] for one, name in own.items() if name in tensors}


def say(checkpoint: Checkpoint, states: States, parameters: Mapping[str, StoredTensor]) -> list[str]:
    """Return in words whose states were completed, and what has none because it is in no group."""
    if not states.lacking:
        return [f"`{states.name}` has a state of every parameter in its groups: nothing had to be completed"]
    total = sum(map(len, states.groups))
    lacking = f"`{states.name}` had no state of {len(states.lacking)} of its {count(total, 'parameter')}"
    notes = [f"{lacking}: zeros were written, with which it begins"]
    trained = {tensor.chunks for tensor in parameters.values()}
    floats = {name: one for name, one in checkpoint.weights.layout.tensors.items() if one.spec.dtype.kind == "float"}
    others = [name for name, one in floats.items() if one.chunks not in trained and not is_buffer(name)]
    if others:
        notes.append(
            f"{count(len(others), 'tensor')} of the model are in no group of `{states.name}`, as frozen ones are, "
            f"and have no state, such as `{others[0]}`"
        )
    return notes

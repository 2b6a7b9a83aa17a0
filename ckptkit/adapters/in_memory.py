"""Merge adapters into a base whose files name and split tensors differently than the model in memory.

In memory, the experts of a layer are one parameter; in the files, each expert and matrix has its own tensor. So a
weight update of a box of the parameter in memory becomes an update of a full tensor in the files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ckptkit.adapters.merge_arithmetic import Merging
from ckptkit.adapters.merged_blocks import SubBoxStep
from ckptkit.checkpoints.component import Component
from ckptkit.errors import Mismatch, Unsupported
from ckptkit.layout import Chunk, Layout, StoredTensor
from ckptkit.layout.box import Shape
from ckptkit.models.names.naming import name_weights
from ckptkit.models.names.transformers import TRANSFORMERS
from ckptkit.models.names.weights import Weights
from ckptkit.state.names import collect_name_arguments

_AS_IN_MEMORY = (
    "pass a base that transformers saved with `save_pretrained(DIR, save_original_format=False)`, and --names keep"
)


class InMemoryLocation(NamedTuple):
    """The parameter in memory that contains a file's tensor, and the index of the tensor's first element in it."""

    name: str
    start: Shape


def layout_under_memory_names(component: Component, weights: Weights, config: Mapping[str, Any]) -> Layout | None:
    """Return a component's weights under transformers' in-memory names; None if the conversion is unknown."""
    try:
        return name_weights(weights, collect_name_arguments(component, TRANSFORMERS.name, config))[0].layout
    except (Mismatch, Unsupported):  # keep the base as in its files; the merge reports what does not fit
        return None


def find_location_in_memory(
    tensor: StoredTensor, owners: Mapping[tuple[str, int], tuple[str, Chunk]]
) -> InMemoryLocation | None:
    """Return where a tensor is in memory if it is contiguous there; None if it is scattered or transposed."""
    places = set()
    for chunk in tensor.chunks:
        name, stored_chunk = owners.get((chunk.path, chunk.offset), ("", chunk))
        more = len(stored_chunk.size) - len(chunk.size)
        if (
            not name
            or stored_chunk.size != (1,) * more + chunk.size
            or (stored_chunk.strides or ())[more:] != (chunk.strides or ())
        ):
            return None
        start = (0,) * more + chunk.start
        places.add(InMemoryLocation(name, tuple(a - b for a, b in zip(stored_chunk.start, start, strict=True))))
    return places.pop() if len(places) == 1 else None


def translate_updates_to_files(merging: Merging, files: Layout) -> Merging:
    """Move the updates of the model in memory to the tensors in its files. Raises `Unsupported` for a scattered one."""
    in_files, memory, reached = Merging(files), merging.base, set()
    in_files.notes = merging.notes
    # files and memory share their byte ranges
    owners = {
        (chunk.path, chunk.offset): (name, chunk) for name, tensor in memory.tensors.items() for chunk in tensor.chunks
    }
    for name, tensor in files.tensors.items():
        if name in memory.tensors and memory.tensors[name].spec == tensor.spec:
            location: InMemoryLocation | None = InMemoryLocation(name, (0,) * len(tensor.spec.shape))
        else:
            location = find_location_in_memory(tensor, owners)
        if location is None:
            continue
        reached.add(location.name)
        is_whole = memory.tensors[location.name].spec.shape == tensor.spec.shape
        move_updates(merging, location.name, in_files, name, None if is_whole else location.start)
    for name in merging.changed_tensors:
        if name not in memory.tensors:
            move_updates(merging, name, in_files, name, None)
        elif name not in reached:
            message = "the adapter changes this tensor, but the base's files store its elements in another order"
            raise Unsupported(message, path=files.root, tensor=name, hint=_AS_IN_MEMORY)
    return in_files


def move_updates(merging: Merging, name: str, target: Merging, new: str, start: Shape | None) -> None:
    """Move the updates of tensor `name` to `new`: the same tensor, or the box of `name` that begins at `start`."""
    if name not in merging.changed_tensors:
        return
    begin, steps = merging.begins.get(name), merging.steps.get(name, [])
    if start is None:
        target.tensors[new] = merging.tensors[name]
        target.reach |= {new: merging.reach[name]} if name in merging.reach else {}
    elif begin is not None or name in merging.reach:
        message = "the adapter changes the full tensor, but the base's files split it into several tensors"
        raise Unsupported(message, path=merging.base.root, tensor=name, hint=_AS_IN_MEMORY)
    else:
        steps = [SubBoxStep(step, start) for step in steps]
    if begin is not None:
        target.begins[new] = begin
    target.steps[new] += steps

"""Name the parameters of a numbered optimizer, by the order in which the model's file or its config has them.

A file of torch.save has the order of the model's `state_dict()`, which is that of its modules. Safetensors are sorted
by name, and a distributed checkpoint by what ranks share: of these only the config tells, for a model type that is
known here, or one that transformers builds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ckptkit.errors import Unsupported
from ckptkit.layout import Layout, StoredTensor
from ckptkit.layout.box import Shape
from ckptkit.models.expected import expected
from ckptkit.models.names.weights import find_model_key, find_weights

_IN_ORDER = ("pt", "pt_shards")  # the formats that keep the order of a state dict
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked", "inv_freq")  # floats that are no parameters


def ordered_parameters(layout: Layout, config: Mapping[str, Any] | None) -> dict[str, Shape]:
    """Return the shapes of the model's parameters in order, tied ones once, as the keys call them.

    Raises `Unsupported` if nothing tells the order.
    """
    shapes = float_shapes(without_ties(own_tensors(layout)))
    if layout.format in _IN_ORDER and is_order_of_modules(shapes):
        order: Iterable[str] = shapes
    else:
        order = order_by_config(shapes, config)
    return {name: shapes[name] for name in order if name in shapes and not is_buffer(name)}


def own_tensors(layout: Layout) -> dict[str, StoredTensor]:
    """Return the tensors of the model as the keys call them, in order."""
    above = len(find_model_key(layout))
    names = find_weights(layout).came_from.values()
    return {".".join(map(str, layout.key(name)[above:])): layout.tensors[name] for name in names}


def without_ties(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors without those that share their bytes with an earlier one."""
    first: dict[object, str] = {}
    for name, tensor in tensors.items():
        first.setdefault(place_of(name, tensor), name)
    return {name: tensors[name] for name in first.values()}


def float_shapes(tensors: Mapping[str, StoredTensor]) -> dict[str, Shape]:
    """Return the shapes of the tensors that an optimizer can train."""
    return {name: tensor.spec.shape for name, tensor in tensors.items() if tensor.spec.dtype.kind == "float"}


def is_buffer(name: str) -> bool:
    """Return whether a tensor of floats is known to be a buffer, by its name."""
    return name.endswith(_BUFFERS)


def is_order_of_modules(names: Iterable[str]) -> bool:
    """Return whether names come as a model's modules give them: each module's own first, then those of its children.

    Numbered ones come by their numbers. Names that are sorted do not: a model with more than numbered layers has them
    in the order of its source.
    """
    names = list(names)
    closed: set[str] = set()
    before: list[str] = []
    for name in names:
        modules = modules_of(name)
        left = before[shared(before, modules) :]
        closed.update(left)
        entered = modules[len(before) - len(left) :]
        if (left and not entered) or not closed.isdisjoint(entered) or (left and is_back(left[0], entered[0])):
            return False
        before = modules
    kinds = {tuple(step for step in name.split(".") if not step.isdecimal()) for name in names}
    return len(kinds) <= 1 or names != sorted(names)


def modules_of(name: str) -> list[str]:
    """Return the modules that a parameter lies in, from the outermost."""
    return [name[: dot.start()] for dot in re.finditer(r"\.", name)]


def shared(one: Sequence[str], other: Sequence[str]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def is_back(left: str, entered: str) -> bool:
    one, other = left.rpartition(".")[2], entered.rpartition(".")[2]
    return one.isdecimal() and other.isdecimal() and int(one) > int(other)


def place_of(name: str, tensor: StoredTensor) -> object:
    """Return where a tensor lies, by which tied ones are told; of an empty one, which lies nowhere, its name."""
    places = tuple((chunk.path, chunk.offset, chunk.strides) for chunk in tensor.chunks)
    return (places, tensor.spec) if tensor.spec.nbytes else name


def order_by_config(shapes: Mapping[str, Shape], config: Mapping[str, Any] | None) -> Iterable[str]:
    """Return all names of the model that a config describes, in order, if these are the shapes of its tensors."""
    if config is None:
        hint = "put the model's config.json beside the checkpoint"
        raise Unsupported("no file gives the order of the model's parameters", hint=hint)
    model = expected(config)
    order = {name: shape for name, shape in model.shapes.items() if name in model.parameters or name in model.tied}
    missing = [name for name in model.parameters if name not in shapes]
    wrong = [name for name, shape in shapes.items() if order.get(name) != shape]
    if missing or wrong:
        name = min([*missing, *wrong], default=None)
        raise Unsupported("config.json describes other tensors, so it does not give the order of these", tensor=name)
    return order

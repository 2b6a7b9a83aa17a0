"""Tell a model's parameters in the order of its `parameters()`, by its file or by its config. Reads no tensor.

A file of torch.save has the order of the model's `state_dict()`, which is that of its modules. Safetensors are sorted
by name, and a distributed checkpoint by what ranks share: of these only the config tells, for a model type that is
known here, or one that transformers builds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ckptkit.checkpoints.part import Part
from ckptkit.errors import Unsupported
from ckptkit.layout import Layout, StoredTensor
from ckptkit.models.companions import find_config
from ckptkit.models.expected import HEAD, expected_shapes, is_known, is_tied
from ckptkit.models.model_shapes import shapes_by_config
from ckptkit.names.weights import find_model_key, find_weights
from ckptkit.optimizers.keys import Optimizer, names_of
from ckptkit.tensors.box import Shape

_IN_ORDER = ("pt", "pt_shards")  # the formats that keep the order of a state dict


def find_names(model: Part, layout: Layout, optimizer: Optimizer) -> dict[Any, str | int]:
    """Return the name for each number of an optimizer in a layout, by the order of the model's parameters.

    Raises `Unsupported` where it is not certain, `Mismatch` where there is no model.
    """
    return names_of(layout, optimizer, ordered_parameters(model.layout, find_config(model.path)))


def ordered_parameters(layout: Layout, config: Mapping[str, Any] | None) -> dict[str, Shape]:
    """Return the shapes of the model's tensors in the order of its parameters, tied ones once, as the keys call them.

    Raises `Unsupported` where nothing tells the order.
    """
    above = len(find_model_key(layout))
    first: dict[object, str] = {}
    for name in find_weights(layout).came_from.values():
        first.setdefault(place_of(name, layout.tensors[name]), name)
    names = {name: ".".join(map(str, layout.key(name)[above:])) for name in first.values()}
    tensors = {own: layout.tensors[name] for name, own in names.items()}
    shapes = {name: tensor.spec.shape for name, tensor in tensors.items() if tensor.spec.dtype.kind == "float"}
    if layout.format in _IN_ORDER and is_order_of_modules(shapes):
        return shapes
    order = order_by_config(shapes, config)
    return {name: shapes[name] for name in order if name in shapes}


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
        raise Unsupported("nothing tells the order of the model's parameters", hint=hint)
    expected = (expected_shapes(config) if is_known(config) else shapes_by_config(config)) or {}
    missing = [name for name in expected if name not in shapes and not (name == HEAD and is_tied(config))]
    wrong = [name for name, shape in shapes.items() if expected.get(name) != shape]
    if not expected or missing or wrong:
        name = min([*missing, *wrong], default=None)
        raise Unsupported("config.json calls for other tensors: it does not tell the order of these", tensor=name)
    return expected

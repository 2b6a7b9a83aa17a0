"""Name the parameters of an optimizer with indices, by the parameter order in the model's file or its config.

A file of torch.save keeps the order of the model's `state_dict()`, which is the order of its modules. Safetensors files
are sorted by name, and a distributed checkpoint by ranks: for these only the config gives the order, for a model type
that ckptkit knows or transformers builds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from ckptkit.errors import Unsupported
from ckptkit.layout import Layout, StoredTensor
from ckptkit.layout.box import Shape
from ckptkit.models.expected import expected_model
from ckptkit.models.names.weights import find_model_key, find_weights

_ORDERED_FORMATS = ("pt", "pt_shards")  # the formats that keep the order of a state dict
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked", "inv_freq")  # suffixes of buffers


def ordered_parameters(layout: Layout, config: Mapping[str, Any] | None) -> dict[str, Shape]:
    """Return the model's parameter shapes in order, tied ones once. Raises `Unsupported` if the order is unknown."""
    shapes = float_shapes(without_tied_tensors(model_tensors_by_key(layout)))
    order = shapes
    if layout.format not in _ORDERED_FORMATS or not is_order_of_modules(shapes):
        if config is None:
            hint = "put the model's config.json beside the checkpoint"
            raise Unsupported("no file gives the order of the model's parameters", hint=hint)
        model = expected_model(config)
        order = {name: shape for name, shape in model.shapes.items() if name in model.parameters or name in model.tied}
        missing = [name for name in model.parameters if name not in shapes]
        wrong = [name for name, shape in shapes.items() if order.get(name) != shape]
        if missing or wrong:
            message = "config.json describes other tensors, so it does not give the order of these"
            raise Unsupported(message, tensor=min([*missing, *wrong]))
    return {name: shapes[name] for name in order if name in shapes and not is_buffer(name)}


def model_tensors_by_key(layout: Layout) -> dict[str, StoredTensor]:
    """Return the tensors of the model by key, in order."""
    above = len(find_model_key(layout))
    names = find_weights(layout).came_from.values()
    return {".".join(map(str, layout.key(name)[above:])): layout.tensors[name] for name in names}


def without_tied_tensors(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors, except tensors that share their bytes with an earlier tensor."""
    first: dict[object, str] = {}
    for name, tensor in tensors.items():
        places = tuple((chunk.path, chunk.offset, chunk.strides) for chunk in tensor.chunks)
        first.setdefault((places, tensor.spec) if tensor.spec.nbytes else name, name)
    return {name: tensors[name] for name in first.values()}


def float_shapes(tensors: Mapping[str, StoredTensor]) -> dict[str, Shape]:
    """Return the shapes of the tensors that an optimizer can train."""
    return {name: tensor.spec.shape for name, tensor in tensors.items() if tensor.spec.dtype.kind == "float"}


def is_buffer(name: str) -> bool:
    return name.endswith(_BUFFERS)


def is_order_of_modules(names: Iterable[str]) -> bool:
    """Return whether names are in the order of a model's modules: a module's own names, then its children's.

    Numbered modules are in the order of their numbers. Sorted names do not count: a model with more than numbered
    layers has its names in the order of its source code.
    """
    names = list(names)
    closed: set[str] = set()
    before: list[str] = []
    for name in names:
        modules = [name[: dot.start()] for dot in re.finditer(r"\.", name)]  # around the parameter, outermost first
        exited = [module for module in before if module not in modules]
        entered = [module for module in modules if module not in before]
        closed.update(exited)
        # a module that was left must not be entered again, and numbered modules must ascend
        is_disordered = exited and (not entered or is_lower_module_number(exited[0], entered[0]))
        if is_disordered or not closed.isdisjoint(entered):
            return False
        before = modules
    kinds = {tuple(step for step in name.split(".") if not step.isdecimal()) for name in names}
    return len(kinds) <= 1 or names != sorted(names)


def is_lower_module_number(exited_module: str, entered_module: str) -> bool:
    left_label, entered_label = exited_module.rpartition(".")[2], entered_module.rpartition(".")[2]
    return left_label.isdecimal() and entered_label.isdecimal() and int(left_label) > int(entered_label)

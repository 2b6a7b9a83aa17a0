"""Read a model-states file: names and shapes, low-precision weights, buffers, frozen parameters, client state.

Source: `_save_checkpoint` and `_common_checkpoint_state` in deepspeed/runtime/engine.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckptkit.errors import Unsupported
from ckptkit.formats.archives.flatten import Flattening
from ckptkit.formats.archives.torch_save import StateFile
from ckptkit.layout.box import Shape
from ckptkit.plugins.deepspeed.auto_experts import AutoLayer, autoep_layers_by_tensor
from ckptkit.plugins.deepspeed.tensor_parallel import SliceMap, find_slice_map
from ckptkit.plugins.deepspeed.values import (
    dict_or_empty,
    require_count,
    require_dict,
    require_each,
    require_name,
    shapes_in_dict,
)

DEGREES = "checkpoint_parallel_dimensions"
_USED = frozenset(
    [
        *("module", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params", "buffer_names"),
        *("optimizer", "dp_world_size", "mp_world_size", DEGREES, "num_experts"),
    ]
)


@dataclass(frozen=True, slots=True)
class ModelStates:
    """The contents of one model-states file.

    `shapes` are the parameter shapes of each group or sub-group, in storage order; None without ZeRO. `module` is None
    if layers have their own files. `aliases` maps the name of a tied parameter to the name that has the data.
    `auto_layers` are the AutoEP expert layers by tensor name. `slices` describes how tensor-parallel ranks split each
    parameter; None with one rank. `others` contains the client state and all other entries outside the model.
    """

    path: str
    flattening: Flattening
    module: Mapping[str | int, Any] | None
    shapes: tuple[Mapping[str, Shape], ...] | None
    frozen: Mapping[str, Shape]
    fragments: Mapping[str | int, Any]
    aliases: Mapping[str, str]
    buffers: frozenset[str]
    optimizer: Any
    auto_layers: Mapping[str, AutoLayer]
    slices: SliceMap | None
    others: Mapping[str | int, Any]
    saved: Mapping[str | int, Any]


def read_model_states(file: StateFile) -> ModelStates:
    """Return the contents of a model-states file. The caller adds the path to the errors."""
    saved = require_dict(file.value, file.name)
    degrees = dict_or_empty(saved.get(DEGREES), DEGREES)
    ranks = require_count(degrees.get("tp_degree", 1), DEGREES)
    slices = find_slice_map(saved, ranks) if ranks != 1 else None
    if ranks != 1 and slices is None:
        raise tensor_parallel_error()
    module, shapes = saved.get("module"), saved.get("param_shapes")
    aliases = {
        require_name(alias, "shared_params"): require_name(name, "shared_params")
        for alias, name in dict_or_empty(saved.get("shared_params"), "shared_params").items()
    }
    return ModelStates(
        path=file.name,
        flattening=Flattening(file.entries, file.name),
        module=None if module is None else require_dict(module, "module"),
        shapes=None if shapes is None else tuple(require_each(shapes, shapes_in_dict, "param_shapes")),
        frozen=shapes_in_dict(saved.get("frozen_param_shapes"), "frozen_param_shapes"),
        fragments=dict_or_empty(saved.get("frozen_param_fragments"), "frozen_param_fragments"),
        aliases=aliases,
        buffers=frozenset(require_each(saved.get("buffer_names") or [], require_name, "buffer_names")),
        optimizer=saved.get("optimizer"),
        auto_layers=autoep_layers_by_tensor(saved),
        slices=slices,
        others={key: value for key, value in saved.items() if key not in _USED and value is not None},
        saved=saved,
    )


def tensor_parallel_error() -> Unsupported:
    """Return the error for tensors that are split over tensor-parallel ranks in an unknown way."""
    hint = "gather it with DeepSpeed: `save_16bit_model`, or `ds_to_universal.py` and then ckptkit on its result"
    message = "the model was saved with tensor parallelism, and no file says along which axes the tensors are split"
    return Unsupported(message, hint=hint)

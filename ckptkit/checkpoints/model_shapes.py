"""Tell the parameters of the model that a config.json describes, in order, by ckptkit's tables or by transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptkit.checkpoints.expected import HEAD, expected_shapes, is_known, is_tied
from ckptkit.checkpoints.families.transformers_model import without_hints
from ckptkit.errors import Unsupported
from ckptkit.tensors.box import Shape

_MOST_EXPERTS = 1024
_MOST_LAYERS = 1024  # of a model of which nothing but a config is known


def shapes_by_config(config: Mapping[str, Any]) -> dict[str, Shape]:
    """Return the shapes of the parameters of the model that a config describes, in order, tied ones once.

    Raises `Unsupported` for a model that neither ckptkit nor transformers knows.
    """
    shapes = expected_shapes(config) if is_known(config) else build_shapes(config, _MOST_LAYERS)
    if not shapes:
        raise Unsupported("config.json does not tell the sizes of the model's parameters")
    return {name: shape for name, shape in shapes.items() if not (name == HEAD and is_tied(config))}


def build_shapes(config: Mapping[str, Any], most_layers: int) -> dict[str, Shape]:
    """Return the shapes of the parameters of a model that transformers builds by a config, without memory for it.

    Raises `Unsupported` without transformers, and for a model that it does not know. Code of the model's own is not
    run.
    """
    model_type = config.get("model_type")
    hint = "known without transformers are Llama and its like"
    try:
        import torch
        import transformers
    except ImportError:
        raise Unsupported(f"the order of parameters of a `{model_type}` is not known here", hint=hint) from None
    architecture = str((config.get("architectures") or [None])[0]).removeprefix("FSDP")
    if not is_modest(config, most_layers):
        raise Unsupported(f"config.json calls for more layers than there are tensors, {most_layers}")
    try:
        known = transformers.AutoConfig.for_model(**without_hints(config))
        with torch.device("meta"):
            model = getattr(transformers, architecture)._from_config(known)
    except Exception as error:  # transformers' own model code may raise anything
        message = f"transformers builds no `{architecture}` of type `{model_type}`"
        raise Unsupported(message, hint=hint) from error
    return {name: tuple(each.shape) for name, each in model.named_parameters()}


def is_modest(config: Mapping[str, Any], most_layers: int) -> bool:
    """Return whether a config of a stranger's calls for a model that can be built in no time, however it nests."""
    waiting = [config]
    while waiting:
        for name, value in waiting.pop().items():
            if isinstance(value, dict):
                waiting.append(value)
            most = most_layers if "layer" in name else _MOST_EXPERTS if "expert" in name else None
            if most is not None and type(value) is int and value > most:
                return False
    return True

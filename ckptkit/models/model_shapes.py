"""Tell the parameters of the model that a config.json describes, in order, by ckptkit's tables or by transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptkit.errors import Unsupported
from ckptkit.models.expected import HEAD, expected_shapes, is_known, is_tied
from ckptkit.models.transformers_model import find_blueprint
from ckptkit.tensors.box import Shape


def shapes_by_config(config: Mapping[str, Any]) -> dict[str, Shape]:
    """Return the shapes of the parameters of the model that a config describes, in order, tied ones once.

    Raises `Unsupported` for a model that neither ckptkit nor transformers knows.
    """
    if not is_known(config):
        blueprint = find_blueprint(config)
        return {name: blueprint.shapes[name] for name in blueprint.parameters}
    shapes = expected_shapes(config)
    if not shapes:
        raise Unsupported("config.json does not tell the sizes of the model's parameters")
    return {name: shape for name, shape in shapes.items() if not (name == HEAD and is_tied(config))}

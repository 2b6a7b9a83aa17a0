"""List the forms in which a model of transformers may lie on disk: names and shapes of its tensors in each.

One type of model may have several that are legal: experts by themselves or fused, with a prefix or without it. The one
to be written is that of the model that a training began with, where it is known, else what a new model is saved as.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from ckptkit.models.form import Form
from ckptkit.models.transformers_model import Blueprint, find_blueprint
from ckptkit.models.transformers_table import to_disk, transforms_of
from ckptkit.tensors.box import Shape


def forms_of(config: Mapping[str, Any], hub_names: frozenset[str] | None = None) -> tuple[Form, ...]:
    """Return the forms of the model of a config.json, the one to be written first, and that in memory last.

    `hub_names` are the names of the tensors that a training began with. Raises `Unsupported` for a model that
    transformers does not know.
    """
    blueprint = find_blueprint(config)
    known = [None] if hub_names is None else [hub_names, None]
    return (*(saved_form(blueprint, names) for names in known), memory_form(blueprint))


@cache
def memory_form(blueprint: Blueprint) -> Form:
    return form_of(blueprint, blueprint.shapes, {name: (name,) for name in blueprint.shapes})


@cache
def saved_form(blueprint: Blueprint, hub_names: frozenset[str] | None) -> Form:
    made = to_disk(blueprint, transforms_of(blueprint, hub_names), blueprint.model.state_dict())
    return form_of(blueprint, {name: tuple(tensor.shape) for name, tensor in made.tensors.items()}, made.came_from)


def form_of(blueprint: Blueprint, shapes: Mapping[str, Shape], came_from: Mapping[str, tuple[str, ...]]) -> Form:
    """Return a form with these tensors, for each of which it is known what it comes from in memory."""
    single = {olds[0]: new for new, olds in came_from.items() if len(olds) == 1}
    pairs = ((single.get(target), single.get(source)) for target, source in blueprint.tied.items())
    return Form(
        shapes,
        tied={target: source for target, source in pairs if target is not None and source is not None},
        unsaved=frozenset(new for new, olds in came_from.items() if blueprint.unsaved.issuperset(olds)),
        in_fp32={
            dtype: frozenset(new for new, olds in came_from.items() if any(map(pattern.search, olds)))
            for dtype, pattern in blueprint.in_fp32.items()
            if pattern is not None
        },
        came_from=came_from,
    )

"""Find and remove the prefix that a trainer's own module puts before all names of a model.

`ckptkit.layout.wrappers` has the prefixes of torch's wrappers, `ckptkit.models.names.weights` finds the model's key in
a checkpoint. A prefix such as `model.` or `net.` may be part of the model's own names: only config.json or a known
family decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckptkit.errors import Unsupported
from ckptkit.layout import edits
from ckptkit.layout.box import Shape
from ckptkit.models.expected import Form, forms_of_model
from ckptkit.models.names import find_family_of
from ckptkit.models.names.weights import Weights

Shapes = Mapping[str, Shape]


def remove_prefix(weights: Weights, config: Mapping[str, Any] | None) -> tuple[Weights, list[str]]:
    """Return weights without the prefix of all their names, and notes; unchanged if there is no such prefix."""
    shapes = weights.layout.shapes
    of_family = prefix_of_family(shapes)
    prefix = of_family or prefix_of_config(shapes, config or {})
    if not prefix:
        return weights, []
    whose = "of a known family" if of_family else "that config.json describes"
    came_from = {name.removeprefix(prefix): old for name, old in weights.came_from.items()}
    layout = edits.rename_tensors(weights.layout, lambda name: name.removeprefix(prefix))
    remark = f"removed the prefix `{prefix}` from all names: the rest are names {whose}"
    return replace(weights, layout=layout, came_from=came_from), [remark]


def prefix_of_family(shapes: Shapes) -> str:
    """Return the first step of all names, if the names without it belong to a family; else ""."""
    first = next(iter(shapes), "").partition(".")[0] + "."
    if find_family_of(shapes) or not all(name.startswith(first) for name in shapes):
        return ""
    return first if find_family_of({name.removeprefix(first): shape for name, shape in shapes.items()}) else ""


def prefix_of_config(shapes: Shapes, config: Mapping[str, Any]) -> str:
    """Return the prefix of all names, if only the names without it are all that a config describes; else ""."""
    if not config or len({name.partition(".")[0] for name in shapes}) != 1:
        return ""
    try:
        forms = forms_of_model(config)
    except Unsupported:
        return ""
    if any(form.needed_names <= shapes.keys() for form in forms):
        return ""
    return next(filter(None, (prefix_of_form(shapes, form) for form in forms)), "")


def prefix_of_form(shapes: Shapes, form: Form) -> str:
    """Return the prefix of all names, if the tensors without it fit a form; else ""."""
    first = min(form.needed_names)
    ends = [name for name in shapes if name.endswith(f".{first}")]
    prefix = ends[0].removesuffix(first) if len(ends) == 1 else ""
    stripped = {name.removeprefix(prefix): shape for name, shape in shapes.items() if name.startswith(prefix)}
    fits = len(stripped) == len(shapes) and all(stripped.get(name) == form.shapes[name] for name in form.needed_names)
    return prefix if fits else ""

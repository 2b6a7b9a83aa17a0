"""Find what the tensors of a model are on disk, by its config.json.

Of some types of models that is arithmetic; of the others it is known where transformers is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from ckptkit.errors import Unsupported
from ckptkit.models.expected import EMBEDDING, HEAD, expected_shapes, is_known, is_tied
from ckptkit.models.form import Form, closest
from ckptkit.models.transformers_forms import forms_of

AskBase = Callable[[], frozenset[str] | None] | None


def forms_for(config: Mapping[str, Any], ask_base: AskBase = None) -> tuple[Form, ...]:
    """Return the forms in which a model may lie on disk, the one to be written first.

    `ask_base` gives the names that the tensors had which a training began with. Raises `Unsupported` for a model of
    which nothing is known.
    """
    if not is_known(config):
        return forms_of(config, ask_base() if ask_base else None)
    shapes = expected_shapes(config)
    if shapes is None:
        raise Unsupported(f"the config of this `{config['model_type']}` lacks a size, or gives no number for one")
    return (Form(shapes, {HEAD: EMBEDDING} if is_tied(config) else {}),)


def form_or_reason(names: Collection[str], config: Mapping[str, Any], ask_base: AskBase = None) -> Form | Unsupported:
    """Return the form of a model that tensors of these names are of, or nearly so, or why none is known."""
    try:
        return closest(forms_for(config, ask_base), names)
    except Unsupported as error:
        return error

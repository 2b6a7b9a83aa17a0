"""Tell which tensors are of linear layers, by transformers' own classes, and which of those it would not quantize."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ckptkit.models.form import Form
from ckptkit.models.transformers_model import find_blueprint, quiet

_EXPERTS = ".experts"


class Linear(NamedTuple):
    """The tensors on disk that belong to linear layers or experts, and those among them that are `kept` as they are."""

    names: tuple[str, ...]
    kept: frozenset[str]


def linear_in(config: Mapping[str, Any], form: Form) -> Linear:
    """Return the tensors of a model's linear layers, which lie on disk as `form` says.

    Experts count, in whatever way they lie. Source: transformers/quantizers/base.py, `get_modules_to_not_convert`, and
    transformers/integrations/finegrained_fp8.py, `replace_with_fp8_linear`.
    """
    from torch import nn
    from transformers.quantizers.base import get_keys_to_not_convert
    from transformers.quantizers.quantizers_utils import should_convert_module

    model = find_blueprint(config).model
    with quiet():
        kept = [*get_keys_to_not_convert(model), *(getattr(model, "_keep_in_fp32_modules", None) or ())]
    linear = {
        name: should_convert_module(name, kept)
        for name, module in model.named_modules()
        if type(module) is nn.Linear or name.endswith(_EXPERTS)
    }
    names = {
        new: [owner(old, linear) for old in olds] for new, olds in form.came_from.items() if not new.endswith(".bias")
    }
    found = {new: [one for one in owners if one is not None] for new, owners in names.items() if None not in owners}
    return Linear(tuple(found), frozenset(new for new, owners in found.items() if not all(map(linear.get, owners))))


def owner(name: str, modules: Mapping[str, object]) -> str | None:
    """Return the module among these that a tensor belongs to, None if it is of none."""
    module = name.rpartition(".")[0]
    while module and module not in modules:
        module = module.rpartition(".")[0]
    return module or None

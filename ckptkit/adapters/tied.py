"""Decide what becomes of tied tensors of a model into which adapters are merged: they stay one, or come apart."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ckptkit.adapters.draft import Fitted
from ckptkit.adapters.recipes import Merging
from ckptkit.errors import Unsupported
from ckptkit.layout import Layout
from ckptkit.models.expected import form_or_reason
from ckptkit.models.fit import check_equal, ties_of
from ckptkit.state.model import Model

_TIE = "tie_word_embeddings"


def choose_ties(model: Model, merging: Merging, base: Layout, adapters: Sequence[Fitted]) -> Model:
    """Return a model without the tensors that are tied to another, or with a config.json that does not tie them.

    They are no longer tied where only one of the two was changed, or each by itself. A tensor follows the one that it
    is tied to in rows that were trained, where adapters say that they kept it tied, and where config.json has no say
    in it. Raises `Unsupported` for one that was changed, and is tied whatever config.json says.
    """
    layout, config, changed = model.layout, model.config, set(merging.changed)
    tied = ties_in(layout, config)
    is_kept = all(one.config.flag("ensure_weight_tying") for one in adapters)
    apart = {
        target
        for target, source in tied.items()
        if {target, source} & changed
        and not (is_kept and source in changed)
        and not merging.have_same_rows(target, source)
    }
    unbound = {**config, _TIE: False}
    always = tied.keys() & ties_in(layout, unbound).keys() if apart else tied.keys()
    for target in apart & always & changed:
        message = f"an adapter changes it, not `{tied[target]}`, and the model's class has one tensor for both"
        raise Unsupported(message, path=base.root, tensor=target)
    loose = apart - always
    bound = always if loose else tied.keys()
    left_out = {target for target in bound if {target, tied[target]} & changed or target not in base.tensors}
    for target in left_out & base.tensors.keys():
        check_equal(base, target, tied[target])
    model = (
        model.note_merged(left_out)
        .select(layout.tensors.keys() - left_out)
        .say(
            *(
                f"{one} and {tied[one]} were tied and no longer are: {because(one, tied, changed)}"
                for one in sorted(loose)
            ),
            *(
                f"{one} changed with {tied[one]}: the model's class has one tensor for both"
                for one in sorted(apart & always)
            ),
        )
    )
    return model.with_config(unbound) if loose else model


def because(name: str, tied: Mapping[str, str], changed: Collection[str]) -> str:
    return f"{', '.join(sorted({name, tied[name]}.intersection(changed)))} changed"


def ties_in(layout: Layout, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the tensors of a layout that its config.json ties to others that are there too, and these."""
    if not config:
        return {}
    tied = ties_of(layout, config, form_or_reason(layout.tensors.keys(), config))
    return {target: source for target, source in tied.items() if {target, source} <= layout.tensors.keys()}

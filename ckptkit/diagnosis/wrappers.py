"""Find names with the words that torch's wrappers put into them, which a model that is not wrapped does not have."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ckptkit.diagnosis.case import Case
from ckptkit.diagnosis.commands import export, is_model, rewrite
from ckptkit.diagnosis.finding import Finding
from ckptkit.names.weights import find_model_key
from ckptkit.names.wrappers import WRAPPERS


def find_wrappers(case: Case) -> Iterator[Finding]:
    """Yield the words of wrappers in names, where a model without them is to be loaded."""
    if case.weights is None or not (case.is_asked or is_model(case.checkpoint)):
        return
    raw = raw_names(case)
    for wrapper in WRAPPERS:
        word, whose = wrapper.text.rstrip("."), wrapper.whose
        names = tuple(name for name, own in raw.items() if word in name.split(".") and word not in own.split("."))
        if names:
            message = f"`{word}.` is {whose}'s: a model that is not wrapped has other names, and finds none of these"
            yield Finding("wrapper", names[0], message, mend(case, word), names)


def raw_names(case: Case) -> dict[str, str]:
    """Return by the names that the model's tensors have below its key those without wrappers."""
    weights = case.weights
    if weights is None:
        return {}
    prefix = find_model_key(weights.whole)
    keys = {own: weights.whole.key(name) for own, name in weights.came_from.items()}
    return {".".join(map(str, key[len(prefix) :])): own for own, key in keys.items()}


def mend(case: Case, word: str) -> str:
    """Return the command that takes a word out of all names; a model alone is made without such words anyway."""
    if is_model(case.checkpoint):
        base = case.model.name if case.model and case.model.asked else None
        return export(case.checkpoint, base=base)
    return rewrite(case.checkpoint, "--rename", rf"(^|\.){re.escape(word)}\.=>\1")

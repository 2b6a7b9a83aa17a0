"""Translate a model's tensors from one family of names to another, by way of the Hub's names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import chain

from ckptkit.errors import Mismatch, and_more
from ckptkit.layout import StoredTensor
from ckptkit.layout.box import Shape
from ckptkit.layout.renames import mask_numbers
from ckptkit.models.architectures import HEAD, find_embedding, has_tied_head
from ckptkit.models.expected import Form, closest_form_or_error
from ckptkit.models.names.family import Family
from ckptkit.models.names.sizes import Sizes
from ckptkit.models.names.transformers import TRANSFORMERS
from ckptkit.models.names.translate import Translated, Turn

_COMPUTED = ".rotary_emb.inv_freq"  # a buffer in older files that every model computes itself


def choose_family(family: Family | None, shapes: Mapping[str, Shape], sizes: Sizes) -> Family | None:
    """Decide between the Hub's names and transformers' in-memory names, now that the model is known.

    Returns None for the Hub. Any other `family` is returned unchanged, unless the tensors are exactly the tensors of
    transformers' model and the family does not have this type. Raises `Unsupported` if this needs transformers, and it
    is not installed or cannot build the model.
    """
    if family is not None and family is not TRANSFORMERS:
        is_known = not family.types or sizes.model_type in ("", *family.types)
        form = None if is_known else closest_form_or_error(shapes.keys(), sizes.config, sizes.ask_base)
        if not isinstance(form, Form) or any(shapes.get(name) != form.shapes[name] for name in form.needed_names):
            return family
    return TRANSFORMERS if TRANSFORMERS.has_in_memory_names(shapes, sizes, is_likely=family is not None) else None


def make_translation(here: Family | None, there: Family | None, sizes: Sizes) -> Turn:
    """Return the function that translates tensors of one family to another; None stands for the Hub.

    The function takes located tensors, because it cuts their chunks. It raises `Mismatch` for a tensor that no rule
    translates, or whose shape contradicts the config.
    """

    def turn(tensors: Mapping[str, StoredTensor]) -> Translated:
        hub = Translated.of(tensors) if here is None else translate_family_to_hub(here, tensors, sizes)
        if there is None:
            return hub
        hub = with_expected_tied_head(hub, there, sizes)
        translated = translate_hub_to_family(there, hub.tensors, sizes)
        came_from = {
            new: tuple(dict.fromkeys(chain.from_iterable(hub.came_from[name] for name in names)))
            for new, names in translated.came_from.items()
        }
        return Translated(translated.tensors, came_from, (*hub.unplaced, *translated.unplaced))

    return turn


def translate_family_to_hub(family: Family, tensors: Mapping[str, StoredTensor], sizes: Sizes) -> Translated:
    """Return a family's tensors as the Hub has them; `unplaced` are tensors that the Hub does not have.

    Raises `Mismatch` for any other tensor that no rule translates.
    """
    biased = re.compile(family.biased or r"(?!)")
    modules = [name.removesuffix(".weight") for name in tensors if name.endswith(".weight")]
    biases = (f"{module}.bias" for module in modules if biased.fullmatch(mask_numbers(module)))
    missing_bias = min((bias for bias in biases if bias not in tensors), default=None)
    if missing_bias is not None:
        message = f"missing: on the Hub every `{sizes.model_type}` has this tensor"
        hint = "keep the names with --names keep: a model without biases cannot be written there"
        raise Mismatch(message, tensor=missing_bias, hint=hint)
    translated = family.to_hub(tensors, sizes)
    left = [name for name in translated.unplaced if not family.is_unknown_to_hub(name)]
    if left:
        message = f"no rule translates it{and_more(len(left) - 1)} from the names of {family.name} to those of the Hub"
        hint = "drop it with --exclude, say where it belongs with --map, or keep all names with --names keep"
        raise Mismatch(message, tensor=left[0], hint=hint)
    return translated


def translate_hub_to_family(family: Family, tensors: Mapping[str, StoredTensor], sizes: Sizes) -> Translated:
    """Return the Hub's tensors as a family has them; `unplaced` are buffers that the family does not have.

    Raises `Mismatch` for any other tensor that no rule translates.
    """
    translated = family.from_hub(tensors, sizes)
    untranslated = [
        name for name in translated.unplaced if not (family.is_unknown_to_hub(name) or name.endswith(_COMPUTED))
    ]
    if untranslated:
        message = f"no rule translates it{and_more(len(untranslated) - 1)} to the names of {family.name}"
        raise Mismatch(message, tensor=untranslated[0], hint="drop it with --exclude, or name it with --map")
    return translated


def with_expected_tied_head(hub: Translated, family: Family, sizes: Sizes) -> Translated:
    """Return the Hub's tensors with a tied head if the family stores it, and without it if the family does not."""
    embedding = find_embedding(hub.tensors)
    if embedding is None or family.has_tied_head is None or not has_tied_head(sizes.config):
        return hub
    tensors, came_from = dict(hub.tensors), dict(hub.came_from)
    if family.has_tied_head and HEAD not in tensors:
        tensors[HEAD], came_from[HEAD] = tensors[embedding], came_from[embedding]
    elif not family.has_tied_head and tensors.get(HEAD) == tensors[embedding]:
        del tensors[HEAD], came_from[HEAD]
    return Translated(tensors, came_from, hub.unplaced)

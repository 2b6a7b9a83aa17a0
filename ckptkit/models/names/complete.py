"""Check that a model under the Hub's names has exactly the layers and experts of its config."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cache
from pathlib import Path

from ckptkit.errors import Mismatch
from ckptkit.layout.box import Shape
from ckptkit.models.expected import Form, form_or_reason
from ckptkit.models.names.sizes import Sizes

Shapes = Mapping[str, Shape]

_LAYER = re.compile(r"model\.layers\.([0-9]{1,9})\.(.*)")
_EXPERT = re.compile(r"(.*\.experts)\.([0-9]{1,9})\.(.*)")
_OF_EXPERTS = re.compile(r"\.experts\.|_moe\.")
_MTP_LAYERS = "num_nextn_predict_layers"  # MTP layers, after the other layers
# LongCat's experts that compute nothing; transformers still saves a gate and an up projection for each of them
_ZERO_EXPERTS = "zero_expert_num"
_HINT = "check that config.json belongs to this model"


def check_complete(names: Collection[str], sizes: Sizes, path: Path) -> None:
    """Raise `Mismatch` for a missing layer or expert, or for more of them than the config declares."""
    layers: dict[int, set[str]] = {}
    experts: dict[tuple[str, str], set[int]] = {}
    has_experts = False
    for name in names:
        layer, expert = _LAYER.fullmatch(name), _EXPERT.fullmatch(name)
        has_experts |= bool(_OF_EXPERTS.search(name))
        if layer:
            layers.setdefault(int(layer[1]), set()).add(layer[2])
        if expert:
            experts.setdefault((expert[1], expert[3]), set()).add(int(expert[2]))
    find_shapes = cache(lambda: expected_shapes(names, sizes))
    count, wanted = sizes.find("layers"), sizes.find("experts")
    if layers and count is not None:
        check_layer_numbers(layers, count, further(sizes, _MTP_LAYERS), "model.layers.{}", path)
    if wanted is not None:
        if layers and not has_experts and should_have_experts(find_shapes()):
            raise Mismatch(f"expected {wanted} experts (config.json), found none", path=path, hint=_HINT)
        for (above, below), numbers in experts.items():
            check_layer_numbers(numbers, wanted, further(sizes, _ZERO_EXPERTS), f"{above}.{{}}.{below}", path)
    if layers and count is not None:
        check_alike({number: layers[number] for number in range(count)}, find_shapes, path)


def further(sizes: Sizes, key: str) -> int:
    """Return an integer of config.json; 0 if it is absent."""
    number = sizes.text.get(key)
    return number if type(number) is int else 0


def check_layer_numbers(found: Iterable[int], wanted: int, more: int, name: str, path: Path) -> None:
    """Raise `Mismatch` unless the numbers are 0 to `wanted` - 1, optionally followed by up to `more` others."""
    numbers = set(found)
    missing = next((number for number in range(wanted) if number not in numbers), None)
    if missing is not None:
        message = f"missing: expected {wanted} of them (config.json), found {len(numbers)}"
        raise Mismatch(message, path=path, tensor=name.format(missing))
    if max(numbers) >= wanted + more:
        message = f"expected only {wanted} of them (config.json), found this one too"
        raise Mismatch(message, path=path, tensor=name.format(max(numbers)), hint=_HINT)


def check_alike(layers: Mapping[int, set[str]], find_shapes: Callable[[], Shapes | None], path: Path) -> None:
    """Raise `Mismatch` if the tensors of a layer are a proper subset of the tensors of another layer.

    If `find_shapes` returns the shapes of the model's tensors, a tensor that is not among them is not missing.
    """
    kinds: dict[frozenset[str], int] = {}
    for number, tensors in layers.items():
        kinds.setdefault(frozenset(tensors), number)
    for kind, number in kinds.items():
        for other, complete in kinds.items():
            if kind < other:
                missing, shapes = (f"model.layers.{number}.{name}" for name in sorted(other - kind)), find_shapes()
                missing_name = next((name for name in missing if shapes is None or name in shapes), None)
                if missing_name is not None:
                    message = (
                        f"missing: layer {complete} has this tensor, and otherwise the same tensors as layer {number}"
                    )
                    raise Mismatch(message, path=path, tensor=missing_name)


def should_have_experts(shapes: Shapes | None) -> bool:
    """Return whether the model has tensors of experts; True if its tensors are unknown. Its config declares experts."""
    return shapes is None or any(map(_OF_EXPERTS.search, shapes))


def expected_shapes(names: Collection[str], sizes: Sizes) -> Shapes | None:
    """Return the tensors that config.json describes; None if the model is unknown."""
    form = form_or_reason(names, sizes.config, sizes.ask_base)
    return form.shapes if isinstance(form, Form) else None

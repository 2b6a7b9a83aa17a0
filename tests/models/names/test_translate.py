"""Tables of rules, applied: numbers that are axes on one side, partners, names that no rule has a place for."""

from __future__ import annotations

import numpy as np
import pytest

from ckptkit.errors import Mismatch
from ckptkit.layout import StoredTensor
from ckptkit.layout.renames import mask_numbers, numbers_in
from ckptkit.models.names.rule import Rule, alternative_patterns, weight_and_bias_rules
from ckptkit.models.names.sizes import Sizes
from ckptkit.models.names.steps import Concatenated, SwappedAxes
from ckptkit.models.names.translate import translate_by_rules
from tests.raw import Numbers
from tests.stored_tensors import contents, stored

SIZES = Sizes({})
EXPERTS = (
    Rule.of(
        "layers[.{layer}].experts.fc1",
        ("model.{layer}.experts.{expert}.gate", "model.{layer}.experts.{expert}.up"),
        Concatenated(2),
    ),
    Rule.of("layers.{layer}.new | layers.{layer}.old", "model.{layer}.norm"),
    Rule.of("layers.{layer}.turned", "model.{layer}.turned", SwappedAxes()),
)


def one_of(numbers: Numbers) -> StoredTensor:
    """A tensor in two chunks, at the offset of its first number in a file of numbers 0, 1, 2, ..."""
    tensor, _ = stored(numbers, [1], list(range(numbers.ndim)))
    return tensor


def test_outlines() -> None:
    assert mask_numbers("layers.10.experts.3.w1.weight") == "layers.#.experts.#.w1.weight"
    assert numbers_in("layers.10.experts.3.w1.weight") == (10, 3)
    assert (mask_numbers("h.0"), numbers_in("h.0")) == ("h.#", (0,))
    ways = [pattern.outline for pattern in alternative_patterns("a[.{layer}].b | c.{layer}")]
    assert ways == ["a.#.b", "a.b", "c.#"]


def test_bias_follows_its_weight() -> None:
    weight, bias = weight_and_bias_rules("a | b", ("c", "d"), Concatenated(2))
    assert weight == Rule.of("a.weight | b.weight", ("c.weight", "d.weight"), Concatenated(2))
    assert bias.hub == ("c.bias", "d.bias")


def test_what_is_an_axis_on_one_side_is_a_number_on_the_other() -> None:
    """Two layers of three experts in one tensor, in one for each layer, and on the Hub in twelve."""
    numbers = np.arange(2 * 3 * 4 * 5, dtype=np.int32).reshape(2, 3, 4, 5)
    tensor, file = stored(numbers, [1], [0, 1, 2, 3])
    hub = translate_by_rules({"layers.experts.fc1": tensor}, EXPERTS, SIZES)
    assert not hub.unplaced
    assert len(hub.tensors) == 12
    for name, one in hub.tensors.items():
        layer, expert = numbers_in(name)
        half = slice(0, 2) if name.endswith("gate") else slice(2, 4)
        assert np.array_equal(contents(one, file), numbers[layer, expert, half])
        assert hub.came_from[name] == ("layers.experts.fc1",)
    back = translate_by_rules(hub.tensors, EXPERTS, SIZES, to_hub=False)
    assert sorted(back.tensors) == ["layers.0.experts.fc1", "layers.1.experts.fc1"]
    for layer, one in enumerate(back.tensors.values()):
        assert np.array_equal(contents(one, file), numbers[layer])
    again = translate_by_rules(back.tensors, EXPERTS, SIZES)
    assert all(
        np.array_equal(contents(one, file), contents(hub.tensors[name], file)) for name, one in again.tensors.items()
    )


def test_experts_are_counted_not_spelled() -> None:
    """Expert 10 comes after 9, whatever order the names are in."""
    numbers = np.arange(12 * 4, dtype=np.int32).reshape(12, 4, 1)
    tensor, file = stored(numbers, [5], [0, 1, 2])
    hub = translate_by_rules({"layers.0.experts.fc1": tensor}, EXPERTS, SIZES)
    (back,) = translate_by_rules(dict(sorted(hub.tensors.items())), EXPERTS, SIZES, to_hub=False).tensors.values()
    assert np.array_equal(contents(back, file), numbers)


def test_names_of_several_generations() -> None:
    tensor = one_of(np.arange(3, dtype=np.int32))
    assert list(translate_by_rules({"layers.4.old": tensor}, EXPERTS, SIZES).tensors) == ["model.4.norm"]
    assert list(translate_by_rules({"model.4.norm": tensor}, EXPERTS, SIZES, to_hub=False).tensors) == ["layers.4.new"]
    with pytest.raises(Mismatch, match=r"the same as `layers.4.old`: two names of one tensor") as caught:
        translate_by_rules({"layers.4.old": tensor, "layers.4.new": tensor}, EXPERTS, SIZES)
    assert caught.value.tensor == "layers.4.new"


def test_a_name_without_a_place() -> None:
    tensor = one_of(np.arange(3, dtype=np.int32))
    found = translate_by_rules({"layers.0.unheard": tensor, "layers.0.old": tensor}, EXPERTS, SIZES)
    assert found.unplaced == ("layers.0.unheard",)
    assert list(found.tensors) == ["model.0.norm"]


def test_a_partner_that_is_missing() -> None:
    tensor = one_of(np.zeros((4, 5), np.int32))
    names = [f"model.0.experts.{expert}.{which}" for expert in range(2) for which in ("gate", "up")]
    with pytest.raises(Mismatch, match=r"`model.0.experts.1.gate` is here and needs this tensor") as caught:
        translate_by_rules(dict.fromkeys(names[:3], tensor), EXPERTS, SIZES, to_hub=False)
    assert caught.value.tensor == "model.0.experts.1.up"
    with pytest.raises(Mismatch, match=r"expert 1 is missing"):
        ends = [name.replace("experts.1", "experts.2") for name in names]
        translate_by_rules(dict.fromkeys(ends, tensor), EXPERTS, SIZES, to_hub=False)


def test_an_axis_that_is_not_there() -> None:
    with pytest.raises(Mismatch, match=r"expected an axis for each layer and each expert, found shape \[3\]"):
        translate_by_rules({"layers.experts.fc1": one_of(np.zeros(3, np.int32))}, EXPERTS, SIZES)

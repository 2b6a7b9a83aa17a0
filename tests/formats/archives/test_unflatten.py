"""Names become nested again as torch nests them, or are refused; torch's own flattening is the oracle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict

from ckptkit.errors import Unsupported
from ckptkit.formats.archives.flatten import unflatten
from ckptkit.layout import KeyPath

keys = st.sampled_from(["a", "b", "a.b", "0", "1", "10", ""])
trees = st.dictionaries(
    keys,
    st.recursive(
        st.integers(0, 99).map(torch.tensor),
        lambda inner: st.dictionaries(keys, inner, max_size=3) | st.lists(inner, max_size=3),
        max_leaves=12,
    ),
    max_size=4,
)


def nested(ways: Mapping[str, KeyPath], values: Mapping[str, Any] | None = None) -> Any:
    """The names where they belong, or the values of them."""
    return unflatten(ways, ways.__getitem__, lambda name: values[name] if values else name)


@given(trees)
def test_torch_agrees(tree: dict[str, Any]) -> None:
    try:
        flat, ways = flatten_state_dict(tree)
    except ValueError:  # two entries of one name
        return
    expected = unflatten_state_dict({name: name for name in flat}, ways)
    assert nested(ways) == expected
    assert nested(dict(reversed(ways.items()))) == expected


def test_values_are_asked_for_in_the_order_in_which_they_lie() -> None:
    ways: dict[str, KeyPath] = {f"l.{i}.w": ("l", i, "w") for i in range(12)} | {"a.z": ("a.z",), "a_b": ("a", "b")}
    asked: list[str] = []

    def value(name: str) -> str:
        asked.append(name)
        return name

    state = unflatten(ways, ways.__getitem__, value)
    assert asked == [*(member["w"] for member in state["l"]), state["a.z"], state["a"]["b"]]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("a",), ("a", "b")),
        (("a", "b"), ("a",)),
        (("a", "b"), ("a", "b")),
        (("a", "b", "c"), ("a", "b")),
        (("a", 0), ("a", "0")),
        (("a", 0, "b"), ("a", "c", "d")),
        ((0,), ("a",)),
    ],
)
def test_two_names_for_one_place_are_refused(one: KeyPath, other: KeyPath) -> None:
    for ways in ({"one": one, "two": other}, {"two": one, "one": other}):
        with pytest.raises(Unsupported, match="cannot both be") as caught:
            nested(ways)
        assert {caught.value.tensor, caught.value.message.split("`")[1]} == {"one", "two"}


def test_what_is_missing_of_a_list_is_none() -> None:
    assert nested({"r.1": ("r", 1), "r.3": ("r", 3)}) == {"r": [None, "r.1", None, "r.3"]}


@pytest.mark.parametrize("position", [1000, 1 << 60, -1])
def test_a_list_of_what_is_missing_is_refused(position: int) -> None:
    with pytest.raises(Unsupported, match="members of a list, found 1") as caught:
        nested({"r": ("r", position)})
    assert caught.value.tensor == "r"


def test_endless_nesting_is_refused() -> None:
    with pytest.raises(Unsupported, match="at most 64 levels, found 65"):
        nested({"w": ("a",) * 65})


def test_an_optimizers_state_is_numbered_as_its_parameters_are() -> None:
    names = [f"optim.state.{i}.step" for i in (0, 2, 10)]
    ways: dict[str, KeyPath] = {name: tuple(name.split(".")) for name in names}
    ways |= {f"optim.param_groups.{i}.params": ("optim", "param_groups", i, "params") for i in (0, 1)}
    values: dict[str, Any] = dict.fromkeys(names, 7.0)
    values |= {"optim.param_groups.0.params": [0, 2], "optim.param_groups.1.params": [10]}
    step = {"step": 7.0}
    groups = [{"params": [0, 2]}, {"params": [10]}]
    assert nested(ways, values) == {"optim": {"param_groups": groups, "state": {0: step, 2: step, 10: step}}}


def test_an_optimizers_state_by_names_keeps_them() -> None:
    ways: dict[str, KeyPath] = {"state.0": ("state", "0"), "param_groups.0.params": ("param_groups", 0, "params")}
    values = {"state.0": 7.0, "param_groups.0.params": ["0"]}
    assert nested(ways, values) == {"param_groups": [{"params": ["0"]}], "state": {"0": 7.0}}

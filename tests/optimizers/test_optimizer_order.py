"""Names for numbers: by torch's own modules, and where order and shapes leave a doubt."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ckptkit.errors import Corrupt, Unsupported
from ckptkit.optimizers.order import pair
from ckptkit.optimizers.parameter_order import is_order_of_modules

SHAPES = st.sampled_from([(2, 2), (2, 3), (2,), (3,), ()])


@given(st.lists(SHAPES, max_size=12), st.data())
def test_a_pairing_is_right_or_there_is_none(every: list[tuple[int, ...]], data: st.DataObject) -> None:
    """However the parameters were dealt out: what is named is named as it was."""
    parameters = {f"p{i}": shape for i, shape in enumerate(every)}
    of = {name: data.draw(st.integers(0, 2)) for name in parameters}
    dealt = [[name for name in parameters if of[name] == i] for i in range(3)]
    truth = dict(enumerate(name for group in dealt for name in group))
    numbers = {name: number for number, name in truth.items()}
    known = {number: parameters[name] for number, name in truth.items() if data.draw(st.booleans())}
    try:
        found = pair([[numbers[name] for name in group] for group in dealt], known, parameters)
    except Unsupported:
        return
    assert found == truth


@given(st.lists(SHAPES, max_size=12))
def test_matrices_before_vectors_are_certain(every: list[tuple[int, ...]]) -> None:
    parameters = {f"p{i}": shape for i, shape in enumerate(every)}
    groups = [[name for name in parameters if (len(parameters[name]) > 1) == wide] for wide in (True, False)]
    truth = dict(enumerate(name for group in groups for name in group))
    cut = len(groups[0])
    numbers = [list(truth)[:cut], list(truth)[cut:]]
    assert pair(numbers, {number: parameters[name] for number, name in truth.items()}, parameters) == truth


def test_buffers_and_what_was_frozen_are_told_by_shape() -> None:
    parameters = {"w": (4, 3), "bn.weight": (4,), "bn.running_mean": (4,), "mask": (9, 9), "frozen": (7, 7)}
    assert pair([[0, 1]], {0: (4, 3), 1: (4,)}, parameters) == {0: "w", 1: "bn.weight"}
    with pytest.raises(Unsupported, match="1 states of shape \\[4\\], the model 2 such tensors"):
        pair([[0, 1]], {0: (4, 3), 1: (4,)}, {**parameters, "other": (4,)})


def test_without_states_the_count_must_fit() -> None:
    assert pair([[0, 1]], {}, {"a": (2,), "b": (3,)}) == {0: "a", 1: "b"}
    with pytest.raises(Unsupported, match="the optimizer has 2 parameters, the model 3"):
        pair([[0, 1]], {}, {"a": (2,), "b": (3,), "c": (4,)})


def test_two_groups_that_could_change_places_are_not_named() -> None:
    with pytest.raises(Unsupported, match="in which group"):
        pair([[0], [1]], {0: (2,), 1: (2,)}, {"a": (2,), "b": (2,)})


def test_groups_of_a_stranger_cost_little() -> None:
    groups = [[i] for i in range(10_000)]
    with pytest.raises(Unsupported, match="10000 groups"):
        pair(groups, {}, {f"p{i}": (2,) for i in range(10_000)})
    groups = [list(range(start, 3200, 32)) for start in range(32)]
    with pytest.raises(Unsupported, match="in which group"):
        pair(groups, {}, {f"p{i}": (2,) for i in range(3200)})


def test_numbers_that_contradict_themselves_are_said() -> None:
    with pytest.raises(Corrupt, match="parameter 1 twice"):
        pair([[0, 1], [1]], {}, {"a": (2,)})
    with pytest.raises(Corrupt, match="parameter 7, which is in none"):
        pair([[0]], {7: (2,)}, {"a": (2,)})


def test_modules_give_their_own_first_and_then_their_children() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    models: list[nn.Module] = [nn.TransformerEncoder(layer, 12), nn.Sequential(*(nn.Linear(2, 2) for _ in range(12)))]
    with_own = nn.Bilinear(2, 2, 2)
    with_own.register_module("below", nn.LSTM(2, 2, 11))
    for model in (*models, with_own, nn.ParameterList([torch.zeros(1)] * 12)):
        names = [name for name, _ in model.named_parameters()]
        assert names == [name for name in model.state_dict() if name in names]
        assert is_order_of_modules(names)


@pytest.mark.parametrize(
    "names",
    [
        ["a.bias", "a.weight", "b.weight"],  # sorted
        ["0.w", "1.w", "10.w", "2.w"],
        ["a.w", "b.w", "a.b"],  # shared out among ranks
        ["a.b.w", "a.w"],
    ],
)
def test_other_orders_are_no_evidence(names: list[str]) -> None:
    assert not is_order_of_modules(names)

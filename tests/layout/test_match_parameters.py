"""Names for numbers: each assignment tried by brute force, and where order and shapes leave a doubt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, permutations, product
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ckptkit.checkpoints.optimizers.parameter_order import is_buffer
from ckptkit.errors import Corrupt, Unsupported
from ckptkit.layout.match_parameters import (
    is_counted_from_zero,
    match_by_size,
    match_in_order,
    match_or_none,
    match_with_frozen_parameters,
)

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
        found = match_with_frozen_parameters([[numbers[name] for name in group] for group in dealt], known, parameters)
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
    assert (
        match_with_frozen_parameters(numbers, {number: parameters[name] for number, name in truth.items()}, parameters)
        == truth
    )


def test_buffers_and_what_was_frozen_are_told_by_shape() -> None:
    tensors = {"w": (4, 3), "bn.weight": (4,), "bn.running_mean": (4,), "mask": (9, 9), "frozen": (7, 7)}
    parameters = {name: shape for name, shape in tensors.items() if not is_buffer(name)}
    assert match_with_frozen_parameters([[0, 1]], {0: (4, 3), 1: (4,)}, parameters) == {0: "w", 1: "bn.weight"}
    with pytest.raises(Unsupported, match=r"expected 2 states of shape \[4\] as in the model, found 1 state"):
        match_with_frozen_parameters([[0, 1]], {0: (4, 3), 1: (4,)}, {**parameters, "other": (4,)})


def test_without_states_the_count_must_fit() -> None:
    assert match_with_frozen_parameters([[0, 1]], {}, {"a": (2,), "b": (3,)}) == {0: "a", 1: "b"}
    with pytest.raises(Unsupported, match="expected 3 parameters as in the model, found 2"):
        match_with_frozen_parameters([[0, 1]], {}, {"a": (2,), "b": (3,), "c": (4,)})


def test_two_groups_that_could_change_places_are_not_named() -> None:
    with pytest.raises(Unsupported, match="fits several optimizer groups"):
        match_with_frozen_parameters([[0], [1]], {0: (2,), 1: (2,)}, {"a": (2,), "b": (2,)})


def test_groups_of_a_stranger_cost_little() -> None:
    groups = [[i] for i in range(10_000)]
    with pytest.raises(Unsupported, match="10,000 groups"):
        match_with_frozen_parameters(groups, {}, {f"p{i}": (2,) for i in range(10_000)})
    groups = [list(range(start, 3200, 32)) for start in range(32)]
    with pytest.raises(Unsupported, match="fits several optimizer groups"):
        match_with_frozen_parameters(groups, {}, {f"p{i}": (2,) for i in range(3200)})


def test_numbers_that_contradict_themselves_are_said() -> None:
    with pytest.raises(Corrupt, match="parameter 1 twice"):
        match_with_frozen_parameters([[0, 1], [1]], {}, {"a": (2,)})
    with pytest.raises(Corrupt, match="parameter 7, but no group contains"):
        match_with_frozen_parameters([[0]], {7: (2,)}, {"a": (2,)})


# -- brute force -------------------------------------------------------------------------------------------------------

SIZES = st.sampled_from([(2, 2), (2,), 4, 5])


@st.composite
def questions(draw: st.DrawFn) -> tuple[list[list[int]], dict[int, Any], dict[str, Any], set[tuple[int, str]]]:
    """Groups, the sizes of some of their numbers, parameters, and which groups are forbidden to which of these."""
    parameters = {f"p{i}": size for i, size in enumerate(draw(st.lists(SIZES, max_size=6)))}
    count = draw(st.integers(1, 3))
    dealt = [draw(st.integers(0, count - 1)) for _ in parameters]  # of most questions there is an answer
    numbers = draw(st.permutations(range(len(parameters))))
    groups = [[number for number, group in zip(numbers, dealt, strict=True) if group == i] for i in range(count)]
    truth = dict(zip(numbers, parameters.values(), strict=True))
    known = {number: draw(st.one_of(st.just(size), SIZES)) for number, size in truth.items() if draw(st.booleans())}
    forbidden = {(i, name) for i, name in product(range(count), parameters) if draw(st.integers(0, 9)) == 0}
    return groups, known, parameters, forbidden


def by_brute_force(
    groups: Sequence[Sequence[int]], sizes: Mapping[int, Any], parameters: Mapping[str, Any], forbidden: Any
) -> list[dict[int, str]]:
    """All assignments that deal the parameters out to the groups in order, with sizes that fit."""
    found = []
    for choice in product(range(len(groups)), repeat=len(parameters)):
        dealt = [
            [name for name, i in zip(parameters, choice, strict=True) if i == group] for group in range(len(groups))
        ]
        if [len(group) for group in groups] != [len(names) for names in dealt]:
            continue
        pairs = [(i, pair) for i in range(len(groups)) for pair in zip(groups[i], dealt[i], strict=True)]
        if all(sizes.get(number, parameters[name]) == parameters[name] for _, (number, name) in pairs) and not any(
            (i, name) in forbidden for i, (_, name) in pairs
        ):
            found.append(dict(pair for _, pair in pairs))
    return found


@given(questions())
@example(([[0, 1], [2]], {0: 4}, {"a": 4, "b": 4, "c": 5}, set()))
@example(([[], []], {}, {}, set()))
def test_finds_what_brute_force_finds(question: Any) -> None:
    groups, sizes, parameters, forbidden = question
    ways = by_brute_force(groups, sizes, parameters, forbidden)
    found = match_or_none(match_in_order, groups, sizes, parameters, lambda index, name: (index, name) not in forbidden)
    assert found == (ways[0] if len(ways) == 1 else None)


@given(questions())
def test_says_whether_no_way_fits_or_several(question: Any) -> None:
    groups, sizes, parameters, _ = question
    ways = by_brute_force(groups, sizes, parameters, ())
    if len(ways) == 1:
        assert match_in_order(groups, sizes, parameters) == ways[0]
        return
    with pytest.raises(Unsupported, match="fits several optimizer groups" if ways else "in this position"):
        match_in_order(groups, sizes, parameters)


@given(questions(), st.integers(0, 2))
@example(([[0, 1]], {0: 4}, {"a": 4, "b": 5}, set()), 0)
@example(([[0]], {}, {"a": 4, "b": 5}, set()), 0)
def test_sizes_without_an_order_find_what_brute_force_finds(question: Any, frozen: int) -> None:
    """Every way to give the numbers parameters is tried, in any order. A part of the model proves nothing."""
    groups, sizes, parameters, _ = question
    groups = [*groups[:-1], groups[-1][: max(len(groups[-1]) - frozen, 0)]]
    numbers = list(chain.from_iterable(groups))
    sizes = {number: size for number, size in sizes.items() if number in numbers}
    ways = [
        dict(zip(numbers, chosen, strict=True))
        for chosen in permutations(parameters, len(numbers))
        if all(
            sizes.get(number, parameters[key]) == parameters[key] for number, key in zip(numbers, chosen, strict=True)
        )
    ]
    is_certain = len(ways) == 1 and len(numbers) == len(parameters)
    assert match_or_none(match_by_size, groups, sizes, parameters) == (ways[0] if is_certain else None)


# -- one by one --------------------------------------------------------------------------------------------------------


def test_one_group_has_the_models_order_whatever_the_sizes() -> None:
    assert match_in_order([[5, 3, 4]], {}, {"a": (2,), "b": (2,), "c": (2,)}) == {5: "a", 3: "b", 4: "c"}


def test_a_size_that_another_parameter_has_is_no_match() -> None:
    with pytest.raises(Unsupported, match="no optimizer state in this position has the shape \\[2\\]") as raised:
        match_in_order([[0, 1]], {0: (3,)}, {"a": (2,), "b": (3,)})
    assert raised.value.tensor == "a"
    with pytest.raises(Unsupported, match="the shape \\[6\\]"):
        match_in_order([[0, 1]], {0: 5}, {"a": 6, "b": 5})


def test_sizes_of_their_own_need_no_order() -> None:
    assert match_by_size([[5, 3], [4]], {3: (2,), 4: (3,), 5: (4,)}, {"a": (2,), "b": (3,), "c": (4,)}) == {
        3: "a",
        4: "b",
        5: "c",
    }
    with pytest.raises(Unsupported, match=r"`b` have the same shape \[2\], and no file says which") as raised:
        match_by_size([[0, 1]], {0: (2,), 1: (2,)}, {"a": (2,), "b": (2,)})
    assert raised.value.tensor == "a"
    with pytest.raises(Unsupported, match=r"at most 0 states of shape \[9\] as in the model, found 1"):
        match_by_size([[0]], {0: (9,)}, {"a": (2,)})
    with pytest.raises(Unsupported, match="2 parameters: no state of the optimizer shows a shape for them"):
        match_by_size([[0, 1]], {}, {"a": (2,), "b": (3,)})


def test_sizes_prove_nothing_for_a_part_of_a_model() -> None:
    """The optimizer may train something else: `a` is frozen, or the state belongs to a scalar of no model."""
    one, two = {"a": (2,), "b": (3,)}, {"c": (4,), "d": (5,)}
    with pytest.raises(Unsupported, match="expected 2 parameters as in the model, found 1: `a` has no index"):
        match_by_size([[0]], {0: (3,)}, one)
    with pytest.raises(Unsupported, match="expected 2 parameters as in the model, found 1: `c` has no index"):
        match_by_size([[0]], {0: (5,)}, one, two)
    with pytest.raises(Unsupported, match="the 4 parameters of the optimizer belong to several models"):
        match_by_size([[0, 1, 2, 3]], {0: (2,), 1: (3,), 2: (4,), 3: (5,)}, one, two)
    assert match_by_size([[0, 1]], {0: (5,), 1: (4,)}, one, two) == {0: "d", 1: "c"}
    assert match_by_size([[0, 1]], {1: (2,)}, one) == {0: "b", 1: "a"}


def test_sizes_of_flattened_states_tell_as_shapes_do() -> None:
    assert match_or_none(match_in_order, [[0], [1, 2]], {0: 6, 1: 4, 2: 6}, {"a": 4, "b": 6, "c": 6}) is None
    assert match_in_order([[0, 1], [2]], {0: 4, 1: 4, 2: 9}, {"a": 4, "b": 9, "c": 4}) == {0: "a", 1: "c", 2: "b"}


def test_the_parameter_in_doubt_is_named() -> None:
    with pytest.raises(Unsupported, match="fits several optimizer groups") as raised:
        match_in_order([[0, 1], [2]], {0: (3,)}, {"first": (3,), "b": (2,), "c": (2,)})
    assert raised.value.tensor == "c"


def test_a_group_may_say_what_it_can_hold() -> None:
    parameters = {"a.weight": (2,), "a.bias": (2,), "b.bias": (2,)}
    groups = [[0], [1, 2]]
    assert match_or_none(match_in_order, groups, {}, parameters) is None
    found = match_in_order(groups, {}, parameters, lambda index, name: (index == 1) == name.endswith("bias"))
    assert found == {0: "a.weight", 1: "a.bias", 2: "b.bias"}


def test_many_groups_of_different_sizes_are_certain() -> None:
    groups = [[i] for i in range(200)]
    found = match_in_order(groups, {i: 199 - i for i in range(200)}, {f"p{i}": i for i in range(200)})
    assert found == {199 - i: f"p{i}" for i in range(200)}


def test_what_contradicts_itself_is_not_certain() -> None:
    assert match_or_none(match_in_order, [[0, 0]], {}, {"a": 2, "b": 2}) is None
    assert match_or_none(match_in_order, [[0, 1]], {2: 2}, {"a": 2, "b": 2}) is None


def test_frozen_parameters_are_left_out_by_size_only_if_all_sizes_are_known() -> None:
    parameters = {"a": (2,), "frozen": (3,), "c": (4,)}
    assert match_with_frozen_parameters([[0], [1]], {0: (4,), 1: (2,)}, parameters) == {0: "c", 1: "a"}
    with pytest.raises(Unsupported, match="expected 3 parameters as in the model, found 2"):
        match_with_frozen_parameters([[0], [1]], {0: (4,)}, parameters)


def test_torch_counts_through_all_groups() -> None:
    assert is_counted_from_zero([[0, 1], [], [2]])
    assert is_counted_from_zero([])
    assert not is_counted_from_zero([[1, 0]])
    assert not is_counted_from_zero([[0], [2]])

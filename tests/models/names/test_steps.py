"""Each step between names against numpy's formula for it, on random shapes in random chunks, and back."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.errors import Mismatch
from ckptkit.layout import StoredTensor
from ckptkit.models.names.sizes import Sizes
from ckptkit.models.names.steps import Alternating, Chain, Concatenated, Grouped, Rotary, Same, SwappedAxes, TensorStep
from tests.raw import Numbers
from tests.stored_tensors import contents, stored

COUNTS = st.integers(1, 3)
CUTS = st.lists(st.integers(0, 20), max_size=3)


def sizes(groups: int, per_group: int, width: int) -> Sizes:
    """The numbers of heads, of some width, as config.json has them."""
    heads = groups * per_group
    return Sizes({"num_attention_heads": heads, "num_key_value_heads": groups, "head_dim": width, "hidden_size": 32})


def hold(step: TensorStep, of: Sizes, numbers: Numbers, cuts: list[int], expected: list[Numbers]) -> None:
    """Assert that a step makes of one tensor what is expected, and of this the one again."""
    tensor, file = stored(numbers, cuts, list(range(numbers.ndim)))
    found = step.to_hub((tensor,), of)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.spec.shape == other.shape
        assert np.array_equal(contents(one, file), other)
    (back,) = step.from_hub(found, of)
    assert np.array_equal(contents(back, file), numbers)


def counted(*shape: int) -> Numbers:
    return np.arange(prod(shape), dtype=np.int32).reshape(shape)


@given(COUNTS, COUNTS, CUTS, st.sampled_from([(), (3,), (2, 2)]))
def test_rotary(heads: int, half: int, cuts: list[int], rest: tuple[int, ...]) -> None:
    """By transformers' own formula: `w.view(heads, width // 2, 2, rest).transpose(1, 2).reshape(rows, rest)`."""
    rows = counted(heads * half * 2, *rest)
    expected = rows.reshape(heads, half, 2, *rest).swapaxes(1, 2).reshape(rows.shape)
    hold(Rotary("heads"), sizes(heads, 1, 2 * half), rows, cuts, [expected])


def test_rotary_reads_as_published() -> None:
    """The first column of a key projection of 2 heads of 8, as torchtitan's and torchtune's converters write it."""
    tensor, file = stored(np.arange(16, dtype=np.int32)[:, None], [5], [0, 1])
    (found,) = Rotary("key_heads").from_hub((tensor,), sizes(2, 2, 8))
    assert contents(found, file)[:, 0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15]
    (found,) = Rotary("key_heads").to_hub((tensor,), sizes(2, 2, 8))
    assert contents(found, file)[:, 0].tolist() == [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15]


@given(COUNTS, COUNTS, COUNTS, CUTS, st.sampled_from([(), (3,)]))
def test_grouped(groups: int, per_group: int, width: int, cuts: list[int], rest: tuple[int, ...]) -> None:
    """Row `(k * (q + 2) + j) * d + r` is head `k * q + j` of the queries, or the key or the value of group k."""
    fused = counted(groups * (per_group + 2) * width, *rest)
    apart = fused.reshape(groups, per_group + 2, width, *rest)
    parts = [apart[:, :per_group], apart[:, per_group : per_group + 1], apart[:, per_group + 1 :]]
    expected = [part.reshape(-1, *rest) for part in parts]
    hold(Grouped(), sizes(groups, per_group, width), fused, cuts, expected)


@given(COUNTS, COUNTS, CUTS)
def test_joined(count: int, extent: int, cuts: list[int]) -> None:
    whole = counted(count * extent, 3)
    hold(Concatenated(count), sizes(1, 1, 1), whole, cuts, np.split(whole, count))
    hold(Concatenated(count, axis=1), sizes(1, 1, 1), whole.T.copy(), cuts, np.split(whole.T, count, axis=1))


@given(COUNTS, COUNTS, COUNTS, CUTS)
def test_joined_by_heads(groups: int, per_group: int, width: int, cuts: list[int]) -> None:
    queries, keys = groups * per_group * width, groups * width
    whole = counted(queries + 2 * keys, 2)
    step = Concatenated(3, extents=("heads", "key_heads", "key_heads"))
    expected = [whole[:queries], whole[queries : queries + keys], whole[queries + keys :]]
    hold(step, sizes(groups, per_group, width), whole, cuts, expected)


@given(COUNTS, COUNTS, CUTS)
def test_alternating(count: int, extent: int, cuts: list[int]) -> None:
    whole = counted(count * extent, 3)
    hold(Alternating(count), sizes(1, 1, 1), whole, cuts, [whole[i::count] for i in range(count)])
    hold(Alternating(count, axis=1), sizes(1, 1, 1), whole.T.copy(), cuts, [whole.T[:, i::count] for i in range(count)])


@given(CUTS)
def test_transposed(cuts: list[int]) -> None:
    whole = counted(4, 3, 2)
    hold(SwappedAxes(), sizes(1, 1, 1), whole, cuts, [whole.swapaxes(0, 1)])
    hold(SwappedAxes((-2, -1)), sizes(1, 1, 1), whole, cuts, [whole.swapaxes(1, 2)])


@given(CUTS)
def test_chain(cuts: list[int]) -> None:
    whole = counted(3, 4)
    step = Chain((SwappedAxes(), Alternating(2)))
    hold(step, sizes(1, 1, 1), whole, cuts, [whole.T[::2], whole.T[1::2]])


def test_same() -> None:
    tensor, _ = stored(counted(3), [], [0])
    assert Same().to_hub((tensor,), sizes(1, 1, 1)) == (tensor,)


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (Rotary("heads"), "expected 2 heads of 4 .*, found 7 rows"),
        (Grouped(), "expected 1 group of 2 [+] 2 heads of 4 .*, found 7 rows"),
        (Concatenated(2), "expected 2 equal parts along axis 0, found 7"),
        (Concatenated(2, extents=("heads", "key_heads")), "expected 12 .*, found 7 along axis 0"),
        (Alternating(2), "expected elements of 2 tensors in turn along axis 0, found 7"),
    ],
)
def test_a_shape_that_a_step_cannot_have(step: TensorStep, words: str) -> None:
    tensor: StoredTensor = stored(counted(7), [], [0])[0]
    with pytest.raises(Mismatch, match=words):
        step.to_hub((tensor,), sizes(1, 2, 4))


def test_sizes_that_contradict_themselves() -> None:
    tensor, _ = stored(counted(8), [], [0])
    with pytest.raises(Mismatch, match=r"expected heads that divide the hidden size 32 .*found 3"):
        Rotary("heads").to_hub((tensor,), Sizes({"num_attention_heads": 3, "hidden_size": 32}))
    with pytest.raises(Mismatch, match=r"expected key heads that divide 4 heads .*found 3"):
        Grouped().to_hub((tensor,), Sizes({"num_attention_heads": 4, "num_key_value_heads": 3, "head_dim": 2}))
    with pytest.raises(Mismatch, match=r"config.json does not have `num_attention_heads`"):
        Rotary("heads").to_hub((tensor,), Sizes({}))

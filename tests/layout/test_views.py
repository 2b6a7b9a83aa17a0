"""Views are what numpy's indexing gives, however often it is done."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.checks.open import View
from tests.strategies import cells, shapes


@st.composite
def indices(draw: st.DrawFn, shape: tuple[int, ...]) -> Any:
    """An index of a tensor of `shape`: integers, slices, and perhaps an ellipsis."""
    chosen: list[Any] = []
    for extent in shape[: draw(st.integers(0, len(shape)))]:
        slices = st.builds(slice, *(st.none() | st.integers(-7, 7),) * 2)
        chosen.append(draw(slices | st.integers(-extent, extent - 1) if extent else slices))
    if draw(st.booleans()):
        rest = shape[len(chosen) :]
        tail = draw(st.integers(0, len(rest)))
        chosen += [..., *(draw(st.integers(-n, n - 1)) if n else slice(None) for n in rest[len(rest) - tail :])]
    return chosen[0] if len(chosen) == 1 else tuple(chosen)


@given(st.data())
def test_a_view_is_what_numpy_gives(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    numbers = expected = np.arange(int(np.prod(shape))).reshape(shape)
    view = View.of(shape)
    for _ in range(data.draw(st.integers(1, 3))):
        index = data.draw(indices(view.shape))
        view, expected = view.indexed_by(index), expected[index]
        assert view.shape == expected.shape
        np.testing.assert_array_equal(numbers[cells(view.box)].reshape(view.shape), expected)


@pytest.mark.parametrize(
    ("index", "error"),
    [
        (5, IndexError),
        (-6, IndexError),
        ((0, 0, 0), IndexError),
        ((..., 0, ...), IndexError),
        (slice(None, None, 2), ValueError),
        (slice(None, None, -1), ValueError),
        (True, TypeError),
        (None, TypeError),
        ([0, 1], TypeError),
        ("a", TypeError),
        (1.0, TypeError),
    ],
)
def test_what_cannot_be_taken(index: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        View.of((5, 3)).indexed_by(index)

"""Layouts are read to the last element, however they are cut: real files against numpy."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptkit.checks.stats import count_values_by_tensor
from ckptkit.engine.counting import Count, Moments
from ckptkit.errors import Corrupt
from ckptkit.layout import Spec, StoredTensor
from ckptkit.layout.box import full_box
from ckptkit.layout.dtypes import DTYPES
from tests.raw import Files, Numbers
from tests.strategies import shapes, tilings

FLOAT = DTYPES["float32"]
SMALL = 96  # bytes of a block in these tests


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> Iterator[None]:
    """Let a block be a few elements."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("engine.blocks", "engine.visit"):
            patch.setattr(f"ckptkit.{module}.BLOCK_BYTES", SMALL)
        patch.setattr("ckptkit.engine.rearrange._SMALL_SPAN", SMALL // 2)
        yield


def counted(numbers: Numbers) -> Count:
    """What numpy finds."""
    there = numbers[~np.isnan(numbers)]
    return Count(
        numbers.size,
        nan=int(np.isnan(numbers).sum()),
        inf=int(np.isinf(numbers).sum()),
        zero=int((numbers == 0).sum()),
        low=there.min().item() if there.size else None,
        high=there.max().item() if there.size else None,
    )


@settings(deadline=None)
@given(st.data())
def test_every_element_is_counted_once(data: st.DataObject) -> None:
    """In chunks of any shape and order, among bytes that are not theirs."""
    home = tempfile.TemporaryDirectory()
    with home:
        source = Files(Path(home.name, "src"))
        tensors, expected = {}, {}
        for name in "ab":
            shape = data.draw(shapes)
            numbers = np.random.default_rng(0).choice(np.array([0, 1, -2.5, np.nan, np.inf], np.float32), shape)
            chunks = [
                source.put(numbers, box, FLOAT, order=order, file=data.draw(st.sampled_from("fg")))
                for box in data.draw(tilings(shape))
                for order in [data.draw(st.none() | st.permutations(range(len(shape))))]
            ]
            tensors[name] = StoredTensor(Spec(FLOAT, shape), tuple(chunks))
            expected[name] = counted(numbers)
        layout = source.layout(**tensors)
        told: list[int] = []
        found = count_values_by_tensor(layout, jobs=data.draw(st.integers(1, 3)), progress=told.append)
        assert {name: replace(count, moments=Moments()) for name, count in found.items()} == expected
        assert sum(told) == layout.nbytes
        assert count_values_by_tensor(layout, jobs=data.draw(st.integers(1, 3))) == found


def test_bytes_that_are_missing_name_the_tensor(tmp_path: Path) -> None:
    source = Files(tmp_path / "src")
    chunk = source.put(np.arange(90, dtype=np.float32), full_box((90,)), FLOAT)
    layout = source.layout(t=StoredTensor(Spec(FLOAT, (90,)), (chunk,)))
    file = source.root / "f"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(Corrupt) as raised:
        count_values_by_tensor(layout)
    assert (raised.value.tensor, raised.value.path) == ("t", file)

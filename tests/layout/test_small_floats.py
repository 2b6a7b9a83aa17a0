"""Every number of every small dtype against torch's own conversion."""

from __future__ import annotations

import math

import pytest
import torch

from ckptkit.layout.dtypes import DTYPES, SMALL_FLOATS

TORCH_CONVERTS = [name for name in SMALL_FLOATS if name != "float4_e2m1fn_x2"]


def same(one: float, other: float) -> bool:
    """Equal, NaN with NaN, and of the same sign."""
    if math.isnan(one) or math.isnan(other):
        return math.isnan(one) and math.isnan(other)
    return one == other and math.copysign(1, one) == math.copysign(1, other)


@pytest.mark.parametrize("name", TORCH_CONVERTS)
def test_every_pattern_is_the_number_that_torch_takes_it_for(name: str) -> None:
    dtype = getattr(torch, name)
    expected = torch.arange(256, dtype=torch.uint8).view(dtype).double().tolist()
    assert [same(*pair) for pair in zip(SMALL_FLOATS[name].value_by_bits, expected, strict=True)] == [True] * 256
    assert SMALL_FLOATS[name].smallest_normal == torch.finfo(dtype).smallest_normal


def test_numbers_of_four_bits() -> None:
    """As the OCP's specification of microscaling formats lists them; torch cannot convert them."""
    positive = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    found = SMALL_FLOATS["float4_e2m1fn_x2"]
    assert all(map(same, found.value_by_bits, [*positive, *(-number for number in positive)]))
    assert len(found.value_by_bits) == 16
    assert found.smallest_normal == 1.0


def test_none_is_missing() -> None:
    assert {name for name, dtype in DTYPES.items() if dtype.kind == "small_float"} == set(SMALL_FLOATS)

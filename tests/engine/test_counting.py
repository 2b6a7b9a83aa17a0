"""Counts of numbers against torch's own, for every dtype: random bits, ordinary weights, and special values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ckptkit.engine.counting import Count, Moments, count_values
from ckptkit.layout.dtypes import DTYPES, DType

FLOATS = [dtype for dtype in DTYPES.values() if dtype.kind in ("float", "complex", "small_float")]
INTEGERS = [dtype for dtype in DTYPES.values() if dtype.kind == "int"]
COUNTED_BY_TORCH = [dtype for dtype in FLOATS if dtype.name != "float4_e2m1fn_x2"]
COMPONENTS = {"complex128": torch.float64, "complex64": torch.float32, "complex32": torch.float16}
PART = 64  # bytes that are looked at together in these tests, so that there are many parts
each_float = pytest.mark.parametrize("dtype", COUNTED_BY_TORCH, ids=str)


@pytest.fixture(autouse=True, scope="module")
def small_parts() -> Iterator[None]:
    """Let a part be a few elements."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ckptkit.engine.counting._PART_BYTES", PART)
        yield


def torchs(dtype: DType) -> torch.dtype:
    found = getattr(torch, dtype.name)
    assert isinstance(found, torch.dtype)
    return found


def counted(data: memoryview, dtype: DType) -> Count:
    """What kinds of numbers there are, without their moments."""
    return replace(count_values(data, dtype), moments=Moments())


def ours(tensor: Tensor, dtype: DType) -> Count:
    """What is counted, of which the moments are those that torch finds in double precision."""
    found = count_values(memoryview(tensor.contiguous().view(torch.uint8).numpy().data), dtype)
    assert_moments(found.moments, numbers_of(tensor))
    return replace(found, moments=Moments())


def numbers_of(tensor: Tensor) -> Tensor:
    return (torch.view_as_real(tensor).reshape(-1) if tensor.is_complex() else tensor).double()


def assert_moments(found: Moments, numbers: Tensor) -> None:
    there = numbers[numbers.isfinite()]
    size = there.abs().max().item() if len(there) else 0.0
    assert found.finite == len(there)
    if size * size * len(there) == torch.inf:  # beyond what a sum of squares in float64 holds
        assert found.norm == torch.inf
        mean = float(sum(map(Fraction, there.tolist())) / len(there))
        assert found.mean == pytest.approx(mean, rel=1e-13, abs=1e-13 * size + 1e-300)
    elif len(there):
        assert found.mean == pytest.approx(there.mean().item(), rel=1e-13, abs=1e-13 * size + 1e-300)
        assert found.deviation == pytest.approx(there.std(correction=0).item(), rel=1e-11, abs=1e-13 * size)
        assert found.norm == pytest.approx(there.square().sum().sqrt().item(), rel=1e-12, abs=1e-160)
    else:
        assert found == Moments()


def expected(tensor: Tensor) -> Count:
    """What torch counts, in double precision."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor).reshape(-1)
    numbers = tensor.double()
    normal = torch.finfo(tensor.dtype).smallest_normal
    there = numbers[~numbers.isnan()]
    return Count(
        len(numbers),
        nan=int(numbers.isnan().sum()),
        inf=int(numbers.isinf().sum()),
        zero=int((numbers == 0).sum()),
        denormal=int(((numbers != 0) & (numbers.abs() < normal)).sum()),
        low=there.min().item() if len(there) else None,
        high=there.max().item() if len(there) else None,
    )


def random_bytes(nbytes: int, seed: int = 0) -> Tensor:
    return torch.randint(256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@each_float
@pytest.mark.parametrize("numel", [1, 3, 1000, 5003])
def test_random_bits(dtype: DType, numel: int) -> None:
    tensor = random_bytes(numel * dtype.itemsize, numel).view(torchs(dtype))
    assert ours(tensor, dtype) == expected(tensor)


@each_float
def test_ordinary_weights(dtype: DType) -> None:
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(5000, generator=generator)
    for shifted in (weights, weights.abs() + 0.5, -weights.abs() - 0.5):
        tensor = shifted.to(COMPONENTS.get(dtype.name, torchs(dtype))).view(torchs(dtype))
        assert ours(tensor, dtype) == expected(tensor)


# Bits that matter, of floats by their size: zeros, denormals, the least and the greatest numbers, infinities, NaN
EDGES = {
    "float64": [0, 1, (1 << 52) - 1, 1 << 52, (0x7FF << 52) - 1, 0x7FF << 52, (0x7FF << 52) + 1, (1 << 63) - 1],
    "float32": [0, 1, (1 << 23) - 1, 1 << 23, (0xFF << 23) - 1, 0xFF << 23, (0xFF << 23) + 1, (1 << 31) - 1],
    "float16": [0, 1, (1 << 10) - 1, 1 << 10, (0x1F << 10) - 1, 0x1F << 10, (0x1F << 10) + 1, (1 << 15) - 1],
    "bfloat16": [0, 1, (1 << 7) - 1, 1 << 7, (0xFF << 7) - 1, 0xFF << 7, (0xFF << 7) + 1, (1 << 15) - 1],
}


@pytest.mark.parametrize("name", EDGES)
@given(st.data())
def test_any_mixture_of_special_values(name: str, data: st.DataObject) -> None:
    """With either sign, in any order, and in parts that have nothing but them."""
    dtype = DTYPES[name]
    sign = 1 << (8 * dtype.itemsize - 1)
    chosen = data.draw(st.lists(st.sampled_from(EDGES[name]), min_size=1, max_size=4))
    bits = data.draw(st.lists(st.sampled_from(chosen + [edge | sign for edge in chosen]), min_size=1, max_size=40))
    raw = b"".join(pattern.to_bytes(dtype.itemsize, "little") for pattern in bits)
    tensor = torch.frombuffer(bytearray(raw), dtype=torchs(dtype))
    assert ours(tensor, dtype) == expected(tensor)


@pytest.mark.parametrize("name", ["float16", "bfloat16", *(d.name for d in COUNTED_BY_TORCH if d.itemsize == 1)])
def test_every_number_alone(name: str) -> None:
    dtype = DTYPES[name]
    patterns = torch.arange(1 << (8 * dtype.itemsize), dtype=torch.int32)
    every = patterns.to(torch.uint16 if dtype.itemsize == 2 else torch.uint8).view(torchs(dtype))
    assert ours(every, dtype) == expected(every)
    for at in range(0, len(every), 1 if dtype.itemsize == 1 else 97):
        assert ours(every[at : at + 1], dtype) == expected(every[at : at + 1])


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers(dtype: DType) -> None:
    tensor = random_bytes(1003 * dtype.itemsize).view(torchs(dtype))
    tensor[5:20] = 0
    numbers = tensor.tolist()
    assert ours(tensor, dtype) == Count(1003, zero=numbers.count(0), low=min(numbers), high=max(numbers))


def test_booleans() -> None:
    dtype = DTYPES["bool"]
    assert ours(torch.tensor([True, False, True]), dtype) == Count(3, zero=1, low=0, high=1)
    assert ours(torch.ones(100, dtype=torch.bool), dtype) == Count(100, low=1, high=1)


def test_quantized_numbers_are_the_integers_that_are_stored() -> None:
    assert counted(memoryview(b"\x00\xff"), DTYPES["quint8"]) == Count(2, zero=1, low=0, high=255)
    assert counted(memoryview(b"\x00\xff"), DTYPES["qint8"]) == Count(2, zero=1, low=-1, high=0)
    assert counted(memoryview(b"\xfe\xff\xff\xff"), DTYPES["qint32"]) == Count(1, low=-2, high=-2)


def test_a_byte_may_hold_two_numbers() -> None:
    found = count_values(memoryview(bytes([0x00, 0x71, 0xF8])), DTYPES["float4_e2m1fn_x2"])
    assert replace(found, moments=Moments()) == Count(6, zero=3, denormal=1, low=-6.0, high=6.0)
    assert_moments(found.moments, torch.tensor([0, 0, 0.5, 6, 0, -6]).double())


def test_nothing_at_all() -> None:
    for dtype in DTYPES.values():
        assert count_values(memoryview(b""), dtype) == Count()

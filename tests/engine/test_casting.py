"""Casts bit for bit against torch's own `.to()`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.engine.casting import cast_into
from ckptkit.errors import Unsupported, Usage
from ckptkit.layout.dtypes import DTYPES, parse_dtype

FLOATS = ("float64", "float32", "float16", "bfloat16")
PAIRS = [(src, dst) for src in FLOATS for dst in FLOATS]
each_pair = pytest.mark.parametrize(("src", "dst"), PAIRS)


def ours(tensor: torch.Tensor, dst: str) -> torch.Tensor:
    """The tensor converted by ckptkit."""
    src = DTYPES[str(tensor.dtype).removeprefix("torch.")]
    target = DTYPES[dst]
    values = tensor.view(torch.uint8).numpy().view(f"u{src.itemsize}")
    out = np.zeros(len(values), f"u{target.itemsize}")
    cast_into(values, src, target, out)
    return torch.from_numpy(out.view(np.uint8)).view(getattr(torch, dst))


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """The same bits, but for which of the many NaNs it is."""
    nan = expected.isnan()
    assert torch.equal(found.isnan(), nan)
    kept = ~nan
    assert torch.equal(found[kept].view(torch.uint8), expected[kept].view(torch.uint8))


def holdable(tensor: torch.Tensor, dst: str) -> torch.Tensor:
    """The numbers that do not become infinite on the way."""
    overflows = tensor.isfinite() & tensor.to(getattr(torch, dst)).isinf()
    return tensor[~overflows].clone()


def random_bits(dtype: str, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    raw = torch.randint(256, (count * DTYPES[dtype].itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(getattr(torch, dtype))


@each_pair
def test_random_bits_are_converted_as_torch_does(src: str, dst: str) -> None:
    tensor = holdable(random_bits(src, 200_000), dst)
    assert_same(ours(tensor, dst), tensor.to(getattr(torch, dst)))


@each_pair
def test_ordinary_weights_are_converted_as_torch_does(src: str, dst: str) -> None:
    generator = torch.Generator().manual_seed(8)
    tensor = (torch.randn(100_000, generator=generator, dtype=torch.float64) * 0.02).to(getattr(torch, src))
    assert_same(ours(tensor, dst), tensor.to(getattr(torch, dst)))


@pytest.mark.parametrize("dst", FLOATS)
@pytest.mark.parametrize("src", ["float16", "bfloat16"])
def test_every_16_bit_number_is_converted_as_torch_does(src: str, dst: str) -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(getattr(torch, src))
    tensor = holdable(every, dst)
    assert_same(ours(tensor, dst), tensor.to(getattr(torch, dst)))


@pytest.mark.parametrize("dst", ["float16", "bfloat16"])
def test_ties_go_to_the_even_neighbor(dst: str) -> None:
    """Every number half-way between two neighbors, and the float32 just below and above it."""
    bits = torch.arange(0x0400, 0x7B00, dtype=torch.int32).to(torch.uint16)
    low = bits.view(getattr(torch, dst)).float()
    high = (bits.to(torch.int32) + 1).to(torch.uint16).view(getattr(torch, dst)).float()
    middle = (low + high) / 2
    around = torch.cat([middle, middle.nextafter(low), middle.nextafter(high), -middle])
    tensor = holdable(around[around.isfinite()], dst)
    assert_same(ours(tensor, dst), tensor.to(getattr(torch, dst)))


@given(st.lists(st.floats(width=32), min_size=1, max_size=20))
def test_any_floats_go_to_bfloat16_as_in_torch(numbers: list[float]) -> None:
    tensor = holdable(torch.tensor(numbers, dtype=torch.float32), "bfloat16")
    assert_same(ours(tensor, "bfloat16"), tensor.to(torch.bfloat16))


@each_pair
def test_nan_and_infinity_stay_what_they_are(src: str, dst: str) -> None:
    tensor = torch.tensor(
        [float("nan"), -float("nan"), float("inf"), -float("inf"), 0.0, -0.0], dtype=getattr(torch, src)
    )
    found = ours(tensor, dst)
    assert found[:2].isnan().all()
    assert_same(found, tensor.to(getattr(torch, dst)))


@pytest.mark.parametrize("pattern", [0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F80FFFF])
def test_no_nan_rounds_to_something_else(pattern: int) -> None:
    tensor = torch.tensor([pattern], dtype=torch.int64).to(torch.uint32).view(torch.float32)
    assert ours(tensor, "bfloat16").isnan().all()
    assert ours(tensor, "float16").isnan().all()


@pytest.mark.parametrize(
    ("src", "dst", "largest", "too_large"),
    [
        ("float32", "float16", 65519.996, 65520.0),
        ("float64", "float16", 65504.0, 65520.0),
        ("float32", "bfloat16", float.fromhex("0x1.fefffep127"), float.fromhex("0x1.ffp127")),
        ("float64", "float32", float.fromhex("0x1.fffffefffffffp127"), float.fromhex("0x1.ffffffp127")),
        ("bfloat16", "float16", 65280.0, 65536.0),
    ],
)
def test_a_finite_number_never_becomes_infinite(src: str, dst: str, largest: float, too_large: float) -> None:
    fits = torch.tensor([largest, -largest], dtype=getattr(torch, src))
    assert_same(ours(fits, dst), fits.to(getattr(torch, dst)))
    for number in (too_large, -too_large):
        beyond = torch.tensor([1.0, number, float("nan")], dtype=getattr(torch, src))
        assert beyond.to(getattr(torch, dst)).isinf().any()
        with pytest.raises(Unsupported):
            ours(beyond, dst)


def test_nothing_is_converted_in_an_empty_block() -> None:
    assert ours(torch.empty(0), "bfloat16").numel() == 0


def test_a_block_of_several_parts_is_converted_to_its_end() -> None:
    tensor = torch.linspace(-3, 3, (1 << 17) + 3)
    assert_same(ours(tensor, "bfloat16"), tensor.to(torch.bfloat16))


@pytest.mark.parametrize("name", ["int64", "bool", "uint8", "float8_e4m3fn", "float4_e2m1fn_x2", "complex64"])
def test_only_numbers_of_16_bits_and_more_are_converted(name: str) -> None:
    assert not DTYPES[name].is_castable_to(DTYPES["float32"])
    assert not DTYPES["float32"].is_castable_to(DTYPES[name])
    with pytest.raises(Unsupported):
        cast_into(np.zeros(2, np.uint8), DTYPES[name], DTYPES["float32"], np.zeros(2, np.uint32))


def test_dtypes_are_torchs() -> None:
    for dtype in DTYPES.values():
        assert getattr(torch, dtype.name).itemsize == dtype.itemsize
        assert parse_dtype(f"torch.{dtype.name}") is dtype
    assert parse_dtype("bf16").name == "bfloat16"
    with pytest.raises(Usage):
        parse_dtype("bf17")

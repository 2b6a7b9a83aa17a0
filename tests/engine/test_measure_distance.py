"""Distances between stored elements against torch's own, for every dtype: ordinary numbers, random bits, NaN."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf, isclose, nan

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ckptkit.engine.distance import Distance, Tolerance
from ckptkit.engine.measure_distance import measure_distance, sum_of_finite_squares
from ckptkit.layout.box import Box, full_box
from ckptkit.layout.dtypes import DTYPES, DType
from tests.strategies import solid_shapes

FLOATS = [dtype for dtype in DTYPES.values() if dtype.kind in ("float", "small_float") and "x2" not in dtype.name]
INTEGERS = [dtype for dtype in DTYPES.values() if dtype.kind == "int"]
COMPLEX = [dtype for dtype in DTYPES.values() if dtype.kind == "complex"]
PART = 16  # elements that are looked at together in these tests, so that there are many parts


@pytest.fixture(autouse=True, scope="module")
def small_parts() -> Iterator[None]:
    """Let a part be a few elements."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ckptkit.engine.measure_distance._PART", PART)
        yield


def torchs(dtype: DType) -> torch.dtype:
    found = getattr(torch, dtype.name)
    assert isinstance(found, torch.dtype)
    return found


def stored(tensor: Tensor) -> tuple[memoryview, DType]:
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
    return raw, DTYPES[str(tensor.dtype).removeprefix("torch.")]


def ours(a: Tensor, b: Tensor, tolerance: Tolerance | None = None, box: Box | None = None) -> Distance:
    return measure_distance(stored(a), stored(b), box or full_box(tuple(a.shape)), tolerance)


def wide(tensor: Tensor) -> Tensor:
    """The numbers in double precision."""
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.dtype.is_floating_point else tensor.to(torch.float64)


def expected(a: Tensor, b: Tensor, is_different: Tensor) -> Distance:
    """What torch finds, given which elements are different."""
    x, y = wide(a), wide(b)
    finite = x.isfinite() & y.isfinite()
    gaps = (x - y).abs()[finite]
    places = is_different.nonzero()
    return Distance(
        a.numel(),
        int(is_different.sum()),
        int((is_different & ~finite).sum()),
        gaps.max().item() if gaps.numel() else 0,
        gaps.square().sum().item(),
        x[x.isfinite()].abs().square().sum().item(),
        y[y.isfinite()].abs().square().sum().item(),
        tuple(places[0].tolist()) if len(places) else None,
    )


def are_alike(one: Distance, two: Distance) -> bool:
    """The same but for the order in which squares were added up."""
    exact = ("elements", "different", "strange", "first")
    sums = ("max_abs", "gap", "size_a", "size_b")
    return all(getattr(one, name) == getattr(two, name) for name in exact) and all(
        isclose(getattr(one, name), getattr(two, name), rel_tol=1e-9) for name in sums
    )


def bits_differ(a: Tensor, b: Tensor) -> Tensor:
    size = a.element_size()
    pairs = (tensor.contiguous().reshape(-1).view(torch.uint8).reshape(-1, size) for tensor in (a, b))
    return torch.ne(*pairs).any(dim=1).reshape(a.shape)


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    numel = torch.Size(shape).numel()
    size = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(256, (numel * size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return (raw % 2 if dtype == torch.bool else raw).view(dtype).reshape(shape)


def nudged(tensor: Tensor, seed: int, share: float = 0.1) -> Tensor:
    """The tensor with some bits of some elements flipped."""
    generator = torch.Generator().manual_seed(seed)
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).clone()
    chosen = torch.rand(raw.shape, generator=generator) < share
    raw[chosen] ^= 1 if tensor.dtype == torch.bool else 1 << seed % 8
    return raw.view(tensor.dtype).reshape(tensor.shape)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, *COMPLEX, DTYPES["bool"]], ids=str)
@given(shape=solid_shapes, seed=st.integers(0, 1000))
def test_one_dtype_bit_for_bit(dtype: DType, shape: tuple[int, ...], seed: int) -> None:
    a = random_bits(shape, torchs(dtype), seed)
    b = nudged(a, seed)
    found = ours(a, b)
    if dtype.itemsize == 8 and dtype.kind in ("int", "float"):  # beyond what double precision of torch's can judge
        where = expected(a, b, bits_differ(a, b))
        assert (found.different, found.first, found.elements) == (where.different, where.first, where.elements)
    else:
        assert are_alike(found, expected(a, b, bits_differ(a, b)))


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS], ids=str)
@pytest.mark.parametrize("tolerance", [Tolerance(), Tolerance(0.1, 0), Tolerance(0, 0.5), Tolerance(0.01, 0.01)])
def test_closeness_is_torchs(dtype: DType, tolerance: Tolerance) -> None:
    a = random_bits((7, 30), torchs(dtype), 1)
    b = nudged(a, 2, 0.5)
    if dtype.itemsize == 8:
        a, b = a.view(torch.int64) >> 32, b.view(torch.int64) >> 32  # what double precision holds
    x, y = wide(a), wide(b)
    close = torch.isclose(x, y, rtol=tolerance.rtol, atol=tolerance.atol, equal_nan=True)
    assert are_alike(ours(a, b, tolerance), expected(a, b, ~close))


@pytest.mark.parametrize("one", FLOATS, ids=str)
@pytest.mark.parametrize("two", FLOATS, ids=str)
def test_two_float_dtypes_as_numbers(one: DType, two: DType) -> None:
    if one == two:
        return
    numbers = torch.randn(5, 11, generator=torch.Generator().manual_seed(3)).abs()
    numbers[2, 3] = nan
    a, b = numbers.to(torchs(one)), numbers.to(torchs(two))
    x, y = wide(a), wide(b)
    assert are_alike(ours(a, b), expected(a, b, (x != y) & ~(x.isnan() & y.isnan())))


def test_a_rounded_copy_is_close() -> None:
    a = torch.randn(1000, generator=torch.Generator().manual_seed(4))
    assert ours(a, a.bfloat16()).different > 900
    assert ours(a, a.bfloat16(), Tolerance(2**-8)).different == 0


def test_integers_beyond_double_precision() -> None:
    a = torch.tensor([[0, 2**53], [2**62, -(2**63)]])
    b = torch.tensor([[0, 2**53 + 1], [2**62, 2**63 - 1]])
    found = ours(a, b)
    assert (found.different, found.first, found.max_abs) == (2, (0, 1), 2**64 - 1)
    only = ours(a[0], b[0], Tolerance())
    assert (only.different, only.max_abs, only.first) == (1, 1, (1,))
    high = torch.tensor([2**64 - 1], dtype=torch.uint64), torch.tensor([2**64 - 3], dtype=torch.uint64)
    assert ours(*high).max_abs == 2
    assert ours(torch.tensor([2**62]), torch.tensor([5], dtype=torch.int32)).max_abs == 2**62 - 5


def test_what_is_no_finite_number() -> None:
    a = torch.tensor([nan, inf, inf, 1.0, -inf, 2.0])
    b = torch.tensor([nan, inf, -inf, nan, 3.0, 2.5])
    for tolerance in (None, Tolerance(), Tolerance(1, 1e30)):
        found = ours(a, b, tolerance)
        close = 0 if tolerance == Tolerance(1, 1e30) else 1
        assert (found.strange, found.different, found.max_abs, found.first) == (3, 3 + close, 0.5, (2,))
    assert found.rel_l2 == 0.5 / (1 + 4) ** 0.5


def test_signs_of_zero_and_payloads_of_nan() -> None:
    """Other bits, but the same number: different only bit for bit."""
    bits = torch.tensor([0x7FC00000, 0], dtype=torch.int32).view(torch.float32)
    other = torch.tensor([0x7FC00001, -(2**31)], dtype=torch.int32).view(torch.float32)
    assert ours(bits, other).different == 2
    assert ours(bits, other).max_abs == 0
    assert ours(bits, other, Tolerance()).different == 0


def test_numbers_too_large_to_be_squared() -> None:
    found = ours(torch.tensor([1e300, -1e308], dtype=torch.float64), torch.tensor([0, 1e308], dtype=torch.float64))
    assert (found.different, found.strange, found.max_abs, found.gap) == (2, 0, inf, inf)
    assert (found.rel_l2, found.cosine) == (inf, None)


def test_two_numbers_in_a_byte() -> None:
    dtype = DTYPES["float4_e2m1fn_x2"]
    a, b = (memoryview(bytes([0x21, 0x7F, 0x00])), dtype), (memoryview(bytes([0x21, 0x7F, 0x50])), dtype)
    found = measure_distance(a, b, full_box((3,)))
    assert (found.elements, found.different, found.first, found.max_abs) == (3, 1, (2,), 3.0)
    assert measure_distance(a, b, full_box((3,)), Tolerance(atol=3)).different == 0


def test_ratios() -> None:
    zero, one = torch.zeros(3), torch.ones(3)
    assert ours(zero, zero).rel_l2 == 0
    assert ours(zero, one).rel_l2 == inf
    assert ours(one, 3 * one).rel_l2 == 2
    assert ours(one, zero).cosine is None
    assert ours(one, -2 * one).cosine == -1
    assert ours(torch.tensor([1.0, 0]), torch.tensor([0, 1.0])).cosine == 0


def test_an_index_counts_from_the_corner_of_the_tensor() -> None:
    a, b = torch.zeros(2, 20, 3), torch.zeros(2, 20, 3)
    b[1, 7, 2] = 1
    assert ours(a, b, box=Box((5, 0, 10), (2, 20, 3))).first == (6, 7, 12)
    assert ours(torch.tensor(1), torch.tensor(2)).first == ()


@given(st.lists(st.integers(0, 6), min_size=1), st.randoms())
def test_parts_merge_in_any_order(places: list[int], random: object) -> None:
    parts = [Distance(3, 1, 0, at, 1.0, 2.0, 3.0, (at, 1)) for at in places]
    shuffled = parts.copy()
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    merged = [Distance(), Distance()]
    for i, order in enumerate((parts, shuffled)):
        for part in order:
            merged[i] = merged[i].merge(part)
    assert merged[0] == merged[1]
    assert merged[0].first == (min(places), 1)


def test_the_size_of_one_side() -> None:
    numbers = torch.randn(100, generator=torch.Generator().manual_seed(5))
    numbers[3] = nan
    assert isclose(sum_of_finite_squares(stored(numbers)), numbers.double().square().nansum().item())

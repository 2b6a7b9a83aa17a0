"""Low-rank changes of real files, however base and factors are cut, against numpy's formulas on whole tensors."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from ckptkit.adapters.merged_blocks import (
    ChangeStep,
    DoraRescale,
    ExpertsProduct,
    LinearProduct,
    Merge,
    Product,
    Rows,
    ScaledAddition,
    TransposedProduct,
)
from ckptkit.errors import Corrupt, Mismatch
from ckptkit.layout import Layout, Spec, StoredTensor
from ckptkit.layout.box import Box, full_box
from ckptkit.layout.dtypes import DTYPES
from ckptkit.layout.plan import Operand, Region, identity_region, make_plan
from tests.execute import execute
from tests.raw import Files, allocated, contents
from tests.strategies import tilings

FLOAT = DTYPES["float32"]
Numbers = NDArray[Any]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a block be a few elements."""
    for module in ("blocks", "visit"):
        monkeypatch.setattr(f"ckptkit.engine.{module}.BLOCK_BYTES", 480)
    monkeypatch.setattr("ckptkit.engine.rearrange._SMALL_SPAN", 48)


def stored(root: Path, data: st.DataObject | None, **tensors: Numbers) -> Layout:
    """Tensors in chunks of any shape, if there is something to choose by."""
    files = Files(root)
    found = {}
    for name, numbers in tensors.items():
        boxes = data.draw(tilings(numbers.shape)) if data else [full_box(numbers.shape)]
        chunks = tuple(files.put(numbers, box, FLOAT) for box in boxes)
        found[name] = StoredTensor(Spec(FLOAT, numbers.shape), chunks)
    return files.layout(**found)


def random(*shape: int, seed: int = 0) -> Numbers:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def operand(name: str, source: int = 1) -> Operand:
    return Operand(source, name, FLOAT)


def product(kind: type[Product], a: Numbers, b: Numbers, scaling: float = 1.75, **more: Any) -> Product:
    return kind(operand("a"), operand("b"), a.shape, b.shape, scaling, **more)


def merged(
    home: Path,
    w: Numbers,
    steps: Sequence[ChangeStep],
    data: st.DataObject | None = None,
    reach: Region = identity_region,
    **adapter: Numbers,
) -> Numbers:
    """What steps make of a tensor, when all checksums have been compared."""
    base, other = stored(home / "base", data, t=w), stored(home / "adapter", data, **adapter)
    dst = allocated(home / "dst", Spec(FLOAT, w.shape), data.draw(tilings(w.shape)) if data else [full_box(w.shape)])
    jobs = data.draw(st.integers(1, 2)) if data else 2
    done = execute(make_plan(base, dst, [other], {"t": Merge(operand("t", 0), steps, reach)}), jobs=jobs)
    assert done.checked_bytes == 4 * sum(numbers.size for numbers in (w, *adapter.values()))
    assert done.unchecked_bytes == 0
    return np.frombuffer(contents(dst), np.float32).reshape(w.shape)


class Case(NamedTuple):
    """A weight, the factors of its change, the way in which it is stored, and the product of whole tensors."""

    w: Numbers
    a: Numbers
    b: Numbers
    kind: type[Product]
    more: dict[str, Any]
    product: Numbers


def cases() -> dict[str, Case]:
    """Each way of storing a weight."""
    a, b = random(3, 7, seed=1), random(11, 3, seed=2)
    kernel = random(3, 4, 2, 5, seed=1)
    folded = (b @ kernel.reshape(3, -1)).reshape(11, 4, 2, 5)
    many_a, many_b = random(4 * 3, 7, seed=1), random(11, 3 * 4, seed=2)
    each = np.einsum("ore,eri->eoi", many_b.reshape(11, 3, 4), many_a.reshape(4, 3, 7))
    blocks_b = many_b.reshape(11, 3, 4).transpose(0, 2, 1).reshape(11, 12)
    plain, turned = ({"count": 4, "is_transposed": flag} for flag in (False, True))
    return {
        "linear": Case(random(11, 7), a, b, LinearProduct, {}, b @ a),
        "one row": Case(random(1, 7), a, b[:1], LinearProduct, {}, b[:1] @ a),
        "transposed": Case(random(7, 11), a, b, TransposedProduct, {}, (b @ a).T),
        "convolution": Case(random(11, 4, 2, 5), kernel, b.reshape(11, 3, 1, 1), LinearProduct, {}, folded),
        "experts": Case(random(4, 11, 7), many_a, many_b, ExpertsProduct, plain, each),
        "experts, blocks": Case(
            random(4, 11, 7), many_a, blocks_b, ExpertsProduct, {**plain, "is_in_blocks": True}, each
        ),
        "experts, transposed": Case(random(4, 7, 11), many_a, many_b, ExpertsProduct, turned, each.transpose(0, 2, 1)),
    }


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("name", cases())
@given(data=st.data())
def test_products_are_those_of_whole_tensors(name: str, data: st.DataObject) -> None:
    case = cases()[name]
    with tempfile.TemporaryDirectory() as directory:
        step = product(case.kind, case.a, case.b, **case.more)
        found = merged(Path(directory), case.w, [step], data, a=case.a, b=case.b)
        np.testing.assert_allclose(found, case.w + np.float32(1.75) * case.product, rtol=1e-5, atol=1e-6)


def test_large_blocks_have_the_numbers_of_the_whole(tmp_path: Path) -> None:
    """Some processors add the terms of the last rows of a block in another order."""
    w, a, b = random(1100, 1025), random(16, 1025, seed=1), random(1100, 16, seed=2)
    found = merged(tmp_path, w, [product(LinearProduct, a, b)], a=a, b=b)
    np.testing.assert_allclose(found, w + np.float32(1.75) * (b @ a), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("small_blocks")
@given(data=st.data())
def test_directions_are_those_of_whole_tensors(data: st.DataObject) -> None:
    """Of rows and of columns, whatever is in a block."""
    a, b, m = random(3, 7, seed=1), random(11, 3, seed=2), np.abs(random(11, seed=3))
    for kind, axis, w in ((LinearProduct, 0, random(11, 7)), (TransposedProduct, 1, random(7, 11))):
        change = b @ a if axis == 0 else (b @ a).T
        whole_sum = w + np.float32(1.75) * change
        lengths = np.linalg.norm(whole_sum, axis=1 - axis, keepdims=True)
        expected = m.reshape(lengths.shape) / lengths * whole_sum
        step = DoraRescale(product(kind, a, b), operand("m"), m.shape, axis)

        def reach(box: Box, axis: int = axis, shape: tuple[int, ...] = w.shape) -> Box:
            return full_box(shape) if axis else Box((box.start[0], 0), (box.size[0], shape[1]))

        with tempfile.TemporaryDirectory() as directory:
            found = merged(Path(directory), w, [step], data, reach, a=a, b=b, m=m)
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("small_blocks")
@given(data=st.data())
def test_steps_follow_each_other(data: st.DataObject) -> None:
    """A product, a tensor that is added, and rows that are replaced at last."""
    w, a, b, c, rows = (
        random(11, 7),
        random(3, 7, seed=1),
        random(11, 3, seed=2),
        random(11, 7, seed=4),
        random(2, 7, seed=5),
    )
    steps: list[ChangeStep] = [
        product(LinearProduct, a, b),
        ScaledAddition(operand("c"), 0.5),
        Rows(operand("rows"), (9, 2)),
    ]
    expected = w + np.float32(1.75) * (b @ a) + np.float32(0.5) * c
    expected[[9, 2]] = rows
    with tempfile.TemporaryDirectory() as directory:
        found = merged(Path(directory), w, steps, data, a=a, b=b, c=c, rows=rows)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_factor_must_be_of_numbers(tmp_path: Path, bad: float) -> None:
    w, a, b = random(11, 7), random(3, 7, seed=1), random(11, 3, seed=2)
    b[5, 1] = bad
    with pytest.raises(Corrupt) as raised:
        merged(tmp_path, w, [product(LinearProduct, a, b)], a=a, b=b)
    assert raised.value.tensor == "t"


def test_an_operand_that_is_too_small_is_refused(tmp_path: Path) -> None:
    w, a, b = random(11, 7), random(3, 7, seed=1), random(10, 3, seed=2)
    with pytest.raises(Mismatch) as raised:
        merged(tmp_path, w, [product(LinearProduct, a, b)], a=a, b=b)
    assert raised.value.tensor == "b"


def test_damage_to_a_factor_is_found(tmp_path: Path) -> None:
    """Though it is read by blocks, in other boxes than the tensor."""
    w, a, b = random(11, 7), random(3, 7, seed=1), random(11, 3, seed=2)
    base, other = stored(tmp_path / "base", None, t=w), stored(tmp_path / "adapter", None, a=a, b=b)
    file = tmp_path / "adapter" / "f"
    raw = bytearray(file.read_bytes())
    raw[-5] ^= 1
    file.write_bytes(raw)
    dst = allocated(tmp_path / "dst", Spec(FLOAT, w.shape), [full_box(w.shape)])
    with pytest.raises(Corrupt) as raised:
        execute(make_plan(base, dst, [other], {"t": Merge(operand("t", 0), [product(LinearProduct, a, b)])}))
    assert (raised.value.path, raised.value.tensor) == (file, "b")

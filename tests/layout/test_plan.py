"""Plans against a model that moves every element."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.errors import Mismatch
from ckptkit.layout import Chunk, Layout, Spec, StoredTensor
from ckptkit.layout.box import Box, Shape
from ckptkit.layout.dtypes import DTYPES
from ckptkit.layout.plan import make_plan
from tests.strategies import boxes_in, cells, owners, shapes, solid_shapes, tilings

FLOAT = DTYPES["float32"]


def stored(shape: Shape, boxes: list[Box], file: str = "a") -> StoredTensor:
    """A tensor whose chunks lie one after another in a file."""
    chunks, at = [], 0
    for box in boxes:
        chunks.append(Chunk(box, file, at, box.numel * FLOAT.itemsize, FLOAT))
        at += box.numel * FLOAT.itemsize
    return StoredTensor(Spec(FLOAT, shape), tuple(chunks))


def layout(**tensors: StoredTensor) -> Layout:
    return Layout(Path("somewhere"), "any", tensors)


@given(st.data())
def test_every_element_is_copied_once_from_where_it_is(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    src, dst = stored(shape, data.draw(tilings(shape))), stored(shape, data.draw(tilings(shape)))
    plan = make_plan(layout(t=src), layout(t=dst))
    assert (owners(shape, [copy.region for copy in plan.copies]) == 1).all()
    for target in plan.targets:
        assert target.chunk in dst.chunks
        for copy in target.copies:
            assert copy.dst is target.chunk
            assert copy.src in src.chunks
            inside = owners(shape, [copy.src.box]) * owners(shape, [copy.dst.box])
            assert inside[cells(copy.region)].all()
    assert plan.nbytes == dst.spec.nbytes


@given(st.data())
def test_targets_come_in_the_order_of_the_destination(data: st.DataObject) -> None:
    shape = data.draw(solid_shapes)
    one, other = stored(shape, data.draw(tilings(shape)), "b"), stored(shape, data.draw(tilings(shape)), "a")
    targets = make_plan(layout(x=one, y=other), layout(x=one, y=other)).targets
    places = [(target.chunk.path, target.chunk.offset) for target in targets]
    assert places == sorted(places)


@given(st.data())
def test_a_region_without_source_is_a_mismatch(data: st.DataObject) -> None:
    shape = data.draw(solid_shapes)
    boxes = data.draw(tilings(shape))
    kept = boxes[: data.draw(st.integers(0, len(boxes) - 1))]
    with pytest.raises(Mismatch):
        make_plan(layout(t=stored(shape, kept)), layout(t=stored(shape, [data.draw(boxes_in(shape)), *boxes])))


def test_a_tensor_without_source_is_a_mismatch() -> None:
    some = stored((2,), [Box((0,), (2,))])
    with pytest.raises(Mismatch) as raised:
        make_plan(layout(there=some), layout(elsewhere=some))
    assert raised.value.tensor == "elsewhere"


def test_another_shape_is_a_mismatch() -> None:
    with pytest.raises(Mismatch, match=r"float32\[3\].*float32\[2\]"):
        make_plan(layout(t=stored((2,), [Box((0,), (2,))])), layout(t=stored((3,), [Box((0,), (3,))])))


def test_what_only_the_source_has_is_left() -> None:
    some = stored((2,), [Box((0,), (2,))])
    assert [target.name for target in make_plan(layout(a=some, b=some), layout(b=some)).targets] == ["b"]


def test_planning_is_linear_in_the_chunks() -> None:
    """Each target of a large plan meets only the chunks around it: counted, not timed."""
    rows = 20_000
    fine = stored((rows, 2), [Box((i, 0), (1, 2)) for i in np.random.default_rng(0).permutation(rows).tolist()])
    coarse = stored((rows, 2), [Box((i, 0), (8, 2)) for i in range(0, rows, 8)])
    plan = make_plan(layout(t=fine), layout(t=coarse))
    assert [len(target.copies) for target in plan.targets] == [8] * (rows // 8)

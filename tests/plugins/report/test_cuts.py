"""Cuts against a brute-force count: every element lies in the rectangle of the box that holds it, and nowhere else."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest

from ckptkit.layout.box import Box
from ckptkit.plugins.report.shards import Rectangle, boxes_to_rectangles


def area(rectangle: Rectangle) -> float:
    return (rectangle.right - rectangle.left) * (rectangle.bottom - rectangle.top)


@pytest.mark.parametrize(
    ("shape", "boxes", "axes"),
    [
        ((7, 3), [Box((0, 0), (4, 3)), Box((4, 0), (3, 3))], (0,)),
        ((3, 8), [Box((0, 5), (3, 3)), Box((0, 0), (3, 5))], (1,)),
        ((4, 6), [Box((r, c), (2, 3)) for r in (0, 2) for c in (0, 3)], (0, 1)),
        ((4, 3), [Box((0, 0), (1, 3)), Box((1, 0), (1, 2)), Box((1, 2), (1, 1)), Box((2, 0), (2, 3))], (0, 1)),
        ((2, 2, 4), [Box(at, (1, 1, 2)) for at in product((0, 1), (0, 1), (0, 2))], (0, 1, 2)),
        ((5,), [Box((0,), (5,))], ()),
        ((), [Box((), ())], ()),
    ],
    ids=["rows", "columns", "grid", "flat", "three axes", "whole", "one number"],
)
def test_rectangles_are_as_large_as_the_boxes_and_do_not_overlap(
    shape: tuple[int, ...], boxes: list[Box], axes: tuple[int, ...]
) -> None:
    found = boxes_to_rectangles(shape, boxes)
    assert found.axes == axes
    for box, rectangle in zip(boxes, found.rectangles, strict=True):
        assert area(rectangle) == pytest.approx(box.numel / prod(shape))
    points = [((i + 0.5) / 97, (j + 0.5) / 89) for i in range(97) for j in range(89)]
    for x, y in points:
        assert sum(r.left <= x < r.right and r.top <= y < r.bottom for r in found.rectangles) == 1


def test_a_flat_shard_is_drawn_by_its_bytes() -> None:
    found = boxes_to_rectangles(
        (4, 3), [Box((0, 0), (1, 3)), Box((1, 0), (1, 2)), Box((1, 2), (1, 1)), Box((2, 0), (2, 3))]
    )
    assert found.is_flat
    assert [(round(r.left * 12), round(r.right * 12)) for r in found.rectangles] == [(0, 3), (3, 5), (5, 6), (6, 12)]


def test_a_grid_lies_as_the_matrix_is_written() -> None:
    found = boxes_to_rectangles((4, 6), [Box((0, 3), (2, 3)), Box((0, 0), (4, 3)), Box((2, 3), (2, 3))])
    assert found.is_grid
    assert found.rectangles[0] == Rectangle(0.5, 1.0, 0.0, 0.5)
    assert found.rectangles[1] == Rectangle(0.0, 0.5, 0.0, 1.0)

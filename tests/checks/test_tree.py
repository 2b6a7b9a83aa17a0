"""Names folded by module."""

from __future__ import annotations

from ckptkit.checks.tree import folded_tree_lines
from ckptkit.layout import Spec
from ckptkit.layout.dtypes import DTYPES

VECTOR = Spec(DTYPES["float32"], (8,))
MATRIX = Spec(DTYPES["float32"], (8, 8))


def lines(**specs: Spec) -> list[tuple[int, str, int, int]]:
    return [(line.depth, line.label, line.tensors, line.nbytes) for line in folded_tree_lines(specs)]


def test_modules_alike_are_folded() -> None:
    specs = {f"layers.{i}.{name}.weight": spec for i in range(12) for name, spec in (("up", MATRIX), ("norm", VECTOR))}
    assert lines(**specs, **{"embed.weight": MATRIX}) == [
        (0, "layers.0-11.  x12", 24, 12 * (256 + 32)),
        (1, "up.weight", 12, 12 * 256),
        (1, "norm.weight", 12, 12 * 32),
        (0, "embed.weight", 1, 256),
    ]


def test_a_module_that_differs_is_not_folded() -> None:
    shown = lines(**{"0.a": VECTOR, "1.a": VECTOR, "2.a": MATRIX, "3.a": VECTOR, "10.a": VECTOR})
    assert [label for _, label, _, _ in shown] == ["0-1.a  x2", "2.a", "3-10.a  x2"]


def test_a_tensor_may_be_called_like_a_module() -> None:
    assert len(lines(**{"a": VECTOR, "a.b": VECTOR, "a.c": MATRIX})) == 4


def test_a_name_of_many_dots() -> None:
    assert [tensors for _, _, tensors, _ in lines(**{"." * 100_000: VECTOR})] == [1]

"""Each part of a quantized weight is the same part of the whole: whatever rows and columns it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ckptkit.checkpoints.checkpoint import open_layout
from ckptkit.layout.box import Box, full_box
from ckptkit.layout.dtypes import DTYPES
from ckptkit.layout.plan import Recipe
from ckptkit.state.quantized.dequantize import dequantizing_recipe_of
from ckptkit.state.quantized.find import find_quantized
from tests.state.quantized.few_bits import Stored, deepseek_v4, integers, mlx, modelopt, mxfp4, nvfp4
from tests.state.quantized.test_floats4 import saved

CASES: Mapping[str, Callable[[], Stored]] = {
    "int4": lambda: integers(4),
    "int4 zero points": lambda: integers(4, symmetric=False),
    "int4 experts": lambda: integers(4, shape=(3, 20, 64), form="pack-quantized"),
    "int8 rows": lambda: integers(8, "channel", symmetric=False),
    "int8 whole": lambda: integers(8, "tensor"),
    "nvfp4": nvfp4,
    "mxfp4": mxfp4,
    "modelopt": lambda: modelopt((3, 20, 64)),
    "deepseek": deepseek_v4,
    **{f"mlx {bits}": partial(mlx, bits, 32) for bits in (2, 3, 4, 5, 6, 8)},
}


def part_of(recipe: Recipe, tensors: Mapping[str, Tensor], box: Box) -> Tensor:
    """What a recipe makes of one box, given no more than its regions ask for."""
    blocks = []
    for operand in recipe.operands:
        region = operand.region(box)
        part = tensors[operand.name][tuple(map(slice, region.start, region.stop))]
        assert tuple(part.shape) == region.size
        part = part.float() if operand.dtype.name == "float32" else part
        blocks.append(
            memoryview(
                bytearray(
                    torch.empty(part.numel(), dtype=part.dtype)
                    .copy_(part.reshape(-1))
                    .view(torch.uint8)
                    .numpy()
                    .tobytes()
                )
            )
        )
    made, _ = recipe(box, DTYPES["float32"], blocks)
    return torch.from_numpy(np.frombuffer(made, np.float32).copy()).reshape(box.size)


@pytest.mark.parametrize("case", CASES)
def test_a_part_is_that_part_of_the_whole(tmp_path: Path, case: str) -> None:
    stored = CASES[case]()
    root = saved(tmp_path / "in", stored)
    found = find_quantized(open_layout(root), {stored.section: stored.said})
    assert found is not None
    ((name, packed),) = found.weights.items()
    recipe = dequantizing_recipe_of(found, name)
    truth = part_of(recipe, stored.tensors, full_box(packed.shape))
    assert torch.equal(truth.bfloat16(), stored.truth.bfloat16())

    @given(st.data())
    def same(data: st.DataObject) -> None:
        spans = [
            sorted(data.draw(st.tuples(*[st.integers(0, size)] * 2).filter(lambda p: p[0] != p[1])))
            for size in packed.shape
        ]
        box = Box(tuple(low for low, _ in spans), tuple(high - low for low, high in spans))
        assert torch.equal(part_of(recipe, stored.tensors, box), truth[tuple(slice(*span) for span in spans)])

    same()

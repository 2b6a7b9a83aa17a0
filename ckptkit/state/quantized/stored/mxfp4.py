"""Find gpt-oss's MXFP4: `X_blocks`, uint8 `[E, R, G, 16]` with 32 numbers in 16 bytes, and `X_scales`, `[E, R, G]`.

They encode a weight `[E, G*32, R]`. Source: transformers/integrations/mxfp4.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from ckptkit.errors import Mismatch, Unsupported
from ckptkit.layout.box import Shape
from ckptkit.layout.plan import Operand, Recipe
from ckptkit.state.quantized.config import QuantizationConfig
from ckptkit.state.quantized.packed import BLOCKS, Packed, Specs

_SCALES, _GROUP_BYTES = "_scales", 16  # bytes that share a scale
_MAX_EXPERT_BYTES = 1 << 28  # any block needs its whole expert in memory


def find(specs: Specs, stated: QuantizationConfig) -> Iterator[tuple[str, Packed]]:  # noqa: ARG001
    """Yield the weights that are blocks of 32 numbers. Raises `Mismatch` for shapes that do not match."""
    for name, blocks in specs.items():
        scale = f"{name.removesuffix(BLOCKS)}{_SCALES}"
        if not name.endswith(BLOCKS) or blocks.dtype.name != "uint8" or scale not in specs:
            continue
        scales = specs[scale]
        fits = len(blocks.shape) == 4 and blocks.shape == (*scales.shape, _GROUP_BYTES)
        if not fits or scales.dtype.name != "uint8":
            raise Mismatch(f"blocks {blocks} do not match scales {scales}", tensor=name)
        experts, rows, groups, _ = blocks.shape
        shape = (experts, 2 * _GROUP_BYTES * groups, rows)
        yield name, Packed("mxfp4", shape, (scale,), (1, 2 * _GROUP_BYTES), partial(mxfp4_recipe, shape))


def mxfp4_recipe(shape: Shape, operands: Sequence[Operand]) -> Recipe:
    """Return the recipe of a weight. Raises `Unsupported` if one expert needs too much memory."""
    from ckptkit.state.quantized.dequantize_blocks import Transposed4  # imports numpy, which plain copies do not need

    _, columns, rows = shape
    if columns * rows // 2 > _MAX_EXPERT_BYTES:
        message = f"one expert of {list(shape)} would take {columns * rows // 2} bytes of memory"
        raise Unsupported(message, tensor=operands[0].name)
    return Transposed4(operands[0], operands[1], shape)

"""Find MLX's triples: `X.weight` uint32 `[O, I*bits/32]`, `X.scales` and `X.biases` `[O, I/group]`.

A weight is its bit pattern times the scale of its group, plus the bias. Products and sums are both rounded to the dtype
of the scales, as mlx does on a CPU. Source: `mlx.core.dequantize`, and its documentation of `quantize`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from ckptkit.errors import Unsupported
from ckptkit.layout.box import Shape
from ckptkit.layout.dtypes import DType
from ckptkit.layout.plan import Operand, Recipe
from ckptkit.state.quantized.config import QuantizationConfig
from ckptkit.state.quantized.packed import Packed, Specs, partner_mismatch_error

WEIGHT, SCALES, BIASES = ".weight", ".scales", ".biases"


def find(specs: Specs, stated: QuantizationConfig) -> Iterator[tuple[str, Packed]]:
    """Yield the weights that are stored as triples.

    Raises `Mismatch` for scales or biases with a wrong shape, `Unsupported` if config.json does not give the bits.
    """
    for name, spec in specs.items():
        module = name.removesuffix(WEIGHT)
        if spec.dtype.name != "uint32" or module == name or f"{module}{SCALES}" not in specs:
            continue
        encoding = stated.modules.get(module) or next(iter(stated.integers), None)
        if encoding is None:
            message = f"found {spec}, but config.json does not say how many bits a number has"
            raise Unsupported(message, tensor=name, hint="check that the model's config.json is there")
        assert encoding.group is not None
        stored_bits, scales, biases = spec.shape[-1] * 32, f"{module}{SCALES}", f"{module}{BIASES}"
        columns = stored_bits // encoding.bits
        expected_shape = (*spec.shape[:-1], columns // encoding.group)
        for beside in (scales, biases):
            actual = specs.get(beside)
            fits = actual is not None and actual.shape == expected_shape and actual.dtype.kind == "float"
            if not fits or columns % encoding.group or stored_bits % encoding.bits:
                which = f"a float for each {encoding.group} numbers of {encoding.bits} bits, {list(expected_shape)}"
                raise partner_mismatch_error(beside, which, actual or "none")
        shape = (*spec.shape[:-1], columns)
        make = partial(recipe, encoding.bits, shape, encoding.group, specs[scales].dtype)
        yield name, Packed(f"mlx {encoding.bits} bits", shape, (scales, biases), (1, encoding.group), make)


def recipe(bits: int, shape: Shape, group: int, dtype: DType, operands: Sequence[Operand]) -> Recipe:
    """Return the recipe of a weight from numbers, scales and biases."""
    from ckptkit.state.quantized import grouped_blocks as blocks  # imports numpy, which plain copies do not need
    from ckptkit.state.quantized.dequantize_blocks import with_read_dtype

    numbers, scales, biases = operands
    part = blocks.Affine(with_read_dtype(scales), with_read_dtype(biases), dtype)
    codes = blocks.Codes(bits, tuple(map(float, range(1 << bits))))
    return blocks.GroupedRecipe(numbers, codes, [part], shape, group, dtype)

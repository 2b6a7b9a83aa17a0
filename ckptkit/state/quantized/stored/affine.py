"""Find MLX's triples: `X.weight` uint32 `[O, I*bits/32]`, `X.scales` and `X.biases` `[O, I/group]`.

A number is its pattern of bits times the scale of its group, plus the bias. Both products and sums are rounded to the
dtype of the scales, as mlx does on a CPU. Source: `mlx.core.dequantize`, and its documentation of `quantize`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ckptkit.errors import Unsupported
from ckptkit.layout.box import Shape
from ckptkit.layout.dtypes import DType
from ckptkit.layout.plan import Operand, Recipe
from ckptkit.state.quantized.config import Integers, QuantizationConfig
from ckptkit.state.quantized.packed import Packed, Specs
from ckptkit.state.quantized.stored.scales import mismatch

WEIGHT, SCALES, BIASES = ".weight", ".scales", ".biases"


def find(specs: Specs, stated: QuantizationConfig) -> Iterator[tuple[str, Packed]]:
    """Yield the weights that are triples.

    Raises `Mismatch` for scales or biases of other shapes than they need, `Unsupported` where config.json says nothing.
    """
    for name, spec in specs.items():
        module = name.removesuffix(WEIGHT)
        if spec.dtype.name != "uint32" or module == name or f"{module}{SCALES}" not in specs:
            continue
        way = stated.modules.get(module) or next(iter(stated.integers), None)
        if way is None:
            message = f"found {spec}, but config.json does not say how many bits a number has"
            raise Unsupported(message, tensor=name, hint="check that the model's config.json is there")
        yield name, packed(specs, name, module, way)


def packed(specs: Specs, name: str, module: str, way: Integers) -> Packed:
    """Return the weight that a triple stands for."""
    stored, scales, biases = specs[name], f"{module}{SCALES}", f"{module}{BIASES}"
    assert way.group is not None
    columns = stored.shape[-1] * 32 // way.bits
    wanted = (*stored.shape[:-1], columns // way.group)
    for beside in (scales, biases):
        found = specs.get(beside)
        fits = found is not None and found.shape == wanted and found.dtype.kind == "float"
        if not fits or columns % way.group or stored.shape[-1] * 32 % way.bits:
            which = f"a float for each {way.group} numbers of {way.bits} bits, {list(wanted)}"
            raise mismatch(beside, which, found or "none")
    shape = (*stored.shape[:-1], columns)
    make = recipe_of(way, shape, way.group, specs[scales].dtype)
    return Packed(f"mlx {way.bits} bits", shape, (scales, biases), (1, way.group), make)


def recipe_of(way: Integers, shape: Shape, group: int, dtype: DType) -> Callable[[Sequence[Operand]], Recipe]:
    """Return what makes the recipe of a weight: of numbers, scales and biases."""

    def make(operands: Sequence[Operand]) -> Recipe:
        from ckptkit.state.quantized import grouped_blocks as blocks  # imports numpy, which no copy needs
        from ckptkit.state.quantized.plain_blocks import as_read

        numbers, scales, biases = operands
        part = blocks.Affine(as_read(scales), as_read(biases), dtype)
        codes = blocks.Codes(way.bits, tuple(map(float, range(1 << way.bits))))
        return blocks.GroupedRecipe(numbers, codes, [part], shape, group, dtype)

    return make

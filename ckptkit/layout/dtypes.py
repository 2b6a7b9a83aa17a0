"""List the dtypes of checkpoints, and every value of the float dtypes of 8 bits or fewer.

Sources: the OCP specifications of 8-bit floats (E4M3, E5M2) and of microscaling formats (E8M0, E2M1), and
https://arxiv.org/abs/2206.02915 for the dtypes without a negative zero (fnuz).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import inf, nan
from typing import TYPE_CHECKING, Literal

from ckptkit.errors import Usage

if TYPE_CHECKING:
    import torch

Kind = Literal["float", "small_float", "int", "bool", "complex", "quantized"]


@dataclass(frozen=True, slots=True)
class DType:
    """A dtype with torch's name.

    `itemsize` is the number of bytes per element as torch counts elements (two 4-bit numbers are one element of one
    byte). `small_float` marks floats of 8 bits or fewer: their values need scales, so ckptkit does not cast them.
    `quantized` dtypes have scales beside the bytes, which ckptkit cannot write.
    """

    name: str
    itemsize: int
    kind: Kind

    def is_castable_to(self, other: DType) -> bool:
        """Return True if this dtype can be cast to `other`: both are floats of 16 bits or more."""
        return self.kind == other.kind == "float"

    def is_comparable_with(self, other: DType) -> bool:
        """Return True if elements of both dtypes can be compared: they have one number per element, or are equal."""
        return self == other or not any(d.kind == "quantized" or d.name.endswith("_x2") for d in (self, other))

    def __str__(self) -> str:
        return self.name


DTYPES: dict[str, DType] = {
    dtype.name: dtype
    for dtype in (
        DType("float64", 8, "float"),
        DType("float32", 4, "float"),
        DType("float16", 2, "float"),
        DType("bfloat16", 2, "float"),
        DType("float8_e4m3fn", 1, "small_float"),
        DType("float8_e5m2", 1, "small_float"),
        DType("float8_e4m3fnuz", 1, "small_float"),
        DType("float8_e5m2fnuz", 1, "small_float"),
        DType("float8_e8m0fnu", 1, "small_float"),
        DType("float4_e2m1fn_x2", 1, "small_float"),
        DType("int64", 8, "int"),
        DType("int32", 4, "int"),
        DType("int16", 2, "int"),
        DType("int8", 1, "int"),
        DType("uint64", 8, "int"),
        DType("uint32", 4, "int"),
        DType("uint16", 2, "int"),
        DType("uint8", 1, "int"),
        DType("bool", 1, "bool"),
        DType("complex128", 16, "complex"),
        DType("complex64", 8, "complex"),
        DType("complex32", 4, "complex"),
        DType("quint8", 1, "quantized"),
        DType("qint8", 1, "quantized"),
        DType("qint32", 4, "quantized"),
    )
}

SHORT_NAMES = {
    "fp64": "float64",
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "double": "float64",
    "float": "float32",
    "half": "float16",
}


def parse_dtype(name: str | torch.dtype) -> DType:
    """Return the dtype that a user calls `name`: torch's name, with or without `torch.`, or a short one like `bf16`."""
    plain = str(name).removeprefix("torch.").lower()
    dtype = DTYPES.get(SHORT_NAMES.get(plain, plain))
    if dtype is None:
        raise Usage(f"unknown dtype `{name}`", hint="use bf16, fp16, fp32, fp64 or another dtype of torch")
    return dtype


@dataclass(frozen=True)
class SmallFloat:
    """A dtype: its number of bits, of mantissa bits, and the bias of the exponent.

    `infinity` is a magnitude, as bits; larger ones are NaN. Without infinity, the bits in `nans` are NaN.
    """

    nbits: int
    mantissa: int
    bias: int
    infinity: int | None = None
    nans: tuple[int, ...] = ()
    is_signed: bool = True

    @property
    def smallest_normal(self) -> float:
        return 2.0 ** ((1 if self.mantissa else 0) - self.bias)

    @cached_property
    def value_by_bits(self) -> tuple[float, ...]:
        return tuple(map(self._decode, range(1 << self.nbits)))

    def _decode(self, bits: int) -> float:
        sign, magnitude = divmod(bits, 1 << (self.nbits - 1)) if self.is_signed else (0, bits)
        if bits in self.nans or (self.infinity is not None and magnitude > self.infinity):
            return nan
        exponent, fraction = divmod(magnitude, 1 << self.mantissa)
        if magnitude == self.infinity:
            number = inf
        elif exponent or not self.mantissa:
            number = (1 + fraction / (1 << self.mantissa)) * 2.0 ** (exponent - self.bias)
        else:
            number = fraction / (1 << self.mantissa) * self.smallest_normal
        return -number if sign else number


SMALL_FLOATS = {
    "float8_e5m2": SmallFloat(8, 2, 15, infinity=0x7C),
    "float8_e4m3fn": SmallFloat(8, 3, 7, nans=(0x7F, 0xFF)),
    "float8_e5m2fnuz": SmallFloat(8, 2, 16, nans=(0x80,)),
    "float8_e4m3fnuz": SmallFloat(8, 3, 8, nans=(0x80,)),
    "float8_e8m0fnu": SmallFloat(8, 0, 127, nans=(0xFF,), is_signed=False),
    "float4_e2m1fn_x2": SmallFloat(4, 1, 1),
}

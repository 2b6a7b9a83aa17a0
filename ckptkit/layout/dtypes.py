"""List the dtypes of checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
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

"""Recipes that compute a tensor from tensors of several sources: a copy, the weighted mean, an fp32 master weight."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptkit.engine.casting import cast_into, widener
from ckptkit.errors import Mismatch, Unsupported
from ckptkit.layout.box import Box
from ckptkit.layout.dtypes import DTYPES, DType
from ckptkit.layout.plan import Operand
from ckptkit.words import count

Array = NDArray[Any]
FLOAT32, FLOAT64 = DTYPES["float32"], DTYPES["float64"]


class Taken:
    """The recipe of a tensor that is a copy of another tensor, from another source or with another name."""

    def __init__(self, operand: Operand) -> None:
        self.operands = (operand,)

    def __call__(self, box: Box, dtype: DType, blocks: Sequence[memoryview]) -> tuple[memoryview, bool]:  # noqa: ARG002
        return blocks[0], False


def working_dtype(dtype: DType) -> DType:
    """Return the dtype in which updates of a tensor of `dtype` are computed."""
    return FLOAT64 if dtype == FLOAT64 else FLOAT32


def round_to_bytes(values: Array, src: DType, dst: DType) -> memoryview:
    """Return values of dtype `src`, rounded once to `dst`, as row-major bytes."""
    flat = np.ascontiguousarray(values).reshape(-1)
    if src == dst:
        return flat.data.cast("B")
    rounded = np.empty(len(flat), f"u{dst.itemsize}")
    cast_into(flat, src, dst, rounded)
    return rounded.data.cast("B")


# The weighted mean of several sources.
#
# A float of 16 bits or more is the sum of weight times element, in float64 and in the order of the sources, rounded
# once at the end. An element that is bitwise equal in all sources stays unchanged. Elements of other dtypes are not
# averaged: they come from the last source.


class Mean:
    """The recipe of a tensor that is the weighted mean of the tensors of this name, one weight per source."""

    def __init__(self, name: str, dtype: DType, weights: Sequence[float]) -> None:
        reads_as = FLOAT64 if dtype.kind == "float" else dtype
        self.operands = tuple(Operand(number, name, reads_as) for number in range(len(weights)))
        self._weights = weights

    def __call__(self, box: Box, dtype: DType, blocks: Sequence[memoryview]) -> tuple[memoryview, bool]:  # noqa: ARG002
        """Return the mean; of non-floats the last source's elements, and True if the sources differ."""
        if dtype.kind != "float":
            stored, *others = (np.frombuffer(block, np.uint8) for block in blocks)
            is_equal = all(np.array_equal(stored, other) for other in others)
            if not is_equal and dtype.kind not in ("int", "bool"):
                message = f"ckptkit cannot average {dtype}, and the values differ between the sources"
                raise Unsupported(message, hint="drop it with --exclude, or average before you quantize")
            return blocks[-1], not is_equal
        first, *rest = (np.frombuffer(block, np.float64) for block in blocks)
        is_same = np.ones(len(first), bool)
        with np.errstate(invalid="ignore", over="ignore"):
            total = first * self._weights[0]
            for numbers, weight in zip(rest, self._weights[1:], strict=True):
                is_same &= first.view(np.int64) == numbers.view(np.int64)
                total += np.multiply(numbers, weight, out=numbers)  # overwrites all blocks but the first
        np.copyto(total, first, where=is_same)
        narrow = np.empty(len(total), f"u{dtype.itemsize}")
        cast_into(total, FLOAT64, dtype, narrow)
        return narrow.data.cast("B"), False


# fp32 master weights from the weights, and from the masters or remainders that an optimizer stores.
#
# Source: transformer_engine/common/multi_tensor/adam.cu, `AdamFunctorMasterParamRemainder`. The remainder is the lower
# 16 bits of a master, as int16. The weight is the upper 16 bits, plus one if the remainder is negative (rounding up).
# So the bits of a master are the bits of the weight plus the remainder.
REMAINDERS, COMPLETED = DTYPES["int16"], DTYPES["bfloat16"]
_HALF = 1 << 15


class RemaindersAsFloats:
    """The remark on fp32 master weights that an optimizer stored as floats: how many contained remainders."""

    def verdict_sentence(self, checked: Sequence[str], noted: Collection[str]) -> str:
        remainders = sum(name in noted for name in checked)
        return f"added the remainders that {remainders} of {count(len(checked), 'master')} in {FLOAT32} contained"


_REMAINDERS_AS_FLOATS = RemaindersAsFloats()


class Remainder:
    """The recipe of an fp32 master weight: a bfloat16 weight in source 0, plus an int16 remainder in another source."""

    def __init__(self, name: str, source: int) -> None:
        self.operands = (Operand(0, name, FLOAT32), Operand(source, name, REMAINDERS))

    def __call__(self, box: Box, dtype: DType, blocks: Sequence[memoryview]) -> tuple[memoryview, bool]:  # noqa: ARG002
        weight, remainder = np.frombuffer(blocks[0], np.int32), np.frombuffer(blocks[1], np.int16)
        return round_to_bytes(add_remainders(weight, remainder), FLOAT32, dtype), False


class Master:
    """The recipe of a master. Another source stores the master as floats, or a remainder for the weight of source 0."""

    def __init__(self, name: str, source: int, weight: DType) -> None:
        self.operands = (Operand(0, name, FLOAT32), Operand(source, name, FLOAT32))
        self.verdict = _REMAINDERS_AS_FLOATS
        self._name, self._weight = name, weight

    def __call__(self, box: Box, dtype: DType, blocks: Sequence[memoryview]) -> tuple[memoryview, bool]:
        """Return the master, and whether a remainder gave it. Raises `Mismatch` if it does not round to the weight."""
        weight, master = (np.frombuffer(block, np.float32) for block in blocks)
        differ = ~np.isclose(rounded(master, self._weight), weight, rtol=0, atol=0, equal_nan=True)
        if not differ.any():
            return round_to_bytes(master, FLOAT32, dtype), False
        are_remainders = (np.abs(master + 0.5) <= _HALF).all() and (np.rint(master) == master).all()  # of int16
        if self._weight == COMPLETED and are_remainders:
            return round_to_bytes(add_remainders(weight.view(np.int32), master.astype(np.int16)), FLOAT32, dtype), True
        message = f"{differ.sum()} of {len(master)} elements at {box} differ from the master in {self._weight}"
        hint = "`ckptkit verify` lists such tensors; drop --weights-from to take the weights"
        raise Mismatch(message, tensor=self._name, hint=hint)


def add_remainders(weight_bits: Array, remainder: Array) -> Array:
    """Return float32 masters. `weight_bits` has the bits of the weights widened to 32 bits, `remainder` is int16."""
    return (weight_bits + remainder.astype(np.int32)).view(np.float32)


def rounded(master: Array, dtype: DType) -> Array:
    """Round masters to `dtype`, the dtype of the weights, and return them in float32."""
    narrow = np.empty(len(master), f"u{dtype.itemsize}")
    cast_into(master, FLOAT32, dtype, narrow)
    return widener(dtype)(narrow)

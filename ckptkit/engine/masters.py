"""Compute fp32 master weights from the weights and from the masters or remainders that an optimizer stores.

Source: transformer_engine/common/multi_tensor/adam.cu, `AdamFunctorMasterParamRemainder`. The remainder is the lower 16
bits of a master, as int16. The weight is the upper 16 bits, plus one if the remainder is negative (rounding up). So the
bits of a master are the bits of the weight plus the remainder.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from ckptkit.engine.recipes import FLOAT32, Array, as_stored
from ckptkit.errors import Mismatch
from ckptkit.layout.box import Box
from ckptkit.layout.casting import cast, widener
from ckptkit.layout.dtypes import DTYPES, DType
from ckptkit.layout.plan import Operand
from ckptkit.words import count

REMAINDERS, COMPLETED = DTYPES["int16"], DTYPES["bfloat16"]
_HALF = 1 << 15


class RemaindersAsFloats:
    """The remark on fp32 master weights that an optimizer stored as floats: how many contained remainders."""

    def words(self, judged: Sequence[str], noted: Collection[str]) -> str:
        """Return a sentence on the masters."""
        remainders = sum(name in noted for name in judged)
        return f"added the remainders that {remainders} of {count(len(judged), 'master')} in {FLOAT32} contained"


_REMAINDERS_AS_FLOATS = RemaindersAsFloats()


class Remainder:
    """The recipe of an fp32 master weight: a bfloat16 weight in source 0, plus an int16 remainder in another source."""

    def __init__(self, name: str, source: int) -> None:
        self.operands = (Operand(0, name, FLOAT32), Operand(source, name, REMAINDERS))

    def __call__(self, box: Box, dtype: DType, blocks: Sequence[memoryview]) -> tuple[memoryview, bool]:  # noqa: ARG002
        """Return the fp32 master weight as `dtype`."""
        weight, remainder = np.frombuffer(blocks[0], np.int32), np.frombuffer(blocks[1], np.int16)
        return as_stored(add(weight, remainder), FLOAT32, dtype), False


class Master:
    """The recipe of a master. Another source stores the master as floats, or a remainder for the weight of source 0."""

    def __init__(self, name: str, source: int, weight: DType) -> None:
        self.operands = (Operand(0, name, FLOAT32), Operand(source, name, FLOAT32))
        self.verdict = _REMAINDERS_AS_FLOATS
        self._name, self._weight = name, weight

    def __call__(self, box: Box, dtype: DType, blocks: Sequence[memoryview]) -> tuple[memoryview, bool]:
        """Return the master as `dtype`, and whether it was computed from a remainder.

        Raises `Mismatch` if it is neither a remainder nor rounds to the weight.
        """
        weight, master = (np.frombuffer(block, np.float32) for block in blocks)
        differ = ~np.isclose(rounded(master, self._weight), weight, rtol=0, atol=0, equal_nan=True)
        if not differ.any():
            return as_stored(master, FLOAT32, dtype), False
        if self._weight == COMPLETED and are_remainders(master):
            return as_stored(add(weight.view(np.int32), master.astype(np.int16)), FLOAT32, dtype), True
        message = f"{differ.sum()} of {len(master)} elements at {box} differ from the master in {self._weight}"
        hint = "`ckptkit verify` lists such tensors; drop --weights-from to take the weights"
        raise Mismatch(message, tensor=self._name, hint=hint)


def add(weight: Array, remainder: Array) -> Array:
    """Return float32 masters. `weight` has the bits of the weights widened to 32 bits, `remainder` is int16."""
    return (weight + remainder.astype(np.int32)).view(np.float32)


def are_remainders(numbers: Array) -> bool:
    """Return whether all numbers are integers in the range of int16."""
    return bool((np.abs(numbers + 0.5) <= _HALF).all() and (np.rint(numbers) == numbers).all())


def rounded(master: Array, dtype: DType) -> Array:
    """Round masters to `dtype`, the dtype of the weights, and return them in float32."""
    narrow = np.empty(len(master), f"u{dtype.itemsize}")
    cast(master, FLOAT32, dtype, narrow)
    return widener(dtype)(narrow)

"""Cast the elements of a block from one float dtype to another.

bfloat16 is the upper half of float32 (https://en.wikipedia.org/wiki/Bfloat16_floating-point_format), so shifts and an
integer addition round it to nearest, ties to even, as torch does. Every cast goes through float32, as in torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptkit.errors import Unsupported
from ckptkit.layout.dtypes import DType

Array = NDArray[Any]

_NUMPY = {"float64": np.float64, "float32": np.float32, "float16": np.float16}
_PART = 1 << 18  # elements at a time: with fewer, threads wait longer for the GIL than the passes take
# the smallest magnitudes that round to infinity
_OVERFLOW = {"float16": 65520.0, "bfloat16": float.fromhex("0x1.ffp127"), "float32": float.fromhex("0x1.ffffffp127")}


def cast_into(values: Array, src: DType, dst: DType, out: Array) -> None:
    """Convert `values`, 1-D and stored as `src` (in any numpy dtype of its size), into `out`, stored as `dst`.

    Rounds to nearest, ties to even; NaN stays NaN. Raises `Unsupported` if a finite value would become infinite.
    """
    if not src.is_castable_to(dst):
        raise Unsupported(f"no conversion from {src} to {dst}")
    parts = [slice(start, start + _PART) for start in range(0, len(values), _PART)]
    if src.itemsize == 2 and dst.name == "float32":  # exact: float32 represents every 16-bit float
        for part in parts:
            widen_into(out[part].view(np.float32), values[part], src)
        return
    widen, scratch = widener(src), np.empty(min(_PART, len(values)), np.uint32)
    for part in parts:
        wide = widen(values[part])
        is_small = are_known_to_stay_finite(wide, dst)
        with np.errstate(over="ignore", invalid="ignore"):
            if dst.itemsize == 2:
                wide = wide.astype(np.float32, copy=False)
            if dst.name == "bfloat16":
                _to_bfloat16(wide, out[part].view(np.uint16), is_small, scratch)
            else:
                out[part].view(_NUMPY[dst.name])[...] = wide


def are_known_to_stay_finite(values: Array, dst: DType) -> bool:
    """Return True if all `values` are finite in `dst`, False if unknown. Raises `Unsupported` if one is too large."""
    limit = _OVERFLOW.get(dst.name)
    if limit is None or values.dtype == _NUMPY.get(dst.name):
        return False
    if values.max() < limit and values.min() > -limit:  # false if any value is NaN
        return True
    too_large = np.isfinite(values) & (np.abs(values) >= limit)
    if too_large.any():
        worst = np.abs(values[too_large]).max()
        hint = "keep the dtype, or use bfloat16"
        raise Unsupported(f"{dst} cannot hold {worst:.6g}: it would become infinite", hint=hint)
    return False


def widener(src: DType) -> Callable[[Array], Array]:
    """Return a function that converts stored floats of 16 bits or more to float32, and float64 to float64."""
    if src.itemsize == 2:
        return lambda stored: widen_into(np.empty(stored.shape, np.float32), stored, src)
    return lambda stored: stored.view(_NUMPY[src.name])


def widen_into(numbers: Array, stored: Array, src: DType) -> Array:
    """Fill the float32 array `numbers` with stored 16-bit floats, and return it."""
    if src.name == "float16":
        np.copyto(numbers, stored.view(np.float16))
        return numbers
    bits = numbers.view(np.uint32)
    np.copyto(bits, stored.view(np.uint16))
    bits <<= 16  # in two steps: one numpy call that widens and shifts has two thirds of this speed
    return numbers


def _to_bfloat16(values: Array, out: NDArray[np.uint16], are_small: bool, scratch: NDArray[np.uint32]) -> None:
    bits = values.view(np.uint32)
    rounded = np.right_shift(bits, 16, out=scratch[: len(bits)])
    rounded &= 1  # the last bit that stays, for ties to even
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    np.copyto(out, rounded, casting="unsafe")
    if not are_small:
        out[np.isnan(values)] = 0x7FC0

"""Read numpy's arrays and scalars out of pickles, of plain numbers and fixed-length text only.

numpy's own functions are not safe here: a pickle that calls `numpy.ndarray` with a dtype of objects, or changes the
flags of a dtype, makes pointers of its bytes. So a pickle that names them gets those of this module in their place.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from typing import Any, Self

import numpy as np

_PLAIN = re.compile(r"[biufcSU][1-9]\d{0,5}")  # kind and bytes, as numpy pickles a dtype


class ReadDtype:
    """A dtype as a pickle describes it: its kind and size, then its byte order."""

    def __init__(self, spec: str, *_: object) -> None:
        self.spec = spec
        self.order = "="

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.order = state[1]

    def plain(self) -> np.dtype[Any]:
        """Return the dtype. Raises `UnpicklingError` for one that is not of plain numbers or text."""
        if not isinstance(self.spec, str) or not _PLAIN.fullmatch(self.spec) or self.order not in ("<", ">", "=", "|"):
            raise pickle.UnpicklingError(f"numpy dtype {self.spec}")
        dtype: np.dtype[Any] = np.dtype(self.spec)
        return dtype if self.order in ("=", "|") else np.dtype(self.order + self.spec)


class ReadArray(np.ndarray[Any, Any]):
    """An array as a pickle describes it; pickled again, it is a plain one of numpy's."""

    def __new__(cls, *_: object) -> Self:
        return super().__new__(cls, (0,), "b")

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, is_fortran, data = state
        if not isinstance(dtype, ReadDtype) or not isinstance(data, bytes):
            raise pickle.UnpicklingError("a numpy array without plain elements")
        super().__setstate__((1, shape, dtype.plain(), is_fortran, data))

    def __reduce__(self) -> Any:
        return self.view(np.ndarray).__reduce__()


def read_array(*_: object) -> ReadArray:
    """Return an array whose shape, dtype and elements follow."""
    return ReadArray()


def read_scalar(dtype: object, data: bytes) -> Any:
    """Return a scalar of numpy's. Raises `UnpicklingError` for one that is not a plain number or text."""
    if not isinstance(dtype, ReadDtype):
        raise pickle.UnpicklingError("a numpy scalar without a dtype")
    return np.frombuffer(data, dtype.plain(), count=1)[0]


def empty_bytes() -> bytes:
    """Return what the pickle of an empty array calls `bytes` for."""
    return b""


STAND_INS: list[tuple[Callable[..., Any], str]] = [
    (ReadArray, "numpy.ndarray"),
    (ReadDtype, "numpy.dtype"),
    (empty_bytes, "builtins.bytes"),
    *((read_array, f"{core}.multiarray._reconstruct") for core in ("numpy._core", "numpy.core")),
    *((read_scalar, f"{core}.multiarray.scalar") for core in ("numpy._core", "numpy.core")),
]

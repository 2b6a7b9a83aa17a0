"""Read non-tensor entries (step, learning rate, the state of a data loader) safely, and encode them again for torch.

torch's planner unpickles entries without restrictions. So it never gets bytes of the checkpoint. It gets values that
torch's restricted unpickler has loaded and torch.save has written again.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from threading import Lock
from typing import Any, Self

import numpy as np
import torch
from torch.serialization import add_safe_globals, clear_safe_globals, get_safe_globals

from ckptkit.errors import Corrupt, Unsupported, errors_at
from ckptkit.formats.archives.write_archive import make_zip_template
from ckptkit.formats.archives.zip_entries import verify_archive_in_memory
from ckptkit.io.file import opening, read_at
from ckptkit.layout import Blob, Layout

# Stand-ins for numpy's functions in pickles. They read only arrays and scalars of plain numbers and fixed-length text.
#
# numpy's own functions are not safe here: a pickle that calls `numpy.ndarray` with a dtype of objects, or changes the
# flags of a dtype, makes pointers of its bytes. So a pickle that names numpy's functions gets this module's.
_PLAIN = re.compile(r"[biufcSU][1-9]\d{0,5}")  # kind and bytes, as numpy pickles a dtype


class ReadDtype:
    """A numpy dtype as a pickle describes it: its kind and size, then its byte order."""

    def __init__(self, spec: str, *_: object) -> None:
        self.spec = spec
        self.order = "="

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.order = state[1]

    def require_plain_dtype(self) -> np.dtype[Any]:
        """Return the dtype. Raises `UnpicklingError` unless it is a plain number or fixed-length text."""
        if not isinstance(self.spec, str) or not _PLAIN.fullmatch(self.spec) or self.order not in ("<", ">", "=", "|"):
            raise pickle.UnpicklingError(f"numpy dtype {self.spec}")
        dtype: np.dtype[Any] = np.dtype(self.spec)
        return dtype if self.order in ("=", "|") else np.dtype(self.order + self.spec)


class ReadArray(np.ndarray[Any, Any]):
    """A numpy array as a pickle describes it. Pickled again, it is a plain numpy array."""

    def __new__(cls, *_: object) -> Self:
        return super().__new__(cls, (0,), "b")  # the pickle sets shape, dtype and elements afterwards

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, is_fortran, data = state
        if not isinstance(dtype, ReadDtype) or not isinstance(data, bytes):
            raise pickle.UnpicklingError("a numpy array without plain elements")
        super().__setstate__((1, shape, dtype.require_plain_dtype(), is_fortran, data))

    def __reduce__(self) -> Any:
        return self.view(np.ndarray).__reduce__()


def read_numpy_scalar(dtype: object, data: bytes) -> Any:
    """Return a numpy scalar. Raises `UnpicklingError` unless it is a plain number or fixed-length text."""
    if not isinstance(dtype, ReadDtype):
        raise pickle.UnpicklingError("a numpy scalar without a dtype")
    return np.frombuffer(data, dtype.require_plain_dtype(), count=1)[0]


def empty_bytes() -> bytes:
    """Return b"", the result of the call of `bytes` in the pickle of an empty array."""
    return b""


STAND_INS: list[tuple[Callable[..., Any], str]] = [
    (ReadArray, "numpy.ndarray"),
    (ReadDtype, "numpy.dtype"),
    (empty_bytes, "builtins.bytes"),
    *((ReadArray, f"{core}.multiarray._reconstruct") for core in ("numpy._core", "numpy.core")),
    *((read_numpy_scalar, f"{core}.multiarray.scalar") for core in ("numpy._core", "numpy.core")),
]


_REPLACED = frozenset(name for _, name in STAND_INS)
_globals_lock = Lock()  # torch's list of safe globals is process-wide


def entry_as_torch_save(layout: Layout, name: str) -> BytesIO:
    """Return an entry's value in the format of torch.save.

    Raises `Unsupported` for a value that `torch.load(weights_only=True)` refuses (except `io.BytesIO`), `Corrupt` if a
    checksum differs.
    """
    blob = layout.blobs[name]
    path = layout.root / blob.path
    written = BytesIO()
    with errors_at(path=path, tensor=name):
        data = archive_bytes_of(blob, path)
        try:
            with only_safe_globals():
                value = torch.load(BytesIO(data), map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise Unsupported(
                "the entry holds more than plain values: torch would run code of the checkpoint's to load it",
                hint="if you trust its producer, name the class to `torch.serialization.add_safe_globals`",
            ) from error
        except (RuntimeError, EOFError, TypeError, ValueError, LookupError, AttributeError) as error:
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise Corrupt(f"torch cannot load the entry: {reason}") from error
        torch.save(value, written)
    written.seek(0)
    return written


def archive_bytes_of(blob: Blob, path: Path) -> bytes:
    """Return the torch.save archive of an entry: its own with verified checksums, or one made from its pickle."""
    if blob.wrapper is not None:
        raise Unsupported(f"stored through the transform `{blob.wrapper}`", hint="save it again without `_extensions`")
    if blob.content is not None:
        ((_, archive),) = make_zip_template(blob.content, {}).parts
        return archive
    with opening(path) as file:
        data = read_at(file, blob.length, blob.offset)
    verify_archive_in_memory(data)
    return data


@contextmanager
def only_safe_globals() -> Iterator[None]:
    """Make torch admit `io.BytesIO` (it runs no code), our functions instead of numpy's, and what users have named.

    numpy's own functions are removed, even if another library has named them for the whole process: they make pointers
    of bytes, and if two functions have one name, torch may call either.
    """
    with _globals_lock:
        admitted = get_safe_globals()
        clear_safe_globals()
        kept = []
        for one in admitted:
            value, name = one if isinstance(one, tuple) else (one, f"{one.__module__}.{one.__qualname__}")
            is_numpy = str(getattr(value, "__module__", "")).partition(".")[0] == "numpy"
            if not is_numpy and name not in _REPLACED:
                kept.append(one)
        add_safe_globals([*kept, BytesIO, *STAND_INS])
        try:
            yield
        finally:
            clear_safe_globals()
            add_safe_globals(admitted)

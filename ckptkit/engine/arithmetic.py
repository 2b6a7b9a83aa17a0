"""Apply factors and shifts to the elements of tensors whose meaning differs between a model family and the Hub.

The results are written to a temporary file that the new layout keeps alive, so later reads get the changed elements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

from ckptkit.errors import Unsupported, translate_os_errors
from ckptkit.io.allocation import TemporaryFile, require_free_space
from ckptkit.io.file import OpenFiles, read_at
from ckptkit.layout import Chunk, Layout
from ckptkit.layout.dtypes import DTYPES

Array = Any  # a numpy array; numpy is imported only if elements change
_PIECE = 1 << 24  # bytes that are changed at a time, which bounds the memory
_FLOAT32 = DTYPES["float32"]


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """An elementwise change, computed in float32: multiply by `factor`, then add `shift`."""

    factor: float = 1.0
    shift: float = 0.0

    def __call__(self, values: Array) -> Array:
        """Return the changed elements of a float32 array. A factor of 1 and a shift of 0 keep every bit."""
        import numpy as np

        values = values if self.factor == 1 else values * np.float32(self.factor)
        return values if self.shift == 0 else values + np.float32(self.shift)


def apply_arithmetic(layout: Layout, changes: Mapping[str, Arithmetic]) -> Layout:
    """Return a located layout in which `changes` are applied to tensors.

    Each result is rounded once to the tensor's dtype. Raises `Unsupported` for a tensor whose dtype is not float32,
    bfloat16 or float16, `NoRoom` if the temporary disk is too small for the results.
    """
    if not changes:
        return layout
    kept = TemporaryFile()
    chunks = [chunk for name in changes for chunk in layout.tensors[name].chunks]
    require_free_space(kept.path, sum(chunk.box.numel * chunk.dtype.itemsize for chunk in chunks))
    tensors = dict(layout.tensors)
    with translate_os_errors(kept.path), kept.path.open("r+b") as out, closing(OpenFiles(layout.root)) as files:
        for name, change in changes.items():
            tensor = tensors[name]
            if any(chunk.dtype.kind != "float" or chunk.dtype.itemsize not in (2, 4) for chunk in tensor.chunks):
                message = (
                    f"expected float32, bfloat16 or float16, found {tensor.spec.dtype}: ckptkit must change the values"
                )
                raise Unsupported(message, path=layout.path, tensor=name, hint="keep the names with --names keep")
            changed = tuple(append_computed_chunk(chunk, change, files, out, str(kept.path)) for chunk in tensor.chunks)
            tensors[name] = replace(tensor, chunks=changed)
    return replace(layout, tensors=tensors, keeper=(layout.keeper, kept))


def append_computed_chunk(chunk: Chunk, change: Arithmetic, files: OpenFiles, out: BinaryIO, path: str) -> Chunk:
    """Append the changed elements of a chunk to `out`, if a file has them or they are zeros; return the new chunk."""
    offset, written = out.tell(), 0
    if chunk.is_zeros:
        written = append_changed_elements(bytes(chunk.box.numel * chunk.dtype.itemsize), chunk, change, out)
        return Chunk(chunk.box, path, offset, written, chunk.dtype)
    if not chunk.is_in_file:
        return chunk
    while written < chunk.length:
        data = read_at(files[chunk.path], min(_PIECE, chunk.length - written), chunk.offset + written)
        written += append_changed_elements(data, chunk, change, out)
    return chunk._replace(path=path, offset=offset, crc32=None, run=None)


def append_changed_elements(data: bytes, chunk: Chunk, change: Callable[[Array], Array], out: BinaryIO) -> int:
    """Change the elements in `data`, append them to `out` in the dtype of the chunk, and return their size in bytes."""
    import numpy as np

    from ckptkit.engine.casting import cast_into, widener

    stored = np.frombuffer(data, f"u{chunk.dtype.itemsize}")
    changed = change(widener(chunk.dtype)(stored))
    if chunk.dtype != _FLOAT32:
        rounded = np.empty_like(stored)
        cast_into(changed, _FLOAT32, chunk.dtype, rounded)
        changed = rounded
    out.write(changed.tobytes())
    return len(data)

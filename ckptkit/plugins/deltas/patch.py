"""Load the changes of one tensor from a delta, check them, and combine the changes of several deltas."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ckptkit.engine.read import read
from ckptkit.errors import Corrupt
from ckptkit.layout.box import whole
from ckptkit.plugins.deltas.changes import Array, Changes, view
from ckptkit.plugins.deltas.open_delta import Delta
from ckptkit.plugins.deltas.payload import INDICES, VALUES


def load_changes(delta: Delta, name: str) -> Changes:
    """Return positions and new values of a tensor that a delta does not hold whole.

    Raises `Corrupt` for positions that are not strictly increasing, or outside the tensor, or damaged bytes.
    """
    tensor = delta.record.tensors[name]
    (positions, values) = (read_all(delta, name + suffix) for suffix in (INDICES, VALUES))
    indices: Array = np.frombuffer(positions, delta.layout.tensors[name + INDICES].spec.dtype.name)
    check_positions(delta, name, indices, tensor.spec.numel)
    return Changes(indices, view(values, tensor.spec.dtype.itemsize))


def read_all(delta: Delta, key: str) -> bytearray:
    return read(delta.layout, key, whole(delta.layout.tensors[key].spec.shape))


def check_positions(delta: Delta, name: str, positions: Array, numel: int) -> None:
    """Raise `Corrupt` unless positions are strictly increasing and inside the tensor."""
    path = delta.file_of(name)
    if positions[0] < 0 or positions[-1] >= numel or positions.max() >= numel or positions.min() < 0:
        wrong = int(positions[(positions < 0) | (positions >= numel)][0])
        raise Corrupt(f"expected positions from 0 to {numel - 1}, found {wrong}", path=path, tensor=name)
    steps = np.diff(positions)
    if (steps <= 0).any():
        at = int((steps <= 0).argmax())
        one, two = int(positions[at]), int(positions[at + 1])
        what = f"position {one} twice" if one == two else f"position {two} after {one}"
        raise Corrupt(f"expected strictly increasing positions, found {what}", path=path, tensor=name)


def merge_changes(found: Sequence[Changes]) -> Changes:
    """Return the changes of several deltas of one tensor as one: where two have an element, the later counts."""
    if len(found) == 1:
        return found[0]
    positions = np.concatenate([one.positions for one in found])
    order = np.argsort(positions, kind="stable")
    positions = positions[order]
    is_last = np.append(positions[1:] != positions[:-1], np.ones(1, np.bool_))
    values = np.concatenate([one.values for one in found])[order]
    return Changes(positions[is_last], values[is_last])

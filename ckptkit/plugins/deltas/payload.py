"""Name and place the data of a delta: positions and values of changed elements, or whole tensors."""

from __future__ import annotations

from ckptkit.layout import Spec
from ckptkit.layout.dtypes import DTYPES

VALUES, INDICES, WHOLE = ".values", ".indices", ".whole"
_INT32, _INT64 = DTYPES["int32"], DTYPES["int64"]
_SMALL = 1 << 31  # positions below fit an int32


def index_dtype(spec: Spec) -> str:
    """Return the dtype of positions in a tensor: int32 where they fit."""
    return (_INT32 if spec.numel < _SMALL else _INT64).name


def is_whole(spec: Spec, changed: int) -> bool:
    """Return whether a tensor takes less room whole than as so many positions and values."""
    return changed * (DTYPES[index_dtype(spec)].itemsize + spec.dtype.itemsize) > spec.nbytes


def payload_specs(name: str, spec: Spec, changed: int) -> dict[str, Spec]:
    """Return what a delta holds of a tensor of which so many elements changed, by its name there."""
    if is_whole(spec, changed):
        return {name + WHOLE: spec}
    shape = (changed,)
    return {name + INDICES: Spec(DTYPES[index_dtype(spec)], shape), name + VALUES: Spec(spec.dtype, shape)}

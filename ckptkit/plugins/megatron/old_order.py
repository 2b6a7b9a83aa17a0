"""Put fused queries, keys and values of checkpoint versions below 2 in the order of later ones. No bytes move.

Source: megatron/training/checkpointing.py, `fix_query_key_value_ordering`. The rows of a rank were `[3, heads, width]`
in version 0, which is also that of files without one, and `[heads, width, 3]` in version 1. Since 2 they are
`[heads, 3, width]`. Keys and values of attention to another sequence are fused likewise, two for three.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ckptkit.errors import Corrupt, Unsupported
from ckptkit.layout import StoredTensor, axes

CURRENT = 2.0
_FUSED = re.compile(r"(?:.*\.)?(query_key_value|key_value)\.(?:weight|bias)")


def has_fused(names: Iterable[str]) -> bool:
    """Return whether any of the names is that of fused queries, keys and values."""
    return any(map(_FUSED.fullmatch, names))


def in_new_order(tensor: StoredTensor, local: str, version: float, heads: int) -> StoredTensor:
    """Return what a rank with so many `heads` has under a name, its rows in the order of version 2.

    Raises `Corrupt` if its rows are not those of whole heads, `Unsupported` for a version that is not known.
    """
    match = _FUSED.fullmatch(local)
    if match is None or version >= CURRENT:
        return tensor
    if version not in (0, 1):
        raise Unsupported(f"expected checkpoint version 0, 1, {CURRENT} or later, found {version}")
    fused = 3 if match[1] == "query_key_value" else 2
    width, rest = divmod(tensor.spec.shape[0], fused * heads)
    if rest:
        raise Corrupt(f"expected {fused} x {heads} heads to divide the rows, found {tensor.spec.shape[0]} rows")
    extents, order = ((fused, heads, width), (1, 0, 2)) if version == 0 else ((heads, width, fused), (0, 2, 1))
    apart = axes.split(tensor, 0, extents)
    moved = axes.permute(apart, (*order, *range(3, len(apart.spec.shape))))
    return axes.unsplit(axes.merge(moved, 0, 3))

"""Give key paths to the entries of a producer that recorded none: where an optimizer's lie can be told by their names.

Source: megatron/core/dist_checkpointing/optimizer.py, whose moments are `optimizer.state.exp_avg.<name of the tensor>`,
and megatron/core/optimizer/optimizer.py, where several optimizers begin with `chained_0.` and so on. Without key paths
nothing but the first step of a name would tell them from the model.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from ckptkit.layout import KeyPath

_OPTIMIZER = re.compile(r"(?:(chained_[0-9]+)\.)?(optimizer)\.(.+)", re.DOTALL)
_MOMENT = re.compile(r"(state)\.([^.]+)\.(.+)", re.DOTALL)


def infer_keys(names: Iterable[str], tensors: Collection[str]) -> dict[str, KeyPath]:
    """Return the key paths of an optimizer's entries, by name; of a moment only if what it is of is among `tensors`."""
    found = {}
    for name in names:
        match = _OPTIMIZER.fullmatch(name)
        if match:
            moment = _MOMENT.fullmatch(match[3])
            rest = moment.groups() if moment and moment[3] in tensors else (match[3],)
            found[name] = (*filter(None, match.groups()[:2]), *rest)
    return found

"""Say which entries of a checkpoint contradict each other, and the command that fixes it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ckptkit.checkpoints.examination.inconsistency import Certainty, Inconsistency
from ckptkit.diagnosis.case import LoadTarget
from ckptkit.diagnosis.finding import Finding, Fix, rewrite

_BY_NAME = frozenset(["layer_gap", "empty_weight"])  # said of each tensor where the model's tensors are known


def find_inconsistencies(case: LoadTarget) -> Iterator[Finding]:
    """Yield the entries that contradict the rest of the checkpoint."""
    for one in case.inconsistencies:
        is_said = one.code in _BY_NAME and case.misfits is not None and bool(case.misfits.missing)
        if one.certainty > Certainty.NOTE and not is_said:
            yield Finding(one.code, one.tensor, one.message, fix_of(case, one), one.names)


def fix_of(case: LoadTarget, one: Inconsistency) -> Fix | None:
    """Return the command that takes a prefix off all names; None for anything else."""
    prefix = re.escape(one.data.get("prefix", ""))
    if one.code in ("wrapped_state", "wrapped_weight"):
        return rewrite(case.checkpoint, rename=(rf"(^|\.){prefix}=>\1",))
    return rewrite(case.checkpoint, rename=(rf"^{prefix}=>",)) if one.code == "prefixed_state" else None

"""Report entries of a checkpoint that contradict each other, and the command that fixes them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ckptkit.checkpoints.examination.inconsistency import Certainty, Inconsistency
from ckptkit.diagnosis.case import LoadTarget
from ckptkit.diagnosis.finding import Finding, Fix, rewrite

# if the model is known, `find_names` reports each tensor
_BY_NAME = frozenset(["layer_gap", "layer_lacks", "empty_weight"])
_BY_SHAPE = frozenset(["bias"])  # likewise `find_shapes`


def find_inconsistencies(case: LoadTarget) -> Iterator[Finding]:
    """Yield the entries that contradict the rest of the checkpoint."""
    for inconsistency in case.inconsistencies:
        is_reported = case.misfits is not None and (
            inconsistency.code in _BY_SHAPE or (inconsistency.code in _BY_NAME and bool(case.misfits.missing))
        )
        if inconsistency.certainty > Certainty.NOTE and not is_reported:
            yield Finding(
                inconsistency.code,
                inconsistency.tensor,
                inconsistency.message,
                fix_of(case, inconsistency),
                inconsistency.names,
            )


def fix_of(case: LoadTarget, inconsistency: Inconsistency) -> Fix | None:
    """Return the command that removes a prefix from all names; None for other inconsistencies."""
    prefix = re.escape(inconsistency.data.get("prefix", ""))
    if inconsistency.code in ("wrapped_state", "wrapped_weight"):
        return rewrite(case.checkpoint, rename=(rf"(^|\.){prefix}=>\1",))
    return rewrite(case.checkpoint, rename=(rf"^{prefix}=>",)) if inconsistency.code == "prefixed_state" else None

"""The kinds of findings that doctor looks for.

Each kind is a function that takes a `LoadTarget` and yields findings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ckptkit.diagnosis.case import LoadTarget
from ckptkit.diagnosis.damage import find_torch_version
from ckptkit.diagnosis.exports import find_config_dtype, find_empty_adapter, find_index
from ckptkit.diagnosis.finding import Finding
from ckptkit.diagnosis.group_map import find_unlisted
from ckptkit.diagnosis.inconsistencies import find_inconsistencies
from ckptkit.diagnosis.names import find_names, find_wrappers
from ckptkit.diagnosis.optimizer import find_groups, find_missing_states
from ckptkit.diagnosis.other_checkpoint import compare_with_checkpoint
from ckptkit.diagnosis.ranks import find_ranks
from ckptkit.diagnosis.shapes import find_shapes, find_ties, find_unserved
from ckptkit.diagnosis.weights import (
    find_adapters,
    find_declared_quantized,
    find_extra_state,
    find_model,
    find_predictors,
    find_quantized,
    find_tokens,
)

Finder = Callable[[LoadTarget], Iterator[Finding]]

# for readable checkpoints, in the order of the output
KINDS: tuple[Finder, ...] = (
    *(find_torch_version, find_index, find_config_dtype, find_empty_adapter, find_model, find_adapters),
    *(find_quantized, find_declared_quantized, find_tokens, find_extra_state, find_predictors, find_wrappers),
    *(find_names, find_unserved, find_shapes, find_ties, find_missing_states, find_ranks, find_groups),
    *(compare_with_checkpoint, find_unlisted, find_inconsistencies),
)

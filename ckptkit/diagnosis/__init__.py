"""List the kinds of findings of a checkpoint that is to be loaded. Each is one file and one line."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ckptkit.diagnosis.adapters import find_adapters
from ckptkit.diagnosis.case import Case
from ckptkit.diagnosis.extra_state import find_extra_state
from ckptkit.diagnosis.finding import Finding
from ckptkit.diagnosis.groups import find_groups
from ckptkit.diagnosis.likeness import find_unlike
from ckptkit.diagnosis.names import find_names
from ckptkit.diagnosis.optimizer_states import find_missing_states
from ckptkit.diagnosis.quantized import find_quantized
from ckptkit.diagnosis.ranks import find_ranks
from ckptkit.diagnosis.shapes import find_shapes
from ckptkit.diagnosis.ties import find_ties
from ckptkit.diagnosis.torch_version import find_torch_version
from ckptkit.diagnosis.weights import find_model
from ckptkit.diagnosis.wrappers import find_wrappers

Kind = Callable[[Case], Iterator[Finding]]

# of a checkpoint that can be read, in the order in which they are said
KINDS: tuple[Kind, ...] = (
    *(find_torch_version, find_model, find_adapters, find_quantized, find_extra_state),
    *(find_wrappers, find_names, find_shapes, find_ties),
    *(find_missing_states, find_ranks, find_groups, find_unlike),
)

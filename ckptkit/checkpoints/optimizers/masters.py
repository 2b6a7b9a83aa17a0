"""Find the fp32 master weights among an optimizer's states: full copies, or remainders that complete the weights.

Sources: `fp32_param` and `param` are Megatron's (megatron/core/optimizer/distrib_optimizer.py,
`sharded_param_state_fs_model_space` and `_fully_reshardable`), `master_param` is TransformerEngine's
(transformer_engine/pytorch/optimizers/fused_adam.py). With `store_param_remainders` its dtype is int16: the bits of a
float32 master that a bfloat16 weight lacks. The format `fully_reshardable` stores these integers as float32
(Megatron-LM#4222).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress

from ckptkit.errors import Mismatch, Unsupported
from ckptkit.layout import Layout, Spec
from ckptkit.layout.dtypes import DTYPES
from ckptkit.models.names.training import find_parameter_entry, format_state_kind

REMAINDERS, COMPLETED = DTYPES["int16"], DTYPES["bfloat16"]  # the optimizer's state, and the weight that it completes
_MASTER_STATES = ("fp32_param", "param", "master_param")
_LISTS = "fp32_groups"  # a list of masters for each parameter group, without the names of the parameters


def find_masters(layout: Layout, weights: Mapping[str, Spec]) -> dict[str, str]:
    """Return the entry with the master of each weight that has one: weight name -> entry name.

    Raises `Mismatch` for a master whose shape differs from its weight's, or whose dtype no master has.
    """
    masters = {}
    for name, parameter in master_entries_and_weights(layout, weights):
        spec, weight = layout.tensors[name].spec, weights[parameter]
        fits = spec.dtype.is_castable_to(DTYPES["float32"]) or (spec.dtype, weight.dtype) == (REMAINDERS, COMPLETED)
        if spec.shape != weight.shape or not fits:
            expected = f"expected an fp32 master for the weight `{parameter}` ({weight})"
            hint = "check that the model and the optimizer come from the same save"
            raise Mismatch(f"{expected}, found {spec}", path=layout.path, tensor=name, hint=hint)
        masters[parameter] = name
    return masters


def master_entries_and_weights(layout: Layout, weights: Mapping[str, Spec]) -> Iterator[tuple[str, str]]:
    """Yield (entry, weight) of each state that is named like a master weight."""
    own = set(weights)
    for name in layout.tensors:
        with suppress(Unsupported):  # an optimizer with indices instead of names
            located = find_parameter_entry(layout.key(name), own)
            if located and format_state_kind(located[0]).rpartition(".")[2] in _MASTER_STATES:
                yield name, located[1]


def unnamed_masters_in(layout: Layout) -> list[str]:
    """Return the master weights of optimizers that do not name their parameters."""
    return [name for name in layout.tensors if _LISTS in layout.key(name)]


def remainders_in(layout: Layout, weights: Mapping[str, Spec]) -> list[str]:
    """Return the entries with the low bits that complete the weights to their masters."""
    return [
        name for name, _ in master_entries_and_weights(layout, weights) if layout.tensors[name].spec.dtype == REMAINDERS
    ]

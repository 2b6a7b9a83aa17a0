"""Compare Megatron-FSDP's map from parameter to group with the optimizer states of the same optimizer.

Source: `_param2group_meta_to_param_groups` in megatron/core/optimizer/distrib_optimizer.py of core 0.20, which looks up
every parameter of the job in `param_to_group_meta`.
"""

from __future__ import annotations

from collections.abc import Iterator

from ckptkit.diagnosis.case import LoadTarget
from ckptkit.diagnosis.finding import Finding
from ckptkit.layout import KeyPath, Layout
from ckptkit.models.names.group_map import GROUP_MAP, normalized_parameter_name

_STATE = "state"


def find_unlisted_parameters(target: LoadTarget) -> Iterator[Finding]:
    """Yield the parameters that have a state but are not in the map of groups, and the reverse."""
    for above, listed in parameters_under(target.layout, GROUP_MAP).items():
        known = parameters_under(target.layout, _STATE).get(above, {})
        for parameter in known.keys() - listed.keys():
            message = (
                f"the optimizer has a state for this parameter, but `{GROUP_MAP}` does not list it: its load fails"
            )
            yield Finding("group_map", ".".join(map(str, (*above, _STATE, known[parameter]))), message)
        for parameter in listed.keys() - known.keys():
            message = f"`{GROUP_MAP}` lists this parameter, but the optimizer has no state for it: its load fails"
            yield Finding("group_map", ".".join(map(str, (*above, GROUP_MAP, listed[parameter]))), message)


def parameters_under(layout: Layout, key_step: str) -> dict[KeyPath, dict[str, str]]:
    """Return for each optimizer (its key path) the parameters below `key_step`: the checkpoint's name by parameter."""
    by_optimizer: dict[KeyPath, dict[str, str]] = {}
    for name in layout.names:
        match layout.key(name):
            case (*above, here, str(parameter), _) if here == key_step:
                by_optimizer.setdefault(tuple(above), {})[normalized_parameter_name(parameter)] = parameter
    return by_optimizer

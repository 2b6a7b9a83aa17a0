"""Read the optimizer partition of one rank: the flat buffers of ZeRO 1, 2 and 3 and of BF16_Optimizer, as one record.

Source: `state_dict` in deepspeed/runtime/zero/stage_1_and_2.py, deepspeed/runtime/bf16_optimizer.py and
`_rigid_state_dict` in deepspeed/runtime/zero/stage3.py. The parameter indices of the optimizer are group indices, or
sub-group indices in ZeRO 3. `param_slice_mappings` is not used: with `round_robin_gradients` its order differs from the
order of the data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckptkit.errors import Corrupt, Unsupported, errors_at
from ckptkit.formats.archives.flatten import Flattening
from ckptkit.formats.archives.state_files import StateFile
from ckptkit.formats.pickles.tensor_calls import is_tensor
from ckptkit.layout import Chunk
from ckptkit.plugins.deepspeed.values import (
    dict_or_empty,
    require_count,
    require_counts,
    require_dict,
    require_each,
    require_type,
)

_FLAT = "single_partition_of_fp32_groups"  # ZeRO 1 and 2
_FLAT_3 = "fp32_flat_groups"
_MOST_ENTRIES = 64  # limit per group, because every parameter of the group gets a copy of each entry
_USED = frozenset(
    [
        *("base_optimizer_state", "optimizer_state_dict", "param_slice_mappings", _FLAT, _FLAT_3),
        *("group_paddings", "param_alignment_paddings", "partition_count", "ds_version"),
    ]
)


@dataclass(frozen=True, slots=True)
class PartitionedGroup:
    """The shard of a parameter group on one rank: flat buffers with the master weights and with each optimizer state.

    `values` are state entries that are not buffers, such as the step. `paddings` are the padding elements behind each
    parameter. `settings` is the index of the parameter group with the hyperparameters.
    """

    flattening: Flattening
    masters: Chunk
    moments: Mapping[str, Chunk]
    values: Mapping[str, Any]
    ranks: int
    settings: int
    paddings: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Partition:
    """The optimizer of one rank, in file `path`: groups, hyperparameters, and all other saved entries.

    `cuts_each` is true if every parameter is partitioned separately, as in ZeRO 3.
    """

    path: str
    flattening: Flattening
    groups: tuple[PartitionedGroup, ...]
    settings: tuple[Mapping[str | int, Any], ...]
    others: Mapping[str | int, Any]
    cuts_each: bool


def read_partition(file: StateFile) -> Partition:
    """Return the partition in a file. The caller adds the path to the errors."""
    flattening = Flattening(file.entries, file.name)
    saved = require_dict(require_dict(file.value, file.name).get("optimizer_state_dict"), "optimizer_state_dict")
    if saved.get("ds_zero_partition_groups"):
        raise Unsupported("AutoEP partitioned the experts among ranks of their own")
    cuts_each = _FLAT_3 in saved
    if not cuts_each and _FLAT not in saved:
        raise Unsupported(f"expected a ZeRO partition with `{_FLAT}` or `{_FLAT_3}`, found neither")
    base = saved.get("optimizer_state_dict" if cuts_each else "base_optimizer_state")
    if isinstance(base, list):
        hint = "save with `elastic_checkpoint: false`, the default"
        raise Unsupported("this is an elastic ZeRO checkpoint", hint=hint)
    optimizer = require_dict(base, "base_optimizer_state")
    settings = require_each(optimizer.get("param_groups"), require_dict, "param_groups")
    masters = require_type(saved[_FLAT_3 if cuts_each else _FLAT], list, _FLAT_3 if cuts_each else _FLAT)
    states, count = dict_or_empty(optimizer.get("state"), "state"), len(masters)
    # for each group or sub-group the index of the parameter group that lists it
    lists = [require_counts(group.get("params"), "params") for group in settings]
    listed = sorted(number for numbers in lists for number in numbers)
    if listed != list(range(count)):
        raise Corrupt(f"expected numbers 0 to {count - 1} in the parameter groups, each once; found {listed[:8]}")
    group_of = {number: i for i, numbers in enumerate(lists) for number in numbers}
    ranks, paddings = saved.get("partition_count"), saved.get("param_alignment_paddings")
    ranks = ranks if isinstance(ranks, list) else [ranks] * count  # one number stands for all groups
    counts = require_each(ranks, require_count, "partition_count", groups=count)
    paddings = [[]] * count if paddings is None else paddings
    gaps = require_each(paddings, require_counts, "param_alignment_paddings", groups=count)
    groups = tuple(
        read_group_shard(flattening, masters[i], states.get(i), counts[i], group_of[i], gaps[i]) for i in range(count)
    )
    others = {key: value for key, value in saved.items() if key not in _USED}
    return Partition(file.name, flattening, groups, tuple(settings), others, cuts_each)


def read_group_shard(
    flattening: Flattening, masters: Any, state: Any, rank_count: int, settings: int, paddings: tuple[int, ...]
) -> PartitionedGroup:
    """Return the shard of a group on one rank; `rank_count` ranks share the group."""
    moments: dict[str, Chunk] = {}
    values: dict[str, Any] = {}
    entries = dict_or_empty(state, "state")
    if len(entries) > _MOST_ENTRIES:
        raise Unsupported(f"expected at most {_MOST_ENTRIES} states for each parameter, found {len(entries)}")
    for key, value in entries.items():
        name = require_type(key, str, "state")
        if is_tensor(value) and (buffer := find_flat_buffer(flattening, value, name)) is not None:
            moments[name] = buffer
        else:
            values[name] = value
    flat = find_flat_buffer(flattening, masters, "fp32") if is_tensor(masters) else None
    if flat is None:
        raise Corrupt("the fp32 parameters of a group are not a one-dimensional tensor")
    return PartitionedGroup(flattening, flat, moments, values, rank_count, settings, paddings)


def find_flat_buffer(flattening: Flattening, value: Any, name: str) -> Chunk | None:
    """Return the chunk of a one-dimensional tensor; None for a scalar. Raises `Unsupported` for other shapes."""
    with errors_at(tensor=name):
        (chunk,) = flattening.make_stored_tensor(value).chunks
    if len(chunk.box.size) > 1 or chunk.strides is not None:
        raise Unsupported(f"expected one flat buffer as `{name}` of a group, found shape {list(chunk.box.size)}")
    return chunk if chunk.box.size else None

"""Read a rank's partition of the optimizer: flat buffers of ZeRO 1, 2 and 3 and of BF16_Optimizer, all as one record.

Source: `state_dict` in deepspeed/runtime/zero/stage_1_and_2.py, deepspeed/runtime/bf16_optimizer.py and
`_rigid_state_dict` in deepspeed/runtime/zero/stage3.py. Its parameters are the numbers of groups, or in ZeRO 3 of
sub-groups. `param_slice_mappings` is not used: with `round_robin_gradients` it lists another order than that of the
data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckptkit.errors import CkptError, Corrupt, Unsupported
from ckptkit.formats.archives.flatten import Flattening
from ckptkit.formats.archives.state_files import StateFile
from ckptkit.formats.pickles.tensor_calls import is_tensor
from ckptkit.layout import Chunk
from ckptkit.plugins.deepspeed.values import as_count, as_dict, as_kind, dict_or_none

_FLAT = "single_partition_of_fp32_groups"  # ZeRO 1 and 2
_FLAT_3 = "fp32_flat_groups"
_MOST_ENTRIES = 64  # of the state of a group; each is given by the name of each parameter
_USED = frozenset(
    [
        *("base_optimizer_state", "optimizer_state_dict", "param_slice_mappings", _FLAT, _FLAT_3),
        *("group_paddings", "param_alignment_paddings", "partition_count", "ds_version"),
    ]
)


@dataclass(frozen=True, slots=True)
class PartitionedGroup:
    """The part that a rank has of a group of parameters: buffers of one axis with the masters and with each moment.

    `values` are entries of the state that are no buffer, such as the step, `paddings` the elements that lie between
    parameters, one for each. `settings` is the number of the parameter group with the hyperparameters.
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
    """The optimizer of one rank, in file `path`: its groups, the hyperparameters, and all else that was saved.

    `cuts_each` if each parameter is cut by itself, as ZeRO 3 does.
    """

    path: str
    flattening: Flattening
    groups: tuple[PartitionedGroup, ...]
    settings: tuple[Mapping[str | int, Any], ...]
    others: Mapping[str | int, Any]
    cuts_each: bool


def read_partition(file: StateFile) -> Partition:
    """Return the partition in a file. Every error is to be blamed on it."""
    flattening = Flattening(file.entries, file.name)
    saved = as_dict(as_dict(file.value, file.name).get("optimizer_state_dict"), "optimizer_state_dict")
    if saved.get("ds_zero_partition_groups"):
        raise Unsupported("AutoEP partitioned the experts among ranks of their own")
    cuts_each = _FLAT_3 in saved
    if not cuts_each and _FLAT not in saved:
        raise Unsupported(f"expected a ZeRO partition with `{_FLAT}` or `{_FLAT_3}`, found neither")
    base = saved.get("optimizer_state_dict" if cuts_each else "base_optimizer_state")
    if isinstance(base, list):
        raise Unsupported(
            "this is an elastic ZeRO checkpoint", hint="save with `elastic_checkpoint: false`, the default"
        )
    optimizer = as_dict(base, "base_optimizer_state")
    settings = [
        as_dict(group, "param_groups") for group in as_kind(optimizer.get("param_groups"), list, "param_groups")
    ]
    masters = as_kind(saved[_FLAT_3 if cuts_each else _FLAT], list, _FLAT_3 if cuts_each else _FLAT)
    states = dict_or_none(optimizer.get("state"), "state")
    numbers = numbers_of(settings, len(masters))
    counts = counts_of(saved.get("partition_count"), len(masters))
    paddings = paddings_of(saved.get("param_alignment_paddings"), len(masters))
    groups = tuple(
        read_group(flattening, masters[i], states.get(i), counts[i], numbers[i], paddings[i])
        for i in range(len(masters))
    )
    others = {key: value for key, value in saved.items() if key not in _USED}
    return Partition(file.name, flattening, groups, tuple(settings), others, cuts_each)


def read_group(
    flattening: Flattening, masters: Any, state: Any, ranks: int, settings: int, paddings: tuple[int, ...]
) -> PartitionedGroup:
    """Return what a rank has of a group, of which `ranks` have a part each."""
    moments: dict[str, Chunk] = {}
    values: dict[str, Any] = {}
    entries = dict_or_none(state, "state")
    if len(entries) > _MOST_ENTRIES:
        raise Unsupported(f"expected at most {_MOST_ENTRIES} states for each parameter, found {len(entries)}")
    for key, value in entries.items():
        name = as_kind(key, str, "state")
        if is_tensor(value) and (found := buffer_of(flattening, value, name)) is not None:
            moments[name] = found
        else:
            values[name] = value
    flat = buffer_of(flattening, masters, "fp32") if is_tensor(masters) else None
    if flat is None:
        raise Corrupt("the fp32 parameters of a group are not a one-dimensional tensor")
    return PartitionedGroup(flattening, flat, moments, values, ranks, settings, paddings)


def buffer_of(flattening: Flattening, value: Any, name: str) -> Chunk | None:
    """Return where a tensor of one axis lies, None for one of no axis. Raises `Unsupported` for any other."""
    try:
        (chunk,) = flattening.stored(value).chunks
    except CkptError as error:
        raise error.blame(tensor=name) from None
    if len(chunk.box.size) > 1 or chunk.strides is not None:
        raise Unsupported(f"expected one flat buffer as `{name}` of a group, found shape {list(chunk.box.size)}")
    return chunk if chunk.box.size else None


def numbers_of(settings: list[dict[str | int, Any]], count: int) -> list[int]:
    """Return by group, or sub-group, the number of the parameter group that lists it."""
    lists = [as_kind(group.get("params"), list, "params") for group in settings]
    listed = sorted(as_count(number, "params") for numbers in lists for number in numbers)
    if listed != list(range(count)):
        raise Corrupt(f"expected {count} buffers, found {listed[:8]} in the parameter groups")
    found = {number: i for i, numbers in enumerate(lists) for number in numbers}
    return [found[number] for number in range(count)]


def counts_of(value: Any, count: int) -> list[int]:
    """Return by group how many ranks have a part of it: a list, or one number for all."""
    values = value if isinstance(value, list) else [value] * count
    if len(values) != count:
        raise Corrupt(f"`partition_count`: expected {count} groups, found {len(values)}")
    return [as_count(one, "partition_count") for one in values]


def paddings_of(value: Any, count: int) -> list[tuple[int, ...]]:
    """Return by group the elements of padding behind each parameter; none where none are recorded."""
    if value is None:
        return [()] * count
    lists = as_kind(value, list, "param_alignment_paddings")
    if len(lists) != count:
        raise Corrupt(f"`param_alignment_paddings`: expected {count} groups, found {len(lists)}")
    return [
        tuple(as_count(one, "param_alignment_paddings") for one in as_kind(group, list, "param_alignment_paddings"))
        for group in lists
    ]

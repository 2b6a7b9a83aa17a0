"""Read all files of a model part, and the optimizer partition in the file of a rank.

A partition has the flat buffers of ZeRO 1, 2 and 3 and of BF16_Optimizer. If the file of a rank cannot be read, its
partition is replaced by one of the same size with unreadable chunks.

Source: `state_dict` in deepspeed/runtime/zero/stage_1_and_2.py, deepspeed/runtime/bf16_optimizer.py and
`_rigid_state_dict` in deepspeed/runtime/zero/stage3.py. The parameter indices of the optimizer are group indices, or
sub-group indices in ZeRO 3. `param_slice_mappings` is not used: with `round_robin_gradients` its order differs from the
order of the data. stage_1_and_2.py pads the flat buffer of a group to a multiple of twice the number of ranks and
splits it evenly; the last rank saves its shard without the padding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

from ckptkit.errors import Corrupt, Incomplete, Report, Unsupported, errors_at, raise_problem
from ckptkit.formats.archives.flatten import Flattening
from ckptkit.formats.archives.torch_save import StateFile, read_state_file
from ckptkit.formats.pickles.tensor_calls import is_pickled_tensor
from ckptkit.formats.rank_names import read_each_file
from ckptkit.layout import Chunk
from ckptkit.layout.box import Shape, full_box
from ckptkit.plugins.deepspeed.file_names import (
    DeepSpeedFiles,
    expected_file_name_of_rank,
    files_of_part,
    report_missing_ranks,
)
from ckptkit.plugins.deepspeed.model_states import ModelStates, read_model_states
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
    flattening: Flattening, masters: Any, state: Any, rank_count: int, settings_index: int, paddings: tuple[int, ...]
) -> PartitionedGroup:
    """Return the shard of a group on one rank; `rank_count` ranks share the group."""
    moments: dict[str, Chunk] = {}
    values: dict[str, Any] = {}
    entries = dict_or_empty(state, "state")
    if len(entries) > _MOST_ENTRIES:
        raise Unsupported(f"expected at most {_MOST_ENTRIES} states for each parameter, found {len(entries)}")
    for key, value in entries.items():
        name = require_type(key, str, "state")
        if is_pickled_tensor(value) and (buffer := find_flat_buffer(flattening, value, name)) is not None:
            moments[name] = buffer
        else:
            values[name] = value
    flat = find_flat_buffer(flattening, masters, "fp32") if is_pickled_tensor(masters) else None
    if flat is None:
        raise Corrupt("the fp32 parameters of a group are not a one-dimensional tensor")
    return PartitionedGroup(flattening, flat, moments, values, rank_count, settings_index, paddings)


def find_flat_buffer(flattening: Flattening, value: Any, name: str) -> Chunk | None:
    """Return the chunk of a one-dimensional tensor; None for a scalar. Raises `Unsupported` for other shapes."""
    with errors_at(tensor=name):
        (chunk,) = flattening.make_stored_tensor(value).chunks
    if len(chunk.box.size) > 1 or chunk.strides is not None:
        raise Unsupported(f"expected one flat buffer as `{name}` of a group, found shape {list(chunk.box.size)}")
    return chunk if chunk.box.size else None


_ALIGNMENT = 2  # elements, times the number of ranks


@dataclass(frozen=True, slots=True)
class PartOfModel:
    """A saved part of the model: the full model, or one pipeline stage.

    `models` has one entry per rank, or a single entry that all ranks share; `partitions` has one entry per rank, or
    none without ZeRO. `lost_models` are the missing or unreadable model-states files, by rank.
    """

    models: tuple[ModelStates, ...]
    partitions: tuple[Partition, ...]
    lost_models: Mapping[int, str] = field(default_factory=dict)


def read_model_part(root: Path, files: DeepSpeedFiles, part: int, report: Report = raise_problem) -> PartOfModel:
    """Return the saved states of a model part; report files that are missing or cannot be read."""
    models, optimizers = files_of_part(files.models, part), files_of_part(files.optimizers, part)
    if not models:
        raise Incomplete("the file of its model states is missing", path=root / next(iter(optimizers.values())))
    if -1 in models and len(models) > 1:
        other = next(name for rank, name in models.items() if rank >= 0)
        message = f"`{models[-1]}` is from ZeRO 1 or 2, this file from ZeRO 3: this directory mixes files of two runs"
        raise Corrupt(message, path=root / other, hint="keep the files of one run")
    read = read_each_file(
        root, models, lambda _, name: read_model_states(read_state_file(root, name)), report, needs_one=True
    )
    partitions = read_each_file(
        root,
        optimizers,
        lambda _, name: read_partition(read_state_file(root, name)),
        report,
        needs_one=bool(optimizers),
    )
    first = next(iter(read.values()))
    if not optimizers and -1 not in models:
        message = "ZeRO 3 keeps the weights in `*_optim_states.pt`, and these files are missing"
        raise Unsupported(message, path=root / first.path, hint="copy all files of all ranks to one directory")
    if not optimizers and first.shapes is not None:
        message = "the `*_optim_states.pt` files with the fp32 parameters and the optimizer are missing"
        raise Incomplete(message, path=root / first.path, hint="pass this file itself to read its 16-bit weights")
    for states in read.values():
        expected, found = (one.saved.get("global_steps") for one in (first, states))
        if expected != found:
            mixed = "this directory mixes files of several saves"
            message = f"expected global_steps {expected} as in `{first.path}`, found {found}: {mixed}"
            raise Corrupt(message, path=root / states.path, hint="keep the files of one save")
    count = len(models)
    if partitions:
        known = next(iter(partitions.values()))
        count = max((group.ranks for group in known.groups), default=len(optimizers))
        report_missing_ranks(optimizers, count, root, known.path, report)
        if -1 not in models:
            report_missing_ranks(models, count, root, known.path, report)
        shapes = first.shapes or ()
        partitions = {
            rank: partitions.get(rank)
            or make_unreadable_partition(partitions, rank, expected_file_name_of_rank(optimizers, rank), count, shapes)
            for rank in range(count)
        }
    lost_models = {
        rank: expected_file_name_of_rank(models, rank) for rank in range(count) if -1 not in models and rank not in read
    }
    return PartOfModel(tuple(read.values()), tuple(partitions.values()), lost_models)


def make_unreadable_partition(
    partitions: Mapping[int, Partition],
    rank: int,
    file_name: str,
    rank_count: int,
    shapes: Sequence[Mapping[str, Shape]],
) -> Partition:
    """Return the partition of a rank with unreadable chunks of the sizes that it had.

    `partitions` are those of the other `rank_count` ranks, `shapes` the parameter shapes of each group. Raises
    `Unsupported` if the sizes of the other partitions do not fit together.
    """
    like = next(iter(partitions.values()))
    if len(shapes) != len(like.groups):
        raise Unsupported(f"expected {len(shapes)} groups of parameters (`param_shapes`), found {len(like.groups)}")
    groups = []
    for number, group in enumerate(like.groups):
        sizes = {of_rank: partition.groups[number].masters.box.numel for of_rank, partition in partitions.items()}
        size = sizes[min(sizes)] if like.cuts_each else elements_on_rank(sizes, rank, rank_count, shapes[number], group)
        masters, *moments = (
            Chunk.unreadable(full_box((size,)), file_name, chunk.dtype)
            for chunk in (group.masters, *group.moments.values())
        )
        groups.append(replace(group, masters=masters, moments=dict(zip(group.moments, moments, strict=True))))
    return replace(like, path=file_name, groups=tuple(groups))


def elements_on_rank(
    numel_by_rank: Mapping[int, int], rank: int, rank_count: int, shapes: Mapping[str, Shape], group: PartitionedGroup
) -> int:
    """Return how many elements of the flat buffer of a group this rank has."""
    total = sum(map(prod, shapes.values())) + sum(group.paddings[:-1])
    last = rank_count - 1
    size = next(
        (numel for of_rank, numel in numel_by_rank.items() if of_rank != last),
        -(-total // (_ALIGNMENT * rank_count)) * _ALIGNMENT,
    )
    last_size = total - last * size
    fits = all(numel == size for of_rank, numel in numel_by_rank.items() if of_rank != last)
    if (
        last_size < 0
        or not fits
        or not last_size <= numel_by_rank.get(last, last_size) < last_size + _ALIGNMENT * rank_count
    ):
        parts = ", ".join(map(str, sorted(numel_by_rank.values())))
        raise Unsupported(f"ranks have {parts} of {total} elements, and no file says how many the other ranks had")
    return last_size if rank == last else size

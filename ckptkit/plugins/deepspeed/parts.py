"""Read all files of a model part, and check that no file is missing and all come from the same run.

If the file of a rank cannot be read, its partition is replaced by one of the same size with unreadable chunks. Source:
deepspeed/runtime/zero/stage_1_and_2.py: the flat buffer of a group is padded to a multiple of twice the number of ranks
and split evenly; the last rank saves its shard without the padding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path

from ckptkit.errors import Corrupt, Incomplete, Report, Unsupported, raise_problem
from ckptkit.formats.archives.state_files import read_state_file
from ckptkit.formats.rank_names import read_each_file
from ckptkit.layout import Chunk
from ckptkit.layout.box import Shape, full_box
from ckptkit.plugins.deepspeed.model_states import ModelStates, read_model_states
from ckptkit.plugins.deepspeed.names import DeepSpeedFiles, file_name_of_rank, files_of_part, report_missing_ranks
from ckptkit.plugins.deepspeed.partitions import Partition, PartitionedGroup, read_partition

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
            or lost_partition(partitions, rank, file_name_of_rank(optimizers, rank), count, shapes)
            for rank in range(count)
        }
    lost_models = {
        rank: file_name_of_rank(models, rank) for rank in range(count) if -1 not in models and rank not in read
    }
    return PartOfModel(tuple(read.values()), tuple(partitions.values()), lost_models)


def lost_partition(
    partitions: Mapping[int, Partition], rank: int, name: str, count: int, shapes: Sequence[Mapping[str, Shape]]
) -> Partition:
    """Return the partition of a rank with unreadable chunks of the sizes that it had.

    `partitions` are those of the other `count` ranks, `shapes` the parameter shapes of each group. Raises `Unsupported`
    if the sizes of the other partitions do not fit together.
    """
    like = next(iter(partitions.values()))
    if len(shapes) != len(like.groups):
        raise Unsupported(f"expected {len(shapes)} groups of parameters (`param_shapes`), found {len(like.groups)}")
    groups = []
    for number, group in enumerate(like.groups):
        sizes = {of_rank: partition.groups[number].masters.box.numel for of_rank, partition in partitions.items()}
        size = sizes[min(sizes)] if like.cuts_each else elements_on_rank(sizes, rank, count, shapes[number], group)
        masters, *moments = (
            Chunk.unreadable(full_box((size,)), name, chunk.dtype) for chunk in (group.masters, *group.moments.values())
        )
        groups.append(replace(group, masters=masters, moments=dict(zip(group.moments, moments, strict=True))))
    return replace(like, path=name, groups=tuple(groups))


def elements_on_rank(
    known: Mapping[int, int], rank: int, count: int, named: Mapping[str, Shape], group: PartitionedGroup
) -> int:
    """Return how many elements of the flat buffer of a group this rank has."""
    total = sum(map(prod, named.values())) + sum(group.paddings[:-1])
    last = count - 1
    size = next(
        (numel for of_rank, numel in known.items() if of_rank != last), -(-total // (_ALIGNMENT * count)) * _ALIGNMENT
    )
    last_size = total - last * size
    fits = all(numel == size for of_rank, numel in known.items() if of_rank != last)
    if last_size < 0 or not fits or not last_size <= known.get(last, last_size) < last_size + _ALIGNMENT * count:
        parts = ", ".join(map(str, sorted(known.values())))
        raise Unsupported(f"ranks have {parts} of {total} elements, and no file says how many the other ranks had")
    return last_size if rank == last else size

"""Read all files of a part of the model, and see that the file of no rank is missing or of another run.

The partition of a rank whose file cannot be read is replaced by one as large, which lies nowhere. Source:
deepspeed/runtime/zero/stage_1_and_2.py: a row is padded to a multiple of twice the number of ranks, who cut it in equal
parts, and the last rank saves its part without the padding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import NoReturn, TypeVar

from ckptkit.errors import CkptError, Corrupt, Incomplete, Report, Unsupported, refuse
from ckptkit.formats.archives.state_files import StateFile, read_state_file
from ckptkit.layout import Chunk
from ckptkit.layout.box import Shape, whole
from ckptkit.plugins.deepspeed.model_states import ModelStates, read_model_states
from ckptkit.plugins.deepspeed.names import DeepSpeedFiles, check_ranks, name_of
from ckptkit.plugins.deepspeed.partitions import Partition, PartitionedGroup, read_partition

Found = TypeVar("Found")
_ALIGNMENT = 2  # elements, times the number of ranks


@dataclass(frozen=True, slots=True)
class PartOfModel:
    """A part of the model as it was saved: all of it, or a stage of a pipeline.

    Each rank has one of `models`, or all have the same one; and one of the `partitions`, unless ZeRO was off.
    `lost_models` are the files of model states that are missing or could not be read, by rank.
    """

    models: tuple[ModelStates, ...]
    partitions: tuple[Partition, ...]
    lost_models: Mapping[int, str] = field(default_factory=dict)


def read_part(root: Path, files: DeepSpeedFiles, part: int, report: Report = refuse) -> PartOfModel:
    """Return what the ranks have saved of a part of the model; report files that are missing or cannot be read."""
    models, optimizers = files.model_files(part), files.optimizer_files(part)
    if not models:
        raise Incomplete("the file of its model states is missing", path=root / next(iter(optimizers.values())))
    if -1 in models and len(models) > 1:
        other = next(name for rank, name in models.items() if rank >= 0)
        message = f"`{models[-1]}` is from ZeRO 1 or 2, this file from ZeRO 3: this directory mixes files of two runs"
        raise Corrupt(message, path=root / other, hint="keep the files of one run")
    read = read_all(root, models, read_model_states, report)
    first = next(iter(read.values()))
    if not optimizers and (-1 not in models or first.shapes is not None):
        no_partitions(root / next(iter(models.values())), is_sharded=-1 not in models)
    partitions = read_all(root, optimizers, read_partition, report)
    count = len(models)
    if partitions:
        known = next(iter(partitions.values()))
        count = max((group.ranks for group in known.groups), default=len(optimizers))
        check_ranks(optimizers, count, root, known.path, report)
        if -1 not in models:
            check_ranks(models, count, root, known.path, report)
        if len(partitions) < count:
            partitions = with_lost(partitions, optimizers, count, first.shapes or ())
    lost = [] if -1 in models else [rank for rank in range(count) if rank not in read]
    return PartOfModel(tuple(read.values()), tuple(partitions.values()), {rank: name_of(models, rank) for rank in lost})


def read_all(root: Path, names: dict[int, str], read: Callable[[StateFile], Found], report: Report) -> dict[int, Found]:
    """Return what `read` makes of the files of ranks, but for those that cannot be read, which are reported.

    Raises the last error if that is none.
    """
    found: dict[int, Found] = {}
    for rank, name in names.items():
        try:
            found[rank] = blame(root, name, read)
        except CkptError as error:
            if not found and rank == max(names):
                raise
            report(error)
    return found


def blame(root: Path, name: str, read: Callable[[StateFile], Found]) -> Found:
    """Return what `read` makes of a file; its errors name the file."""
    try:
        return read(read_state_file(root, name))
    except CkptError as error:
        raise error.blame(path=root / name) from None


def no_partitions(path: Path, *, is_sharded: bool) -> NoReturn:
    """Raise the error for model states without the files in which ZeRO keeps the optimizer."""
    if is_sharded:
        message = "ZeRO 3 keeps the weights in `*_optim_states.pt`, and these files are missing"
        raise Unsupported(message, path=path, hint="copy all files of all ranks to one directory")
    message = "the `*_optim_states.pt` files with the fp32 parameters and the optimizer are missing"
    raise Incomplete(message, path=path, hint="pass this file itself to read its 16-bit weights")
    raise Corrupt(message, path=path, hint="pass this file itself to read its 16-bit weights")


def with_lost(
    partitions: Mapping[int, Partition], names: dict[int, str], count: int, shapes: Sequence[Mapping[str, Shape]]
) -> dict[int, Partition]:
    """Return the partitions of all of `count` ranks: of those that are not among `partitions` the chunks lie nowhere.

    `names` are those of the files that are there, `shapes` those of each group of parameters. Raises `Unsupported` if
    the sizes of what is here do not fit together.
    """
    return {
        rank: partitions[rank] if rank in partitions else lost(partitions, rank, name_of(names, rank), count, shapes)
        for rank in range(count)
    }


def lost(
    partitions: Mapping[int, Partition], rank: int, name: str, count: int, shapes: Sequence[Mapping[str, Shape]]
) -> Partition:
    """Return the partition that a rank must have had."""
    like = next(iter(partitions.values()))
    if len(shapes) != len(like.groups):
        raise Unsupported(f"expected {len(shapes)} groups of parameters (`param_shapes`), found {len(like.groups)}")
    groups = []
    for number, group in enumerate(like.groups):
        known = {of: one.groups[number].masters.box.numel for of, one in partitions.items()}
        size = known[min(known)] if like.cuts_each else size_in_row(known, rank, count, shapes[number], group)
        moments = {what: Chunk.unreadable(whole((size,)), name, chunk.dtype) for what, chunk in group.moments.items()}
        masters = Chunk.unreadable(whole((size,)), name, group.masters.dtype)
        groups.append(replace(group, masters=masters, moments=moments))
    return replace(like, path=name, groups=tuple(groups))


def size_in_row(
    known: Mapping[int, int], rank: int, count: int, named: Mapping[str, Shape], group: PartitionedGroup
) -> int:
    """Return how many elements a rank has of the row that the parameters of a group are."""
    total = sum(map(prod, named.values())) + sum(group.paddings[:-1])
    last = count - 1
    size = next((numel for one, numel in known.items() if one != last), -(-total // (_ALIGNMENT * count)) * _ALIGNMENT)
    rest = total - last * size
    fits = all(numel == size for one, numel in known.items() if one != last)
    if rest < 0 or not fits or not rest <= known.get(last, rest) < rest + _ALIGNMENT * count:
        parts = ", ".join(map(str, sorted(known.values())))
        raise Unsupported(f"ranks have {parts} of {total} elements, and no file says how many the other ranks had")
    return rest if rank == last else size

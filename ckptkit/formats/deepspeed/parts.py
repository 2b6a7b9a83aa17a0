"""Read all files of a part of the model, and see that the file of no rank is missing or of another run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeVar

from ckptkit.errors import CkptError, Corrupt, Report, Unsupported, refuse
from ckptkit.formats.archives.state_files import StateFile, read_state_file
from ckptkit.formats.deepspeed.lost import with_lost
from ckptkit.formats.deepspeed.model_states import ModelStates, read_model_states
from ckptkit.formats.deepspeed.names import DeepSpeedFiles, check_ranks
from ckptkit.formats.deepspeed.partitions import Partition, read_partition

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class PartOfModel:
    """A part of the model as it was saved: all of it, or a stage of a pipeline.

    Each rank has one of `models`, or all have the same one; and one of the `partitions`, unless ZeRO was off. With
    `lacks_models` not all ranks' could be read.
    """

    models: tuple[ModelStates, ...]
    partitions: tuple[Partition, ...]
    lacks_models: bool = False


def read_part(root: Path, files: DeepSpeedFiles, part: int, report: Report = refuse) -> PartOfModel:
    """Return what the ranks have saved of a part of the model; report files that are missing or cannot be read."""
    models, optimizers = files.model_files(part), files.optimizer_files(part)
    if not models:
        raise Corrupt("its file of model states is missing", path=root / next(iter(optimizers.values())))
    if -1 in models and len(models) > 1:
        other = next(name for rank, name in models.items() if rank >= 0)
        message = f"`{models[-1]}` is of ZeRO 1 or 2, this is of ZeRO 3: files of two runs lie here"
        raise Corrupt(message, path=root / other, hint="keep those of one run")
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
    lacks_models = -1 not in models and len(read) < count
    return PartOfModel(tuple(read.values()), tuple(partitions.values()), lacks_models)


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
        message = (
            "of ZeRO 3, the tensors of the model are empty here: their data is in `*_optim_states.pt`, and none is here"
        )
        raise Unsupported(message, path=path, hint="all files of all ranks belong in one directory")
    message = "the `*_optim_states.pt` beside it are missing: they have the fp32 parameters and the optimizer"
    raise Corrupt(message, path=path, hint="name this file itself to read the 16-bit weights in it")

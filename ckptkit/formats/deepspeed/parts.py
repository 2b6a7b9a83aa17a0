"""Read all files of a part of the model, and see that the file of no rank is missing or of another run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeVar

from ckptkit.errors import CkptError, Corrupt, Unsupported
from ckptkit.formats.deepspeed.model_states import ModelStates, read_model_states
from ckptkit.formats.deepspeed.names import Files, check_ranks
from ckptkit.formats.deepspeed.partitions import Partition, read_partition
from ckptkit.formats.torchfile.state_files import StateFile, read_state_file

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class PartOfModel:
    """A part of the model as it was saved: all of it, or a stage of a pipeline.

    Each rank has one of `models`, or all have the same one; and one of the `partitions`, unless ZeRO was off.
    """

    models: tuple[ModelStates, ...]
    partitions: tuple[Partition, ...]


def read_part(root: Path, files: Files, part: int) -> PartOfModel:
    """Return what the ranks have saved of a part of the model."""
    models, optimizers = files.model_files(part), files.optimizer_files(part)
    if not models:
        raise Corrupt("its file of model states is missing", path=root / next(iter(optimizers.values())))
    if -1 in models and len(models) > 1:
        other = next(name for rank, name in models.items() if rank >= 0)
        message = f"`{models[-1]}` is of ZeRO 1 or 2, this is of ZeRO 3: files of two runs lie here"
        raise Corrupt(message, path=root / other, hint="keep those of one run")
    read = tuple(blame(root, name, read_model_states) for name in models.values())
    if not optimizers and (-1 not in models or read[0].shapes is not None):
        no_partitions(root / next(iter(models.values())), is_sharded=-1 not in models)
    partitions = tuple(blame(root, name, read_partition) for name in optimizers.values())
    if partitions:
        count = max((group.ranks for group in partitions[0].groups), default=len(partitions))
        check_ranks(optimizers, count, root, partitions[0].path)
        if -1 not in models:
            check_ranks(models, count, root, partitions[0].path)
    return PartOfModel(read, partitions)


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

"""Let ranks act together and fail together: an error of one of them is raised on all."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException

from ckptkit.errors import CkptError, Corrupt, IOFailure

T = TypeVar("T")

PATIENCE = timedelta(hours=2)  # for the slowest write of one rank that the others wait for


class Ranks:
    """The ranks of a process group, by default of torch's own; or this process alone where there is none."""

    def __init__(self, group: ProcessGroup | None = None) -> None:
        self.group = group
        self._alone = not dist.is_initialized()

    @classmethod
    def apart(cls) -> Self:
        """Return all ranks, in a group of their own over gloo. To be called by all at the same point.

        A thread may use it while the training's collectives go on, and no watchdog of NCCL's ends the ranks that wait
        for a slow disk.
        """
        return cls(dist.new_group(backend="gloo", timeout=PATIENCE) if dist.is_initialized() else None)

    @property
    def rank(self) -> int:
        return 0 if self._alone else dist.get_rank(self.group)

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in their order, on every rank."""
        if self._alone:
            return [value]
        values: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(values, value, group=self.group)
        return values

    def on_first(self, work: Callable[[], T]) -> T:
        """Do `work` on rank 0 and return its result on every rank; an error there is raised on every rank."""
        if self._alone:
            return work()
        told: list[Outcome[T] | None] = [self._attempt(work) if self.rank == 0 else None]
        dist.broadcast_object_list(told, group_src=0, group=self.group)
        assert told[0] is not None
        return told[0].result()

    def together(self, work: Callable[[], T]) -> T:
        """Do `work` on every rank; an error on any is raised on all of them, once all have ended."""
        if self._alone:
            return work()
        mine = self._attempt(work)
        for error in self.gather(mine.error):
            if error is not None:
                raise error from mine.error
        return mine.result()

    def _attempt(self, work: Callable[[], T]) -> Outcome[T]:
        """Return what comes of `work`. An error that is none of ours becomes one, so that other ranks can be told."""
        try:
            return Outcome(value=work())
        except CkptError as error:
            return Outcome(error=error)
        except Exception as error:  # noqa: BLE001 - whatever it was, the others must not wait for this rank
            told = CkptError(f"rank {self.rank} failed: {type(error).__name__}: {error}")
            told.__cause__ = error
            return Outcome(error=told)


class Outcome(Generic[T]):
    """The end of a piece of work: its value, or the error that ended it."""

    def __init__(self, value: T | None = None, error: CkptError | None = None) -> None:
        self.value = value
        self.error = error

    def result(self) -> T:
        """Return the value, or raise the error."""
        if self.error is not None:
            raise self.error
        return self.value  # type: ignore[return-value]


def find_cause(error: CheckpointException) -> BaseException:
    """Return the error that stopped the first of the ranks that failed; a CkptError before any other."""
    return find_first(error)[1]


def find_first(error: CheckpointException) -> tuple[int, BaseException]:
    """Return the first of the ranks that failed, and why; one that met a CkptError before any other."""
    reasons = [(rank, reason) for rank, (reason, _) in sorted(error.failures.items())]
    return next((found for found in reasons if isinstance(found[1], CkptError)), reasons[0])


def translate(error: CheckpointException, path: Path, verb: str) -> CkptError:
    """Return the CkptError that says why the first of the ranks that failed could not `verb` (save, load) `path`."""
    rank, reason = find_first(error)
    if isinstance(reason, CkptError) and not isinstance(reason, IOFailure):
        return reason
    said = (reason.message if isinstance(reason, CkptError) else str(reason)).strip() or type(reason).__name__
    message = f"rank {rank} could not {verb} it: {said.splitlines()[0]}"
    if isinstance(reason, IOFailure):
        return type(reason)(message, path=reason.path or path, tensor=reason.tensor, hint=reason.hint)
    if verb == "load" and not isinstance(reason, OSError):
        return Corrupt(message, path=path)
    return IOFailure(message, path=path)

"""Coordinate ranks so that they act and fail together: an error on one rank is raised on all."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Self, TypeVar, cast

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException

from ckptkit.errors import CkptError, Corrupt, IOFailure

T = TypeVar("T")

PATIENCE = timedelta(hours=2)  # longest wait for the slowest rank's write


class Ranks:
    """The ranks of a process group (by default torch's own), or this process alone without torch.distributed."""

    def __init__(self, group: ProcessGroup | None = None, *, is_alone: bool = False) -> None:
        self.group = group
        self.is_alone = is_alone or not dist.is_initialized()

    @classmethod
    def in_separate_group(cls) -> Self:
        """Return all ranks, in a separate gloo group. All ranks must call this at the same point.

        A thread can use the group while the training's collectives continue, and NCCL's watchdog does not abort ranks
        that wait for a slow disk.
        """
        return cls(dist.new_group(backend="gloo", timeout=PATIENCE) if dist.is_initialized() else None)

    @property
    def rank(self) -> int:
        return 0 if self.is_alone else dist.get_rank(self.group)

    def gather_values(self, value: T) -> list[T]:
        """Return the values of all ranks, in their order, on every rank."""
        if self.is_alone:
            return [value]
        values: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(values, value, group=self.group)
        return values

    def run_on_first_rank(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 and return its result on every rank. An error there is raised on every rank."""
        if self.is_alone:
            return work()
        outcomes: list[Any] = [self._outcome_of(work) if self.rank == 0 else None]
        dist.broadcast_object_list(outcomes, group_src=0, group=self.group)
        result, error = outcomes[0]
        if error is not None:
            raise error
        return cast(T, result)

    def run_on_all_ranks(self, work: Callable[[], T]) -> T:
        """Run `work` on every rank. An error on any rank is raised on all of them, after all have finished."""
        if self.is_alone:
            return work()
        result, own_error = self._outcome_of(work)
        for error in self.gather_values(own_error):  # the same first error on all ranks
            if error is not None:
                raise error from own_error
        return cast(T, result)

    def _outcome_of(self, work: Callable[[], T]) -> tuple[T | None, CkptError | None]:
        """Return the result of `work`, and the error that ended it.

        Wraps a foreign error in a `CkptError`, so that it can be sent to other ranks.
        """
        try:
            return work(), None
        except CkptError as error:
            return None, error
        except Exception as error:  # noqa: BLE001 - whatever it was, the others must not wait for this rank
            wrapped = CkptError(f"rank {self.rank} failed: {type(error).__name__}: {error}")
            wrapped.__cause__ = error
            return None, wrapped


def find_cause(error: BaseException) -> BaseException:
    """Return the error of the first rank that failed; a CkptError has priority.

    Any other error than torch's `CheckpointException` is its own cause.
    """
    return first_failed_rank(error)[1] if isinstance(error, CheckpointException) else error


def first_failed_rank(error: CheckpointException) -> tuple[int, BaseException]:
    """Return the first rank that failed, and its error; a CkptError has priority."""
    reasons = [(rank, reason) for rank, (reason, _) in sorted(error.failures.items())]
    return next((failure for failure in reasons if isinstance(failure[1], CkptError)), reasons[0])


def to_rank_error(error: CheckpointException, path: Path, verb: str) -> CkptError:
    """Return a CkptError that says why the first failed rank could not `verb` (save, load) the checkpoint at `path`."""
    rank, reason = first_failed_rank(error)
    if isinstance(reason, CkptError) and not isinstance(reason, IOFailure):
        return reason
    reason_text = (reason.message if isinstance(reason, CkptError) else str(reason)).strip() or type(reason).__name__
    message = f"rank {rank} could not {verb} it: {reason_text.splitlines()[0]}"
    if isinstance(reason, IOFailure):
        return type(reason)(message, path=reason.path or path, tensor=reason.tensor, hint=reason.hint)
    if verb == "load" and not isinstance(reason, OSError):
        return Corrupt(message, path=path)
    return IOFailure(message, path=path)

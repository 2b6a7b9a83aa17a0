"""Peers: ranks that act together and fail together, over a group of their own. Knows no model and no files."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ckptkit.errors import CkptError

T = TypeVar("T")

PATIENCE = timedelta(hours=2)  # for the slowest write of one rank that the others wait for


class Peers:
    """All ranks of the process group, or this process alone where there is none.

    They talk over gloo in a group of their own: a thread may do so while the training's collectives go on, and no
    watchdog of NCCL's ends the ranks that wait for a slow disk. Made by all ranks at the same point.
    """

    def __init__(self) -> None:
        self.group = dist.new_group(backend="gloo", timeout=PATIENCE) if dist.is_initialized() else None

    @property
    def rank(self) -> int:
        """The number of this rank."""
        return 0 if self.group is None else dist.get_rank(self.group)

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in their order, on every rank."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(values, value, group=self.group)
        return values

    def on_first(self, work: Callable[[], T]) -> T:
        """Do `work` on rank 0 and give its result to every rank; what goes wrong there is raised on every rank."""
        if self.group is None:
            return work()
        told: list[Outcome[T] | None] = [self.attempt(work) if self.rank == 0 else None]
        dist.broadcast_object_list(told, src=0, group=self.group)
        assert told[0] is not None
        return told[0].result()

    def together(self, work: Callable[[], T]) -> T:
        """Do `work` on every rank; what goes wrong on any is raised on all of them, once all have ended."""
        if self.group is None:
            return work()
        mine = self.attempt(work)
        for error in self.gather(mine.error):
            if error is not None:
                raise error from mine.error
        return mine.result()

    def attempt(self, work: Callable[[], T]) -> Outcome[T]:
        """What comes of `work`. An error that is none of ours becomes one, so that the other ranks can be told."""
        try:
            return Outcome(value=work())
        except CkptError as error:
            return Outcome(error=error)
        except Exception as error:  # noqa: BLE001 - whatever it was, the others must not wait for this rank
            told = CkptError(f"rank {self.rank} failed: {type(error).__name__}: {error}")
            told.__cause__ = error
            return Outcome(error=told)

    def broadcast(self, tensor: Tensor) -> Tensor:
        """The tensor that rank 0 has, on the CPU of every rank; the others give one to receive it in."""
        if self.group is not None and tensor.numel():
            tensor = tensor.contiguous()
            dist.broadcast(tensor.view(-1).view(torch.uint8), src=0, group=self.group)  # gloo knows few dtypes
        return tensor


class Outcome(Generic[T]):
    """What came of a piece of work: its value, or the error that ended it."""

    def __init__(self, value: T | None = None, error: CkptError | None = None) -> None:
        self.value = value
        self.error = error

    def result(self) -> T:
        """The value; raises the error."""
        if self.error is not None:
            raise self.error
        return self.value  # type: ignore[return-value]

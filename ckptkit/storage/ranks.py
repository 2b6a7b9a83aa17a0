"""Ranks: what went wrong on one of them is what all of them hear of. Knows no files and no tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from ckptkit.errors import CkptError

T = TypeVar("T")


def on_every_rank(work: Callable[[], T]) -> T:
    """Do `work` on this rank, as all do; a CkptError of any is raised on every one."""
    if not dist.is_initialized():
        return work()
    outcome: T | CkptError
    try:
        outcome = work()
    except CkptError as error:
        outcome = error
    failures: list[CkptError | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, outcome if isinstance(outcome, CkptError) else None)
    for failure in failures:
        if failure is not None:
            raise failure
    assert not isinstance(outcome, CkptError)
    return outcome


def find_cause(error: CheckpointException) -> BaseException:
    """What stopped the first of the ranks that failed; a CkptError before any other."""
    reasons = [reason for _, (reason, _) in sorted(error.failures.items())]
    return next((reason for reason in reasons if isinstance(reason, CkptError)), reasons[0])

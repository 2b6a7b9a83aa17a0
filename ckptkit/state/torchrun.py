"""Let the ranks of one `torchrun` tell rank 0 that they are done, through the store that they share."""

from __future__ import annotations

import os
import time
from datetime import timedelta

from ckptkit.errors import IOFailure

# Ranks of one `torchrun` signal rank 0 through torch's store that they are done. Files on disk cannot be the signal:
# they may be left from an earlier job that died.
_ARRIVED = "ckptkit/arrived"
_POLL_SECONDS = 0.1  # between two polls of the number of finished ranks
_MAX_WAIT = timedelta(days=30)  # longest difference between the work of two ranks


def rank_and_ranks() -> tuple[int, int]:
    """Return this process's rank and the world size, from the environment."""
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def wait_for_ranks() -> None:
    """Signal that this rank is done; as rank 0, also wait until all ranks are done.

    See https://docs.pytorch.org/docs/stable/distributed.html#environment-variable-initialization.
    """
    from torch.distributed import DistError, rendezvous

    try:
        store, rank, ranks = next(rendezvous("env://", timeout=_MAX_WAIT))
        store.add(_ARRIVED, 1)
        while rank == 0 and store.add(_ARRIVED, 0) < ranks:
            time.sleep(_POLL_SECONDS)
    except DistError as error:
        raise IOFailure(
            f"the ranks cannot reach each other: {error}", hint="run single parts with --part instead"
        ) from error

"""Let the ranks of one `torchrun` tell the first of them that they are done, by the store that they all have.

What lies on the disk could not tell it: that may be of an earlier job, which died.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta

from ckptkit.errors import IOFailure

_ARRIVED = "ckptkit/arrived"
_PAUSE = 0.1  # seconds between two looks at how many have arrived
_LONGEST = timedelta(days=30)  # that a rank works longer than another


def rank_and_ranks() -> tuple[int, int]:
    """Return the rank that the environment says this process is, and how many there are."""
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def wait_for_ranks() -> None:
    """Arrive as the rank that the environment says this is; as rank 0, also wait until all have arrived.

    See https://docs.pytorch.org/docs/stable/distributed.html#environment-variable-initialization.
    """
    from torch.distributed import DistError, rendezvous

    try:
        store, rank, ranks = next(rendezvous("env://", timeout=_LONGEST))
        store.add(_ARRIVED, 1)
        while rank == 0 and store.add(_ARRIVED, 0) < ranks:
            time.sleep(_PAUSE)
    except DistError as error:
        raise IOFailure(
            f"the ranks cannot reach each other: {error}", hint="run single parts with --part instead"
        ) from error

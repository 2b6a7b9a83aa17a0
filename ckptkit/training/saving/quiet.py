"""Silence torch's warnings about its own insides, which its caller can do nothing about, and no others."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_INSIDES = (
    "torch.distributed is disabled, unavailable or uninitialized",  # one process is what is meant
    "`_get_pg_default_device` will be deprecated",  # FSDP1 without a device mesh
    "Multiple backends are registered with this ProcessGroup",
    "When using ``NO_SHARD`` for ``ShardingStrategy``",
    "Please use DTensor instead",
    "TypedStorage is deprecated",  # torch 2.10 saves by it
)


@contextmanager
def quiet() -> Iterator[None]:
    """Let torch save and load without a word about how it does."""
    with warnings.catch_warnings():
        silence()
        yield


def silence() -> None:
    """Silence them for the rest of the process: for a thread, whose warnings no block can catch without others'."""
    for message in _INSIDES:
        warnings.filterwarnings("ignore", message=message)

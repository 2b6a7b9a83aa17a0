"""Read the tensors of a model one after another, in the order of its files, and some of them ahead of their use."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from ckptkit.storage.open import LazyCheckpoint, LazyTensor

if TYPE_CHECKING:
    import torch

AHEAD_BYTES = 1 << 30  # held at most of tensors that nobody has asked for yet, but for one
_THREADS = 4  # that read a tensor each: small ones of a store take a round trip


def keep_all(_name: str) -> bool:
    return False


def read_ahead(tensors: LazyCheckpoint, skip: Callable[[str], bool] = keep_all) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and tensors in the order of the files, without those that `skip` says are not needed.

    Each is read whole, and compared with its CRC-32. Raises a `CkptError` for the first that cannot be read.
    """
    waiting: deque[tuple[LazyTensor, Future[torch.Tensor]]] = deque()
    held = 0
    with ThreadPoolExecutor(_THREADS, "ckptkit-read-ahead") as pool:
        try:
            for one in in_file_order(tensors, skip):
                while waiting and held + one.nbytes > AHEAD_BYTES:
                    held -= waiting[0][0].nbytes
                    yield taken(waiting)
                held += one.nbytes
                waiting.append((one, pool.submit(one.torch)))
            while waiting:
                yield taken(waiting)
        finally:  # whoever asked may have stopped
            pool.shutdown(cancel_futures=True)


def taken(waiting: deque[tuple[LazyTensor, Future[torch.Tensor]]]) -> tuple[str, torch.Tensor]:
    """Return the first of the tensors once it has been read, and forget it."""
    tensor, read = waiting.popleft()
    return tensor.name, read.result()


def in_file_order(tensors: LazyCheckpoint, skip: Callable[[str], bool]) -> list[LazyTensor]:
    """Return the tensors that are needed, ordered by where their first bytes lie."""

    def place(name: str) -> tuple[str, int]:
        chunks = tensors.layout.tensors[name].chunks
        return (chunks[0].path, chunks[0].offset) if chunks else ("", 0)  # what is computed may have none of its own

    return [tensors[name] for name in sorted(filter(lambda name: not skip(name), tensors), key=place)]

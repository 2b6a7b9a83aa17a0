"""Make the tensors that a chain of deltas leads to, block by block, beside those before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol

from ckptkit.engine.blocks import BLOCK_BYTES
from ckptkit.engine.read import read
from ckptkit.errors import Corrupt
from ckptkit.io.crc32 import crc32
from ckptkit.layout import Layout, Spec
from ckptkit.layout.box import cut, whole
from ckptkit.plugins.deltas.chain import WRITE_AGAIN, DeltaChain, put_into
from ckptkit.plugins.deltas.open_delta import WHOLE


class NewBlock(NamedTuple):
    """A run of the elements of a tensor, from element `first`, as it was and as it is to be."""

    first: int
    old: memoryview
    new: memoryview


class Successor(Protocol):
    """A model that another becomes."""

    @property
    def specs(self) -> Mapping[str, Spec]:
        """Return dtype and shape of the tensors that may change."""

    def blocks(self, name: str) -> Iterator[NewBlock]:
        """Yield all blocks of a tensor that may change, in order. Raises `Corrupt` or `Mismatch` for another base."""


def blocks_of(layout: Layout, name: str) -> Iterator[tuple[int, bytearray]]:
    """Yield the elements of a tensor, row-major in blocks, each with the number of its first element."""
    spec = layout.tensors[name].spec
    first = 0
    for box in cut(whole(spec.shape), BLOCK_BYTES // spec.dtype.itemsize):
        yield first, read(layout, name, box, jobs=1)
        first += box.numel


class ChainSuccessor:
    """What a chain of deltas makes of a base."""

    def __init__(self, base: Layout, chain: DeltaChain) -> None:
        self._base, self._chain = base, chain

    @property
    def specs(self) -> Mapping[str, Spec]:
        return self._chain.specs

    def blocks(self, name: str) -> Iterator[NewBlock]:
        """Yield the blocks of a tensor. Raises `Corrupt` at its end if its CRC-32 is not that of the last delta."""
        expected, found = self._chain.sums[name], 0
        last, changes = self._chain.last_whole(name), self._chain.load(name)
        delta = None if last is None else self._chain.deltas[last].layout
        wholes = None if delta is None else blocks_of(delta, name + WHOLE)
        for first, old in blocks_of(self._base, name):
            new = bytearray(old) if wholes is None else next(wholes)[1]
            if changes is not None:
                put_into(memoryview(new), first, changes, self.specs[name].dtype.itemsize)
            found = crc32(new, found)
            yield NewBlock(first, memoryview(old), memoryview(new))
        if found != expected:
            message = f"expected CRC-32 {expected:08x} after the change, found {found:08x}"
            raise Corrupt(message, path=self._chain.file_of(name), tensor=name, hint=WRITE_AGAIN)

"""Compute the tensors that a chain of deltas produces, block by block, together with the old values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol

from ckptkit.engine.blocks import BLOCK_BYTES
from ckptkit.engine.read import read_box
from ckptkit.errors import Corrupt
from ckptkit.io.crc32 import crc32
from ckptkit.layout import Layout, Spec
from ckptkit.layout.box import cut_box, full_box
from ckptkit.plugins.deltas.chain import WRITE_AGAIN, DeltaChain, write_changes_into
from ckptkit.plugins.deltas.open_delta import WHOLE


class NewBlock(NamedTuple):
    """A block of a tensor from element `first`, with its old and its new bytes."""

    first: int
    old: memoryview
    new: memoryview


class Successor(Protocol):
    """The model that a base model becomes."""

    @property
    def specs(self) -> Mapping[str, Spec]:
        """Return dtype and shape of the tensors that may change."""

    def new_blocks_of(self, name: str) -> Iterator[NewBlock]:
        """Yield all blocks of a tensor in order. Raises `Corrupt` or `Mismatch` for another base."""


def read_blocks_in_order(layout: Layout, name: str) -> Iterator[tuple[int, bytearray]]:
    """Yield the blocks of a tensor in row-major order, each with the index of its first element."""
    spec = layout.tensors[name].spec
    first = 0
    for box in cut_box(full_box(spec.shape), BLOCK_BYTES // spec.dtype.itemsize):
        yield first, read_box(layout, name, box, jobs=1)
        first += box.numel


class ChainSuccessor:
    """The model that a chain of deltas produces from a base."""

    def __init__(self, base: Layout, chain: DeltaChain) -> None:
        self._base, self._chain = base, chain

    @property
    def specs(self) -> Mapping[str, Spec]:
        return self._chain.specs

    def new_blocks_of(self, name: str) -> Iterator[NewBlock]:
        """Yield the blocks of a tensor.

        Raises `Corrupt` after the last block if the CRC-32 differs from the CRC-32 in the last delta.
        """
        expected, crc = self._chain.final_checksums[name], 0
        last, changes = self._chain.find_last_full_delta(name), self._chain.find_changes_of(name)
        delta = None if last is None else self._chain.deltas[last].layout
        full_blocks = None if delta is None else read_blocks_in_order(delta, name + WHOLE)
        for first, old in read_blocks_in_order(self._base, name):
            new = bytearray(old) if full_blocks is None else next(full_blocks)[1]
            if changes is not None:
                write_changes_into(memoryview(new), first, changes, self.specs[name].dtype.itemsize)
            crc = crc32(new, crc)
            yield NewBlock(first, memoryview(old), memoryview(new))
        if crc != expected:
            message = f"expected CRC-32 {expected:08x} after the change, found {crc:08x}"
            raise Corrupt(message, path=self._chain.last_payload_path_of(name), tensor=name, hint=WRITE_AGAIN)

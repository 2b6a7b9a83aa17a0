"""A delta of the bytes of tensors: each is XORed with a compressed stream, or overwritten in places.

The state that it is for is known by a number only. What tells a wrong base are the digests of the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from ckptkit.deltas.changes import Array
from ckptkit.deltas.digests import new_digest
from ckptkit.deltas.new_blocks import NewBlock, blocks_of
from ckptkit.deltas.zstd import Decompressed
from ckptkit.errors import CkptError, Corrupt, Mismatch
from ckptkit.files.file import opening
from ckptkit.layout import Chunk, Layout, Spec

XOR, OVERWRITE = "xor", "overwrite"


@dataclass(frozen=True, slots=True)
class ByteChange:
    """What changes in a tensor: where the compressed stream lies, and the digest of the tensor afterwards."""

    chunk: Chunk
    algorithm: str
    digest: str
    nbytes: int | None = None  # of the tensor, where that is said


@dataclass(frozen=True, slots=True)
class ByteDelta:
    """A delta at `path` from the state of number `base_version` to that of `version`."""

    path: Path
    format: str
    version: int
    base_version: int
    encoding: str
    tensors: Mapping[str, ByteChange]

    @property
    def nbytes(self) -> int:
        """Return the bytes of all compressed streams."""
        return sum(tensor.chunk.length for tensor in self.tensors.values())


def check_versions(deltas: Sequence[ByteDelta]) -> None:
    """Raise `Mismatch` where a delta does not follow the one before it."""
    for one, two in pairwise(deltas):
        if two.base_version != one.version:
            message = f"expected a delta of version {one.version}, found one of version {two.base_version}"
            hint = f"pass the deltas between {one.path} and this one too"
            raise Mismatch(message, path=two.path, hint=hint)


class ByteSuccessor:
    """What deltas of bytes make of a base, or of another model in its place: a whole version that came later."""

    def __init__(self, base: Layout, deltas: Sequence[ByteDelta], seed: Layout | None = None) -> None:
        self._base, self._deltas, self._seed = base, deltas, base if seed is None else seed
        self._check_specs()

    @property
    def specs(self) -> Mapping[str, Spec]:
        """Return the tensors that may change: all, if another model is in the place of the base."""
        if self._seed is not self._base:
            return self._base.specs
        names = {name for delta in self._deltas for name in delta.tensors}
        return {name: spec for name, spec in self._base.specs.items() if name in names}

    def _check_specs(self) -> None:
        base, seed = self._base.specs, self._seed.specs
        if wrong := min((name for name in base.keys() | seed.keys() if base.get(name) != seed.get(name)), default=None):
            message = f"expected {base.get(wrong)}, found {seed.get(wrong)}"
            raise Mismatch(message, path=self._seed.root, tensor=wrong, hint="copy the whole version instead")
        for delta in self._deltas:
            for name, tensor in delta.tensors.items():
                if name not in base:
                    raise Mismatch("the base lacks a tensor that changes", path=self._base.root, tensor=name)
                if tensor.nbytes not in (None, base[name].nbytes):
                    message = f"expected {tensor.nbytes} bytes, found {base[name].nbytes}"
                    raise Mismatch(message, path=self._base.root, tensor=name)

    def blocks(self, name: str) -> Iterator[NewBlock]:
        """Yield the blocks of a tensor. Raises `Mismatch` at its end if the digest is not that of the last delta."""
        deltas = [delta for delta in self._deltas if name in delta.tensors]
        with ExitStack() as files:
            steps = [step_of(delta, name, self._base.specs[name].nbytes, files) for delta in deltas]
            last = deltas[-1].tensors[name] if deltas else None
            digest = new_digest(last.algorithm) if last else None
            seeds = None if self._seed is self._base else blocks_of(self._seed, name)
            start = 0
            for first, old in blocks_of(self._base, name):
                new = bytearray(old) if seeds is None else next(seeds)[1]
                for delta, step in zip(deltas, steps, strict=True):
                    blaming(delta, name, step, start, new)
                if digest:
                    digest.update(memoryview(new))
                yield NewBlock(first, memoryview(old), memoryview(new))
                start += len(new)
            for delta, step in zip(deltas, steps, strict=True):
                blaming(delta, name, step, start, None)
        if last and digest and digest.hexdigest() != last.digest:
            message = f"expected {last.algorithm} {last.digest} after the change, found {digest.hexdigest()}"
            hint = "pass the checkpoint that the delta was made from; if you did, the delta is damaged"
            raise Mismatch(message, path=deltas[-1].path, tensor=name, hint=hint)


class XorStep:
    """A stream of bytes that a tensor is XORed with."""

    def __init__(self, stream: Decompressed) -> None:
        self._stream = stream

    def change(self, start: int, block: bytearray) -> None:  # noqa: ARG002 - it comes in order
        """Change the next bytes of the tensor."""
        bytes_of = np.frombuffer(block, np.uint8)
        np.bitwise_xor(bytes_of, np.frombuffer(self._stream.read(len(block)), np.uint8), out=bytes_of)

    def end(self) -> None:
        self._stream.require_end()


class OverwriteStep:
    """New bytes at positions of a tensor of `nbytes` bytes."""

    def __init__(self, stream: Decompressed, nbytes: int) -> None:
        count = int.from_bytes(stream.read(4), "little")
        if count > nbytes:
            raise Corrupt(f"expected at most {nbytes} changed bytes, found {count}")
        self._positions: Array = np.frombuffer(stream.read(4 * count), "<u4")
        self._values: Array = np.frombuffer(stream.read(count), np.uint8)
        if count and (int(self._positions.max()) >= nbytes or (np.diff(self._positions.astype(np.int64)) <= 0).any()):
            raise Corrupt(f"expected strictly increasing positions below {nbytes}")
        stream.require_end()

    def change(self, start: int, block: bytearray) -> None:
        """Change the bytes of the tensor from `start` on."""
        low, high = np.searchsorted(self._positions, [start, start + len(block)])
        np.frombuffer(block, np.uint8)[self._positions[low:high] - start] = self._values[low:high]

    def end(self) -> None:
        """Do nothing: all was read at the beginning."""


ByteStep = XorStep | OverwriteStep


def step_of(delta: ByteDelta, name: str, nbytes: int, files: ExitStack) -> ByteStep:
    """Return what a delta does to a tensor. Raises `Corrupt` if that cannot be read."""
    chunk = delta.tensors[name].chunk
    try:
        stream = Decompressed(files.enter_context(opening(delta.path / chunk.path)), chunk.offset, chunk.length)
        return XorStep(stream) if delta.encoding == XOR else OverwriteStep(stream, nbytes)
    except CkptError as error:
        raise error.blame(path=delta.path / chunk.path, tensor=name) from None


def blaming(delta: ByteDelta, name: str, step: ByteStep, start: int, block: bytearray | None) -> None:
    """Change a block, or end, and name the file of what cannot be read."""
    try:
        if block is None:
            step.end()
        else:
            step.change(start, block)
    except CkptError as error:
        raise error.blame(path=delta.path / delta.tensors[name].chunk.path, tensor=name) from None


def check_frames(delta: ByteDelta) -> None:
    """Read all that a delta holds. Raises `Corrupt` for what is no zstd frame."""
    for name, tensor in delta.tensors.items():
        path = delta.path / tensor.chunk.path
        with opening(path) as file:
            try:
                Decompressed(file, tensor.chunk.offset, tensor.chunk.length).drain()
            except CkptError as error:
                raise error.blame(path=path, tensor=name) from None

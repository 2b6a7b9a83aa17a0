"""Join deltas that follow each other, and apply their changes to blocks of a tensor.

The result of each delta is the base of the next delta. A model has an identity by its content: the same tensors give
the same identity in any format and sharding.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ckptkit.engine.blocks import BLOCK_BYTES
from ckptkit.engine.compare import row_major_checksums
from ckptkit.engine.read import read_box
from ckptkit.errors import Corrupt, Mismatch
from ckptkit.formats import locate_all_chunks
from ckptkit.io.crc32 import crc32
from ckptkit.layout import Layout, Spec, StoredTensor, edits
from ckptkit.layout.box import Box, Shape, cut_box, full_box, span_of
from ckptkit.layout.dtypes import DType
from ckptkit.layout.plan import Operand
from ckptkit.plugins.deltas.changes import Array, Changes, load_changes, merge_changes
from ckptkit.plugins.deltas.open_delta import WHOLE, Delta
from ckptkit.plugins.deltas.record import RECORD, short_id

FindChanges = Callable[[str], Changes | None]  # (tensor name) -> its changes


class Patched:
    """The recipe of a tensor in which some elements change. The boxes passed to it refer to a tensor of `shape`."""

    def __init__(self, operand: Operand, name: str, shape: Shape, find_changes: FindChanges) -> None:
        self.operands = (operand,)
        self._name, self._box, self._find_changes = name, full_box(shape), find_changes

    def __call__(self, box: Box, dtype: DType, blocks: Sequence[memoryview]) -> tuple[memoryview, bool]:
        """Return the elements of a box after the change; the box must be contiguous in row-major order."""
        changes = self._find_changes(self._name)
        if changes is not None:
            write_changes_into(blocks[0], span_of(box, self._box, None).start, changes, dtype.itemsize)
        return blocks[0], False


class NewBlock(NamedTuple):
    """A block of a tensor from element `first`, with its bytes before and after a change."""

    first: int
    old: memoryview
    new: memoryview


def read_blocks_in_order(layout: Layout, name: str) -> Iterator[tuple[int, memoryview]]:
    """Yield the blocks of a tensor in row-major order, each with the index of its first element."""
    spec = layout.tensors[name].spec
    first = 0
    for box in cut_box(full_box(spec.shape), BLOCK_BYTES // spec.dtype.itemsize):
        yield first, read_box(layout, name, box, jobs=1)
        first += box.numel


def write_changes_into(block: memoryview, first: int, changes: Changes, itemsize: int) -> int:
    """Write the new values into a block that begins at element `first`, and return how many were written."""
    count = len(block) // itemsize
    low, high = np.searchsorted(changes.positions, np.array([first, first + count], changes.positions.dtype))
    if high > low:
        elements: Array = np.frombuffer(block, changes.values.dtype)
        elements[changes.positions[low:high] - first] = changes.values[low:high]
    return int(high - low)


WRITE_AGAIN = "copy the delta again, or write it again with `ckptkit delta`"


@dataclass(frozen=True, slots=True)
class DeltaChain:
    """Deltas in the order in which they are applied."""

    deltas: tuple[Delta, ...]

    @classmethod
    def of(cls, deltas: Iterable[Delta]) -> DeltaChain:
        """Return the chain of deltas. Raises `Mismatch` if a delta does not continue from the one before it."""
        deltas = tuple(deltas)
        for earlier, later in pairwise(deltas):
            if later.record.base != earlier.record.new:
                expected, found = short_id(earlier.record.new), short_id(later.record.base)
                message = f"expected a delta of base {expected}, found one of {found}"
                hint = f"a delta is missing between {earlier.path} and this one, or the deltas are in the wrong order"
                raise Mismatch(message, path=later.path, hint=hint)
        return cls(deltas)

    @property
    def final_checksums(self) -> dict[str, int]:
        """Return the final CRC-32 of each tensor that changes."""
        return {name: tensor.crc32_new for delta in self.deltas for name, tensor in delta.record.tensors.items()}

    @property
    def specs(self) -> dict[str, Spec]:
        """Return dtype and shape of each tensor that changes."""
        return {name: tensor.spec for delta in self.deltas for name, tensor in delta.record.tensors.items()}

    def find_last_full_delta(self, name: str) -> int | None:
        """Return the index of the last delta that contains the full tensor; None if there is none."""
        return max((i for i, delta in enumerate(self.deltas) if delta.has_full_tensor(name)), default=None)

    def find_changes_since_full(self, name: str) -> Changes | None:
        """Return the changes of a tensor since the last delta that contains it in full; None without changes."""
        last = self.find_last_full_delta(name)
        later = self.deltas[0 if last is None else last + 1 :]
        changes = [load_changes(delta, name) for delta in later if name in delta.record.tensors]
        return merge_changes(changes) if changes else None

    def last_payload_path_of(self, name: str) -> Path:
        return next(delta.payload_path_of(name) for delta in reversed(self.deltas) if name in delta.record.tensors)

    def new_blocks_of(self, base: Layout, name: str) -> Iterator[NewBlock]:
        """Yield all blocks of a changed tensor in order.

        Raises `Corrupt` after the last block if the CRC-32 differs from the CRC-32 in the last delta.
        """
        expected, crc = self.final_checksums[name], 0
        last, changes = self.find_last_full_delta(name), self.find_changes_since_full(name)
        full_blocks = None if last is None else read_blocks_in_order(self.deltas[last].layout, name + WHOLE)
        for first, old in read_blocks_in_order(base, name):
            new = bytearray(old) if full_blocks is None else next(full_blocks)[1]
            if changes is not None:
                write_changes_into(memoryview(new), first, changes, self.specs[name].dtype.itemsize)
            crc = crc32(new, crc)
            yield NewBlock(first, memoryview(old), memoryview(new))
        if crc != expected:
            message = f"expected CRC-32 {expected:08x} after the change, found {crc:08x}"
            raise Corrupt(message, path=self.last_payload_path_of(name), tensor=name, hint=WRITE_AGAIN)

    def check_base(self, base: Layout, sums: Mapping[str, int]) -> None:
        """Check that the model with these checksums is the base of the first delta.

        Raises `Mismatch` for another model, and `Corrupt` if a delta does not produce the model that it names.
        """
        self.check_specs(base)
        first, identity = self.deltas[0].record, identity_of_model(base.specs, sums)
        if identity == first.base:
            after = dict(sums)
            for delta in self.deltas:
                after |= {name: tensor.crc32_new for name, tensor in delta.record.tensors.items()}
                if (result := identity_of_model(base.specs, after)) != delta.record.new:
                    message = f"expected weights {short_id(delta.record.new)} after the delta, found {short_id(result)}"
                    raise Corrupt(message, path=delta.path / RECORD, hint=WRITE_AGAIN)
            return
        if identity == self.deltas[-1].record.new:
            hint = "pass the checkpoint that the delta was made from"
            raise Mismatch("the delta is applied already: this checkpoint is its result", path=base.root, hint=hint)
        different = [name for name, tensor in first.tensors.items() if sums.get(name) != tensor.crc32_base]
        why = "a tensor that the delta does not change differs"
        if different:
            differ = f"{len(different)} of {len(first.tensors)} tensors that the delta changes differ"
            why = f"{differ}, such as `{different[0]}`"
        message = f"expected base {short_id(first.base)}, found {short_id(identity)}: {why}"
        raise Mismatch(message, path=base.root, hint=f"pass the checkpoint that {self.deltas[0].path} was made from")

    def check_specs(self, base: Layout) -> None:
        """Raise `Mismatch` unless the model has all changed tensors with the same dtypes and shapes."""
        for name, spec in self.specs.items():
            tensor = base.tensors.get(name)
            if tensor is None:
                raise Mismatch("the delta changes this tensor, but the base lacks it", path=base.root, tensor=name)
            if tensor.spec != spec:
                is_castable = tensor.spec.dtype.is_castable_to(spec.dtype)
                hint = f"`ckptkit apply --dtype {spec.dtype}` casts the base first" if is_castable else None
                message = f"expected {spec} as in the delta, found {tensor.spec}"
                raise Mismatch(message, path=base.root, tensor=name, hint=hint)


def identity_of_model(specs: Mapping[str, Spec], sums: Mapping[str, int]) -> str:
    """Return the SHA-256 over one line `name dtype shape crc32` per tensor, with the lines sorted.

    `sums` has the CRC-32 of the elements of each tensor, in row-major order.
    """
    lines = []
    for name, spec in specs.items():
        shape = ",".join(map(str, spec.shape))
        lines.append(f"{name} {spec.dtype.name} [{shape}] {sums[name]:08x}\n".encode("utf-8", "surrogatepass"))
    return hashlib.sha256(b"".join(sorted(lines))).hexdigest()


def find_recorded_checksum(tensor: StoredTensor) -> int | None:
    """Return the recorded CRC-32 of all elements of a tensor, row-major in its dtype; None if not recorded."""
    if not tensor.spec.numel:
        return 0
    if len(tensor.chunks) != 1 or tensor.splits is not None:
        return None
    (chunk,) = tensor.chunks
    is_plain = chunk.strides is None and chunk.run is None and chunk.where is None
    is_all = chunk.box == full_box(tensor.spec.shape) and chunk.dtype == tensor.spec.dtype
    return chunk.crc32 if is_plain and is_all else None


def checksum_by_tensor(layout: Layout, *, jobs: int | None = None) -> dict[str, int]:
    """Return the CRC-32 of each tensor of a located layout. Reads only tensors without a recorded checksum."""
    known = {name: find_recorded_checksum(tensor) for name, tensor in layout.tensors.items()}
    unknown = {name for name, crc in known.items() if crc is None}
    computed = (
        row_major_checksums(locate_all_chunks(edits.select_entries(layout, unknown.__contains__)), jobs=jobs)
        if unknown
        else {}
    )
    return {name: computed[name] if crc is None else crc for name, crc in known.items()}

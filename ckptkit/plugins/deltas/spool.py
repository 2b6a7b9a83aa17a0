"""Collect changed elements in a temporary file, in any order, until all are counted."""

from __future__ import annotations

import io
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, NamedTuple, Self

from ckptkit.errors import translate_os_errors
from ckptkit.layout import Spec
from ckptkit.plugins.deltas.changes import Changes
from ckptkit.plugins.deltas.nan import count_nan
from ckptkit.plugins.deltas.open_delta import index_dtype, is_full_tensor_smaller


class SpooledBlock(NamedTuple):
    """The changes of one block: the first element of the block, their number, and their byte offset in the spool."""

    first: int
    number: int
    offset: int


class Spool:
    """Changed elements of the tensors in `specs`, in a file at `path`; without a path, they are only counted.

    Changes of a tensor are dropped once storing the full tensor takes less space.
    """

    def __init__(self, path: Path | None, specs: Mapping[str, Spec]) -> None:
        self._path = path
        self._specs = specs
        self._blocks: dict[str, list[SpooledBlock]] = defaultdict(list)
        self._end = 0
        self.changed: Counter[str] = Counter()
        self.nan = 0
        self._file: IO[bytes] = io.BytesIO()
        if path is not None:
            with translate_os_errors(path):
                self._file = path.open("w+b")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def add_block_changes(self, name: str, first: int, changes: Changes) -> None:
        """Add the changes of the block that begins at element `first`; positions count from the start of the block."""
        if not changes.change_count:
            return
        spec = self._specs[name]
        self.changed[name] += changes.change_count
        self.nan += count_nan(changes.values, spec.dtype.name)
        if self._path is None or is_full_tensor_smaller(spec, self.changed[name]):
            # the full tensor will be stored instead, so its blocks are not needed
            self._blocks.pop(name, None)
            return
        positions = (changes.positions + first).astype(index_dtype(spec))
        with translate_os_errors(self._path):
            self._file.seek(self._end)
            self._file.write(positions.tobytes())
            self._file.write(changes.values.tobytes())
        self._blocks[name].append(SpooledBlock(first, changes.change_count, self._end))
        self._end += positions.nbytes + changes.values.nbytes

    def read_tensor_changes(self, name: str) -> Iterator[tuple[bytes, bytes]]:
        """Yield positions and values of a tensor's changes, in element order."""
        spec = self._specs[name]
        width = 4 if index_dtype(spec) == "int32" else 8
        for block in sorted(self._blocks[name]):
            with translate_os_errors(self._path or "."):
                self._file.seek(block.offset)
                positions = self._file.read(block.number * width)
                values = self._file.read(block.number * spec.dtype.itemsize)
            yield positions, values

"""Hold what keeps the bytes of a checkpoint from being had, and mark the chunks that are lost by it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ckptkit.errors import CkptError
from ckptkit.layout import LOST, Chunk
from ckptkit.tensors.box import Box
from ckptkit.tensors.dtypes import DType


@dataclass(frozen=True, slots=True)
class Fault:
    """A reason why something cannot be had, and the file that it should lie in, if that is known."""

    why: str
    path: Path | None

    @classmethod
    def of(cls, error: CkptError) -> Fault:
        return cls(error.message, error.path)


@dataclass(slots=True)
class Faults:
    """The damage that was found in a checkpoint, and what was put in its place.

    A lost chunk has the number of its fault in its path. `entries` are those that are no tensors, `unplaced` tensors of
    which not even the shape is known, both by the names that the checkpoint has for them; `unnamed` are of files of
    which nothing says what was in them, and `places` those of parts that cannot be read at all. `filled` are the paths
    of the chunks that were taken from elsewhere, each with words on where that is; no others have absolute ones.
    `repaired` are names of tensors that have other copies of the same bytes.
    """

    found: list[Fault] = field(default_factory=list)
    entries: dict[str, Fault] = field(default_factory=dict)
    unplaced: dict[str, Fault] = field(default_factory=dict)
    unnamed: list[Fault] = field(default_factory=list)
    places: list[Path] = field(default_factory=list)
    filled: dict[str, str] = field(default_factory=dict)
    filled_entries: dict[str, str] = field(default_factory=dict)
    repaired: dict[str, None] = field(default_factory=dict)

    def lose(self, chunk: Chunk, error: CkptError) -> Chunk:
        """Return a chunk as one that is lost, and note why."""
        return self.lost(chunk.box, chunk.dtype, Fault.of(error))

    def lost(self, box: Box, dtype: DType, fault: Fault) -> Chunk:
        """Return a box of a tensor as a lost chunk, and note why it is one."""
        if not (self.found and self.found[-1] == fault):
            self.found.append(fault)
        return Chunk(box, f"{LOST}{len(self.found) - 1}", 0, box.numel * dtype.itemsize, dtype)

    def of(self, chunk: Chunk) -> Fault:
        return self.found[int(chunk.path.rpartition(LOST)[2])]

    def note_filled(self, chunks: Iterable[Chunk], words: str) -> None:
        """Note that chunks were taken from elsewhere."""
        self.filled.update((chunk.path, words) for chunk in chunks if chunk.path)

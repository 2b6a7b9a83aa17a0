"""Read the tensors in one rank's file: plain tensors, and its parts of sharded ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptkit.errors import CkptError, Unsupported
from ckptkit.formats.archives.flatten import FlatState, Flattening, describe, pairs_of
from ckptkit.formats.archives.read_archive import place_tensor
from ckptkit.formats.archives.state_files import read_state_file
from ckptkit.formats.archives.zip_entries import ZipEntry
from ckptkit.formats.pickles.tensor_calls import as_tensor
from ckptkit.formats.shards.dtensors import Placed, Specs, chunks_of, is_dtensor
from ckptkit.formats.shards.sharded_tensors import ShardedTensor, chunks_of_shards, is_sharded_tensor, open_sharded
from ckptkit.io.file import opening, read_at
from ckptkit.layout import Chunk, KeyPath, StoredTensor

_MOST_INTEGERS = 1 << 20  # in the tensor that a mesh is


@dataclass(frozen=True, slots=True)
class RankTensor(StoredTensor):
    """A tensor as one rank has it: the chunks in its file, and how it is spread over ranks; None if it is not."""

    spread: Placed | ShardedTensor | None = None


@dataclass(frozen=True, slots=True)
class RankFile:
    """The state dict in the file of one rank: flattened, and as it was pickled."""

    rank: int
    name: str
    flat: FlatState
    value: Any

    @property
    def tensors(self) -> Mapping[str, RankTensor]:
        return {name: held for name, held in self.flat.tensors.items() if isinstance(held, RankTensor)}


class _Holding(Flattening):
    """The entries of one rank's file as they are gathered."""

    def __init__(self, root: Path, rank: int, entries: Mapping[str, ZipEntry], path: str) -> None:
        super().__init__(entries, path)
        self.root = root
        self.specs = Specs(rank, self.read_integers, {}, {})

    def stored(self, value: Any) -> StoredTensor:
        """Return a tensor with the chunks that this rank holds of it."""
        if is_dtensor(value):
            placed = self.specs.open(value)
            return RankTensor(placed.spec, tuple(chunks_of(placed, self.entries, self.path)), spread=placed)
        if is_sharded_tensor(value):
            sharded = open_sharded(value)
            return RankTensor(sharded.spec, tuple(chunks_of_shards(sharded, self.entries, self.path)), spread=sharded)
        plain = super().stored(value)
        return RankTensor(plain.spec, plain.chunks)

    def read_integers(self, value: Any) -> list[int]:
        """Return the numbers in a small tensor of integers, row by row."""
        found = place_tensor(as_tensor(value), self.entries)
        size = found.tensor.dtype.itemsize
        if found.strides is not None or found.length > _MOST_INTEGERS or found.tensor.dtype.kind != "int":
            raise ValueError("mesh")
        with opening(self.root / self.path) as file:
            data = read_at(file, found.length, found.offset)
        return [int.from_bytes(data[at : at + size], "little", signed=True) for at in range(0, len(data), size)]


def read_rank_file(root: Path, name: str, rank: int, above: KeyPath, *, is_dict: bool = True) -> RankFile:
    """Return what is in the file of a rank, with key paths that begin with `above`. Every error names the file.

    That must be a dict, unless `is_dict` is false: then it may be one entry, at `above` itself.
    """
    state = read_state_file(root, name)
    try:
        holding = _Holding(root, rank, state.entries, name)
        if pairs_of(state.value) != []:
            children = holding.children(state.value)
            if children is None and is_dict:
                raise Unsupported(f"expected a state dict, found {describe(state.value)}")
            if children is None:
                holding.add_entry(state.value, above)
            else:
                holding.add_all(children, above)
    except CkptError as error:
        raise error.blame(path=root / name) from None
    return RankFile(rank, name, holding.flat, state.value)


def lost_file(like: RankFile, rank: int, name: str) -> RankFile:
    """Return what a rank's file that cannot be read must have held of DTensors, by that of another rank."""
    tensors: dict[str, StoredTensor] = {}
    for own, held in like.tensors.items():
        if isinstance(held.spread, Placed) and rank in held.spread.mesh.ranks:
            placed = held.spread.of_rank(rank)
            chunks = (Chunk.unreadable(box, name, held.spec.dtype) for box, _ in placed.pieces)
            tensors[own] = RankTensor(held.spec, tuple(chunks), spread=placed)
    return RankFile(rank, name, FlatState(tensors, {}, like.flat.keys), None)

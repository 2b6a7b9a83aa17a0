"""Read the files of one item: torch.save, safetensors, JSON or bytes, each rank's with its part of the tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ckptkit.errors import ELSEWHERE, CkptError, Incomplete, Report
from ckptkit.formats.archives.flatten import FlatState
from ckptkit.formats.json_text import parse_json
from ckptkit.formats.pickles.tensor_calls import TensorRecord
from ckptkit.formats.pickles.write_pickle import dump
from ckptkit.formats.safetensors_headers import read_header
from ckptkit.formats.shards.dtensors import Placed
from ckptkit.formats.shards.rank_tensor import RankFile, RankTensor, read_rank_file
from ckptkit.io.file import is_there, read_small
from ckptkit.layout import Blob, Chunk, KeyPath, Spec
from ckptkit.layout.axes import part_of
from ckptkit.layout.blocks import row_major
from ckptkit.layout.box import Box
from ckptkit.plugins.torch_checkpointing.read_metadata import JSON, SAFETENSORS, TORCH, CheckpointItem, Spread

_LIMIT = 1 << 24  # bytes of a file that is read whole


def read_item_files(root: Path, name: str, item: CheckpointItem, report: Report) -> list[RankFile]:
    """Return what each rank has of an item; report files that are missing or cannot be read, and leave them out."""
    found = []
    for rank, (file, kind) in sorted(item.files.items()):
        try:
            found.append(read_file(root, name, rank, file, kind, item))
        except CkptError as error:
            report(error)
    return found


def missing(path: Path) -> Incomplete:
    """Return the error for a rank's file that is not there."""
    return Incomplete("the file is missing", path=path, hint=ELSEWHERE)


def read_file(root: Path, name: str, rank: int, file: str, kind: str, item: CheckpointItem) -> RankFile:
    """Return what one rank has of an item. Every error names the file."""
    if not is_there(root / file):
        raise missing(root / file)
    try:
        if kind == TORCH:
            return spread_out(read_rank_file(root, file, rank, (name,), is_dict=bool(item.spread)), item.spread)
        if kind == SAFETENSORS:
            return spread_out(read_safetensors(root, file, rank, name, item.spread), item.spread)
        data = read_small(root / file, _LIMIT)
        value = parse_json(data, root / file) if kind == JSON else data
        flat = FlatState({}, {name: Blob(file, 0, 0, dump(value))}, {name: (name,)})
        return RankFile(rank, file, flat, value)
    except CkptError as error:
        raise error.blame(path=root / file) from None


def read_safetensors(root: Path, file: str, rank: int, item: str, spread: Mapping[KeyPath, object]) -> RankFile:
    """Return the tensors in a file of safetensors, where the steps of a key path are joined by dots."""
    paths = {".".join(map(str, path)): path for path in spread}
    flat = FlatState()
    for name, chunk in read_header(root / file).items():
        key = (item, *paths.get(name, (name,)))
        own = ".".join(map(str, key))
        flat.keys[own] = key
        flat.tensors[own] = RankTensor(Spec(chunk.dtype, chunk.size), (chunk._replace(path=file),))
    return RankFile(rank, file, flat, None)


def spread_out(found: RankFile, spread: Mapping[KeyPath, Mapping[int, Spread]]) -> RankFile:
    """Return a rank's file with the plain tensors of which the metadata say that they are parts of larger ones."""
    tensors = dict(found.flat.tensors)
    for name, held in found.tensors.items():
        how = spread.get(found.flat.keys[name][1:], {}).get(found.rank)
        if how is not None and held.spread is None:
            try:
                tensors[name] = as_part(held, how, found.rank)
            except CkptError as error:
                raise error.blame(tensor=name) from None
    return replace(found, flat=replace(found.flat, tensors=tensors))


def as_part(held: RankTensor, how: Spread, rank: int) -> RankTensor:
    """Return a plain tensor as the part of a larger one that a rank has."""
    (chunk,) = held.chunks
    shape, strides = held.spec.shape, chunk.strides or row_major(held.spec.shape)
    record = TensorRecord("", chunk.dtype, 0, shape, strides)
    placed = Placed(Spec(chunk.dtype, how.shape), how.seen_by(rank), how.placements, None, record)
    return RankTensor(placed.spec, tuple(cut(chunk, placed)), spread=placed)


def cut(chunk: Chunk, placed: Placed) -> list[Chunk]:
    return [part_of(chunk, Box(at, box.size))._replace(box=box) for box, at in placed.pieces]

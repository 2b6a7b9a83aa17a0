"""Read directories with a file of torch.save for each shard, which describes the flat parameters in it.

Source: fairscale's `local_state_dict` and `local_metadata_dict`, as fairseq saves them: `NAME-shardN.pt`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ckptkit.errors import ELSEWHERE, CkptError, Corrupt, Incomplete, Report, Unsupported, refuse
from ckptkit.files.file import is_there, names_in
from ckptkit.formats.archives.flatten import FlatState
from ckptkit.formats.archives.state_files import extents_of
from ckptkit.formats.each_file import read_each
from ckptkit.formats.fairscale.optimizer import join_optimizer, keys_of_optimizers
from ckptkit.formats.fairscale.shards import METADATA, FlatParameter, count_ranks, cut_flat, read_flats
from ckptkit.formats.protocols import FormatReader
from ckptkit.formats.shards.join import join_blobs, join_tensors
from ckptkit.formats.shards.rank_tensor import RankFile, read_rank_file
from ckptkit.layout import OWN, Extent, KeyPath, Layout, StoredTensor, check_cover
from ckptkit.names.wrappers import unwrapped

_SHARD = re.compile(r"(?P<name>.+)-shard(?P<rank>[0-9]{1,7})\.pt")
_MOST = 1 << 16  # ranks
MODEL = "model"


class Fairscale(FormatReader):
    """The format of a directory with the shards of one checkpoint of fairscale."""

    name = "fairscale"
    known_by = "fairscale's `NAME-shardN.pt`"
    is_sharded = True

    def owns(self, name: str) -> bool:
        return bool(_SHARD.fullmatch(name))

    def rank_of(self, name: str) -> int | None:
        match = _SHARD.fullmatch(name)
        return int(match["rank"]) if match else None

    def is_bound(self, path: Path) -> bool:  # noqa: ARG002
        """Return True: each rank reads its own shard."""
        return True

    def detect(self, path: Path) -> bool:
        """Return True for a directory with shards."""
        return path.is_dir() and any(map(_SHARD.fullmatch, names_in(path)))

    def check_names(self, path: Path, report: Report) -> None:
        """Report each shard that is missing; raise `Unsupported` for those of several checkpoints."""
        find(path, report)

    def read(self, path: Path, report: Report = refuse) -> Layout:
        """Return the layout of the checkpoint in directory `path`, the model under `model`; it is all of it.

        Reports shards that are missing or cannot be read: a chunk of each flat parameter is unreadable then.
        """
        names = find(path, report)
        files = read_files(path, names, report)
        try:
            described = [read_flats(file.value) for file in files]
            names = with_last(path, names, count_all(files[0], described[0]), report)
            flat = join(files, described, names)
        except CkptError as error:
            raise error.blame(path=path) from None
        read = tuple(file.name for file in files)
        layout = Layout(path, self.name, flat.tensors, flat.blobs, flat.keys, len(names), read)
        check_cover(layout, report)
        return layout

    def extents(self, layout: Layout, report: Report = refuse) -> Iterator[Extent]:
        """Return every entry of every shard: its storages, its pickle and what torch puts beside them."""
        return extents_of(layout, layout.descriptions, report)


def find(path: Path, report: Report) -> list[str]:
    """Return the shards of one checkpoint, in order of rank; report those that are missing."""
    matches = [match for name in sorted(names_in(path)) if (match := _SHARD.fullmatch(name))]
    names = sorted({match["name"] for match in matches})
    if len(names) != 1:
        hint = "move each checkpoint to a directory of its own"
        raise Unsupported(
            f"expected shards of one checkpoint, found {len(names)}: {', '.join(names[:8])}", path=path, hint=hint
        )
    found = {int(match["rank"]): match[0] for match in matches}
    check_count(path, 1 + max(found))
    for rank in (rank for rank in range(max(found)) if rank not in found):
        report(missing(path / f"{names[0]}-shard{rank}.pt"))
    return [found.get(rank, f"{names[0]}-shard{rank}.pt") for rank in range(1 + max(found))]


def check_count(path: Path, count: int) -> None:
    """Raise `Corrupt` for more ranks than any job has."""
    if count > _MOST:
        raise Corrupt(f"expected shards of at most {_MOST} ranks, found {count}", path=path)


def missing(path: Path) -> Incomplete:
    return Incomplete("the file is missing", path=path, hint=ELSEWHERE)


def with_last(path: Path, names: list[str], count: int, report: Report) -> list[str]:
    """Return the names of the shards of `count` ranks: of the last ones no name tells that they are missing."""
    check_count(path, count)
    more = [f"{names[0].rpartition('-shard')[0]}-shard{rank}.pt" for rank in range(len(names), count)]
    for name in more:
        report(missing(path / name))
    return [*names, *more]


def count_all(file: RankFile, flats: Mapping[str, FlatParameter]) -> int:
    """Return how many ranks there must be, by the pieces that one of them has."""
    named = ((f"{MODEL}.{name}", flat) for name, flat in flats.items())
    return max((count_ranks(name, flat, file) for name, flat in named if name in file.tensors), default=1)


def read_files(path: Path, names: list[str], report: Report) -> list[RankFile]:
    """Return what is in the shards that are there; report those that cannot be read. Raises `Corrupt` if none can."""
    there = {rank: name for rank, name in enumerate(names) if is_there(path / name)}
    files = read_each(path, there, lambda rank, name: read_rank_file(path, name, rank, ()), report)
    if not files:
        raise Corrupt("none of the shards can be read", path=path)
    return list(files.values())


def join(files: list[RankFile], described: Sequence[Mapping[str, FlatParameter]], names: Sequence[str]) -> FlatState:
    """Return the model of all ranks, its optimizer by name where that is certain, and the rest.

    `files` are those that could be read, each with the flat parameters in it, of those of all ranks.
    """
    flats = {f"{MODEL}.{name}" for name in described[0]}
    for file, flat in zip(files, described, strict=True):
        absent = sorted(name for name in flats if name not in file.tensors)
        if flat.keys() != described[0].keys() or absent:
            raise Corrupt("the ranks have different flat parameters", tensor=next(iter(absent), None))
    rest = FlatState()
    whole = [replace(file, flat=only_model(file.flat, flats)) for file in files]
    for name, tensor in join_tensors(whole).items():
        key = (MODEL, unwrapped(".".join(map(str, files[0].flat.keys[name][1:]))))
        rest.tensors[".".join(key)], rest.keys[".".join(key)] = tensor, key
    for name in described[0]:
        for own, tensor in cut_flat(f"{MODEL}.{name}", [flat[name] for flat in described], files, names):
            rest.tensors[f"{MODEL}.{own}"], rest.keys[f"{MODEL}.{own}"] = tensor, (MODEL, own)
    optimizer = join_optimizer(files, described, MODEL, names)
    taken = {MODEL, *METADATA, *(key for file in files for key in keys_of_optimizers(file.value))}
    blobs, keys = join_blobs([replace(file, flat=blobs_of(file.flat, taken)) for file in files])
    for file in files:
        for name, tensor in others(file.flat, taken):
            way: KeyPath = (OWN, f"rank_{file.rank}", *file.flat.keys[name])
            rest.tensors[".".join(map(str, way))], rest.keys[".".join(map(str, way))] = tensor, way
    tensors = rest.tensors | optimizer.tensors
    return FlatState(tensors, blobs | optimizer.blobs, rest.keys | optimizer.keys | keys)


def only_model(flat: FlatState, flats: set[str]) -> FlatState:
    tensors = {n: t for n, t in flat.tensors.items() if flat.keys[n][0] == MODEL and n not in flats}
    return FlatState(tensors, {}, flat.keys)


def blobs_of(flat: FlatState, taken: Collection[str]) -> FlatState:
    """Return the entries that are no tensors, but for those below keys that are `taken`."""
    return FlatState(
        {}, {name: blob for name, blob in flat.blobs.items() if flat.keys[name][0] not in taken}, flat.keys
    )


def others(flat: FlatState, taken: Collection[str]) -> list[tuple[str, StoredTensor]]:
    """Return the tensors, but for those below keys that are `taken`: each rank has its own."""
    return [(name, tensor) for name, tensor in flat.tensors.items() if flat.keys[name][0] not in taken]

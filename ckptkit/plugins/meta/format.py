"""Read Meta's `consolidated.NN.pth`: a file of torch.save for each tensor-parallel rank, as one model.

Source: meta-llama/llama-models, models/llama3/generation.py. Each file holds a plain dict with the same names; the rank
is in the file's name. Names stay Meta's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from ckptkit.errors import CkptError, Corrupt, Incomplete, Report, Unsupported, refuse
from ckptkit.formats.archives.flatten import FlatState, flatten
from ckptkit.formats.archives.state_files import entries_of, extents_of, is_torch_save, opened, read_state_file
from ckptkit.formats.each_file import read_each
from ckptkit.formats.protocols import FormatReader
from ckptkit.formats.shards.join_ranks import as_lost, spares_of
from ckptkit.io.file import is_there, names_in
from ckptkit.layout import Chunk, Extent, Layout, StoredTensor
from ckptkit.plugins.meta.rules import PARAMS, count_ranks, join, read_params

_RANK = re.compile(r"consolidated\.([0-9]{2})\.pth")
_MOST = 100  # ranks, of two digits


class Consolidated(FormatReader):
    """The format of Meta's releases, which is only read."""

    name = "consolidated"
    known_by = "Meta's `consolidated.00.pth`"
    is_sharded = True

    def owns(self, name: str) -> bool:
        """Return True for a rank's file."""
        return bool(_RANK.fullmatch(name))

    def rank_of(self, name: str) -> int | None:
        match = _RANK.fullmatch(name)
        return int(match[1]) if match else None

    def detect(self, path: Path) -> bool:
        """Return True for a rank's file, or a directory with one."""
        files = [path / name for name in names_in(path) if self.owns(name)] if path.is_dir() else [path]
        return any(self.owns(file.name) and is_torch_save(file) for file in files)

    def check_names(self, path: Path, report: Report) -> None:
        """Report each file that breaks off or is missing."""
        root, files = find_files(path, report)
        for name in filter(lambda name: is_there(root / name), files):
            try:
                with opened(root / name) as (read, length):
                    entries_of(read, length)
            except CkptError as error:
                report(error.blame(path=root / name))

    def read(self, path: Path, report: Report = refuse) -> Layout:
        """Return the layout of the whole model; report ranks whose files are missing or cannot be read.

        Raises `Corrupt` if the ranks do not make up the model of params.json, `Unsupported` for a tensor of which no
        rule says how it is split.
        """
        root, files = find_files(path, report)
        found, params = read_ranks(root, files, report), read_params(root)
        first = next(iter(found.values()))
        if params:
            files = with_last(root, files, count_ranks(first.tensors, params), report)
        ranks = [found.get(name) or as_lost(first, name) for name in files]
        tensors: dict[str, StoredTensor] = {}
        spares: dict[str, tuple[Chunk, ...]] = {}
        for name in first.tensors:
            parts = [rank.tensors[name] for rank in ranks]
            try:
                tensors[name] = join(name, parts, params)
            except CkptError as error:
                raise error.blame(path=root) from None
            spares |= {name: copies} if (copies := spares_of(tensors[name], parts)) else {}
        described = (*found, PARAMS) if params else tuple(found)
        return Layout(root, self.name, tensors, first.blobs, first.keys, len(files), described, spares=spares)

    def extents(self, layout: Layout, report: Report = refuse) -> Iterator[Extent]:
        """Return every entry of the files: storages, pickles and what torch puts beside them."""
        return extents_of(layout, filter(self.owns, layout.descriptions), report)


def read_ranks(root: Path, files: Sequence[str], report: Report) -> dict[str, FlatState]:
    """Return what is in the files of ranks that are there; report those that cannot be read.

    Raises `Corrupt` if none can, or two do not have the same tensors.
    """
    there = {name: name for name in files if is_there(root / name)}
    found = read_each(root, there, lambda _, name: read_rank(root, name), report)
    if not found:
        raise Corrupt("no rank's file can be read", path=root)
    one, first = next(iter(found.items()))
    for name, rank in found.items():
        missing = first.tensors.keys() ^ rank.tensors.keys()
        if missing:
            raise Corrupt(
                f"expected the tensor in both this file and `{one}`, found it in one of them",
                path=root / name,
                tensor=min(missing),
            )
    return found


def read_rank(root: Path, name: str) -> FlatState:
    """Return what is in a rank's file."""
    state = read_state_file(root, name)
    try:
        return flatten(state.value, state.entries, name)
    except CkptError as error:
        raise error.blame(path=root / name) from None


def find_files(path: Path, report: Report) -> tuple[Path, list[str]]:
    """Return the directory of a model, and the names of all ranks' files, in order; of a file those beside it.

    Reports those before the last that are missing. Raises `Unsupported` for one file of several.
    """
    root = path if path.is_dir() else path.parent
    found = {int(match[1]): name for name in names_in(root) if (match := _RANK.fullmatch(name))}
    if path != root and len(found) > 1:
        message = f"this is the file of one of {len(found)} ranks; each has a part of every tensor"
        raise Unsupported(message, path=path, hint=f"pass the directory {root}")
    files = [name_of(rank) for rank in range(1 + max(found))]
    for name in (name_of(rank) for rank in range(max(found)) if rank not in found):
        report(missing(root / name))
    return root, files


def with_last(root: Path, files: list[str], count: int, report: Report) -> list[str]:
    """Return the names of the files of `count` ranks: of the last ones no name tells that they are missing."""
    more = [name_of(rank) for rank in range(len(files), count)] if count <= _MOST else []
    for name in more:
        report(missing(root / name))
    return [*files, *more]


def name_of(rank: int) -> str:
    return f"consolidated.{rank:02d}.pth"


def missing(path: Path) -> Incomplete:
    hint = "download the missing files again: every rank has a part of every tensor"
    return Incomplete("the file is missing", path=path, hint=hint)

"""Read Megatron's legacy checkpoints, a file of torch.save for each rank of tensors and pipeline, as one model.

Source: megatron/training/checkpointing.py, `--ckpt-format torch`. Names stay those of Megatron's modules; tensors are
joined by the rule for each name, layers and experts are numbered through. What is of one rank only, such as its random
state, lies under `rank_state` and the number of its directory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from ckptkit.errors import CkptError, Corrupt, Report, Unsupported, refuse
from ckptkit.formats.archives.state_files import entries_of, extents_of, opened
from ckptkit.formats.each_file import read_each
from ckptkit.formats.protocols import FormatReader
from ckptkit.io.file import is_there, names_in
from ckptkit.layout import Extent, Layout
from ckptkit.plugins.megatron.grid import FILES, Rank, file_in, find_directories, has_rank, place
from ckptkit.plugins.megatron.join import Job
from ckptkit.plugins.megatron.result import Result
from ckptkit.plugins.megatron.saved import VERSION, SavedRank, check_arguments

_EMBEDDING = "word_embeddings.weight"


class Megatron(FormatReader):
    """The format of Megatron's legacy checkpoints, which is only read."""

    name = "megatron"
    known_by = "Megatron's `mp_rank_00`"
    is_sharded = True

    def owns(self, name: str) -> bool:
        """Return True for the directory of a rank."""
        return bool(find_directories([name]))

    def rank_of(self, name: str) -> int | None:
        found = find_directories([name])
        return int("".join(f"{number:04d}" for number in found[0].numbers)) if found else None

    def detect(self, path: Path) -> bool:
        """Return True for a directory with those of ranks, for one of these, and for the file in it."""
        if path.is_dir():
            return any(has_rank(path / found.name) for found in find_directories(names_in(path))) or has_rank(path)
        return path.name in FILES and is_there(path)

    def check_names(self, path: Path, report: Report) -> None:
        """Report each rank that is missing, each one's directory without a file, and each file that breaks off."""
        root, files = find_files(path, report)
        numbers = [found.numbers for found in find_directories(files)]
        if len({len(one) for one in numbers}) == 1 and len(numbers) > 1:
            place(root, find_directories(files), None, has_stages=True, report=report)
        for file in (file for file in files.values() if is_there(root / file)):
            try:
                with opened(root / file) as (read, length):
                    entries_of(read, length)
            except CkptError as error:
                report(error.blame(path=root / file))

    def read(self, path: Path, report: Report = refuse) -> Layout:
        """Return the layout of the whole model, with its optimizer where it is certain what its states are of.

        Reports ranks that are missing or cannot be read; what they had others of their stage tell. Raises `Corrupt` if
        none does, or one is of another job, `Unsupported` for a tensor of which no rule says how it is split.
        """
        root, files = find_files(path, report)
        saved = read_files(root, files, report)
        job = Job(root, arrange(root, files, saved, report))
        check_same_job(job)
        check_arguments(job.ranks[Rank(0, 0, 0)], job.sizes)
        result = Result(job)
        result.add_model()
        result.add_optimizer(report)
        result.add_rest()
        return result.layout(self.name, tuple(one.path for one in saved.values()))

    def extents(self, layout: Layout, report: Report = refuse) -> Iterator[Extent]:
        """Return every entry of the files: storages, pickles and what torch puts beside them."""
        return extents_of(layout, layout.paths | set(layout.descriptions), report)


def find_files(path: Path, report: Report) -> tuple[Path, dict[str, str]]:
    """Return the directory of a checkpoint, and each rank's file as seen from there, by its directory.

    Reports directories of ranks without one. One rank's directory, or its file, is a checkpoint only if there is no
    other.
    """
    if path.is_dir() and not has_rank(path):
        return path, {found.name: file_in(path, found.name, report) for found in find_directories(names_in(path))}
    folder = path if path.is_dir() else path.parent
    others = len(find_directories(names_in(folder.parent))) if find_directories([folder.name]) else 1
    name = path.name if not path.is_dir() else next(name for name in FILES if is_there(path / name))
    sizes = SavedRank.read(folder, name).sizes
    if others > 1 or (sizes and sizes != (1, 1, 1)):
        message = "this is one of several ranks; each has a part of every tensor"
        raise Unsupported(message, path=path, hint=f"pass the directory above, {folder.parent}")
    return folder, {"": name}


def read_files(root: Path, files: Mapping[str, str], report: Report) -> dict[str, SavedRank]:
    """Return what is in the files of ranks, by directory; report those that cannot be read. Raises if none can."""
    there = {name: file for name, file in files.items() if is_there(root / file)}
    saved = read_each(root, there, lambda _, file: SavedRank.read(root, file), report)
    if not saved:
        raise Corrupt("no rank's file can be read", path=root)
    return saved


def arrange(
    root: Path, files: Mapping[str, str], saved: Mapping[str, SavedRank], report: Report
) -> Mapping[Rank, SavedRank]:
    """Return the files by rank, of which those in `saved` could be read; others are as those of their stage."""
    if "" in saved:
        return {Rank(0, 0, 0): saved[""]}
    sizes = next(iter(saved.values())).sizes
    has_stages = sizes.stages > 1 or sizes.experts == 1 if sizes else not all(map(has_embedding, saved.values()))
    places = place(root, find_directories(files), sizes, has_stages, report)
    of_stages = {rank.stage: saved[name] for rank, name in places.items() if name in saved}
    ranks: dict[Rank, SavedRank] = {}
    for rank, name in sorted(places.items()):
        like = saved.get(name) or of_stages.get(rank.stage)
        if like is None:
            message = f"no rank of stage {rank.stage} of the pipeline can be read, so its layers are unknown"
            raise Corrupt(message, path=root / name)
        ranks[rank] = like if name in saved else replace(like, path=files.get(name, f"{name}/{FILES[0]}"), is_lost=True)
    return ranks


def has_embedding(saved: SavedRank) -> bool:
    """Return whether a rank has the first tensor of a model, as only those of the first stage do."""
    return any(name.endswith(_EMBEDDING) for run in saved.models for name in saved.specs(run))


def check_same_job(job: Job) -> None:
    """Raise `Corrupt` if the files are of several saves, or of jobs of several sizes."""
    first = next(iter(job.ranks.values()))
    for saved in job.ranks.values():
        for what, one, other in (
            ("iteration", first.number("iteration"), saved.number("iteration")),
            ("checkpoint version", first.number(VERSION), saved.number(VERSION)),
            ("number of ranks", first.sizes, saved.sizes),
        ):
            if one != other:
                message = (
                    f"expected {what} {one} as in `{first.path}`, found {other}: this directory mixes "
                    "files of several saves"
                )
                raise Corrupt(message, path=job.root / saved.path)

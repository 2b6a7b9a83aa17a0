"""Pulls: a checkpoint from the Hub, every file compared with the sum that the Hub has of it. It appears whole.

What is here of an attempt that was interrupted, even half a file, is not fetched again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

from huggingface_hub import constants, hf_hub_download, hf_hub_url
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import build_hf_headers

from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.engine.workers import Step, work
from ckptkit.errors import Corrupt, Unsafe, Usage, translate_os_errors
from ckptkit.files.allocation import check_room, missing_bytes
from ckptkit.files.file import check_name
from ckptkit.files.path import to_local
from ckptkit.files.staging import WORK, Stage
from ckptkit.formats import detect_format
from ckptkit.hub.client import HubFile, Repository, look_up, parse_place, silent, talking
from ckptkit.hub.digests import difference, sum_all
from ckptkit.hub.transfers import Bars, FollowedWriter, Transfers, no_bar
from ckptkit.progress import Told, telling
from ckptkit.version import __version__

_OF_GIT = (".git*",)


@dataclass(frozen=True, slots=True)
class Pulled:
    """What was pulled: files by name and bytes, of which `fetched_bytes` had not come before in an earlier attempt.

    `format` is None if it is no checkpoint of a known one.
    """

    repo_id: str
    revision: str
    commit: str
    output: Path
    format: str | None
    files: Mapping[str, int]
    fetched_bytes: int
    seconds: float

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(self.files.values())


def pull(
    repo_id: str,
    out: str | Path,
    *,
    revision: str | None = None,
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
    overwrite: bool = False,
    jobs: int | None = None,
    sync: bool = True,
    bars: Bars = no_bar,
) -> Pulled:
    """Fetch the files of `org/model[@revision]` from the Hub into directory `out`, those that the globs choose.

    Raises `NotACheckpoint` if there is no such repository, `Unsafe` if a name in it would leave the directory,
    `Corrupt` if what came is not what the Hub has, `NoRoom`, and `IOFailure` if the Hub cannot be reached.
    """
    began = time.perf_counter()
    name, at = parse_place(repo_id, revision)
    dst = to_local(out)
    with silent():
        found = look_up(name, at)
        files = choose(found, tuple(include), tuple(exclude))
        sizes = {file: remote.nbytes for file, remote in files.items()}
        with resumable(Stage(dst, overwrite=overwrite, sync=sync, key=make_key(found, files))) as stage:
            check_room(stage.dst, missing_bytes(stage.path, sizes))
            here = sum(min(size, bytes_in(stage.path / file)) for file, size in sizes.items())
            with bars("downloading") as progress:
                fetch(found, files, stage, Transfers(telling(progress, sum(sizes.values()))), jobs)
            with bars("verifying") as progress:
                check(stage.path, files, jobs, progress=telling(progress, sum(sizes.values())))
            part = next((part.path for part in Checkpoint.at(stage.path).parts), stage.path)
            reader = detect_format(part)
            stage.commit()
    seconds = time.perf_counter() - began
    is_known = reader.name if reader else None
    return Pulled(name, at, found.commit, dst, is_known, sizes, sum(sizes.values()) - here, seconds)


def choose(found: Repository, include: tuple[str, ...], exclude: tuple[str, ...]) -> dict[str, HubFile]:
    """The files to fetch: those that match a glob of `include`, if there is one, and none of `exclude`."""
    for name in found.files:
        check_path(name, found.repo_id)
    chosen = {
        name: file
        for name, file in found.files.items()
        if (not include or matches(name, include)) and not matches(name, (*exclude, *_OF_GIT))
    }
    if not chosen:
        what = "no file of the repository matches" if include or exclude else "the repository is empty"
        raise Usage(what, path=found.repo_id, hint=f"it has: {', '.join(list(found.files)[:8])}")
    return chosen


def matches(name: str, globs: Iterable[str]) -> bool:
    """True if a glob matches."""
    return any(fnmatchcase(name, glob) for glob in globs)


def check_path(name: str, repo_id: str) -> None:
    """Raise `Unsafe` unless `name` is that of a file in a repository: steps down, each a plain name."""
    for step in name.split("/"):
        check_name(step, Path(repo_id))
    if name.partition("/")[0] == WORK:
        raise Unsafe(f"the repository has a file `{name!a}`, a name that is ours", path=repo_id)


def make_key(found: Repository, files: Mapping[str, HubFile]) -> bytes:
    """What is being fetched: an attempt at the same is gone on with."""
    words = {
        "command": "pull",
        "ckptkit": __version__,
        "endpoint": constants.ENDPOINT,
        "repository": found.repo_id,
        "commit": found.commit,
        "files": sorted(files),
    }
    return json.dumps(words, indent=1).encode()


@contextmanager
def resumable(stage: Stage) -> Iterator[Stage]:
    """The stage, open; what is in it is kept after whatever error, if there is something to go on with."""
    try:
        yield stage.open()
    except BaseException as error:
        if any(path.is_file() for path in stage.path.rglob("*") if WORK not in path.parts):
            stage.leave()
            error.add_note(f"the same command goes on with what is in {stage.path}")
        else:
            stage.discard()
        raise


def fetch(
    found: Repository, files: Mapping[str, HubFile], stage: Stage, transfers: Transfers, jobs: int | None
) -> None:
    """Fetch what is not here, several files at once; of a file that is here in part, the rest."""

    @contextmanager
    def fetching() -> Iterator[Step[str]]:
        def step(name: str) -> None:
            path, nbytes = stage.path / name, files[name].nbytes
            with transfers.one(name, nbytes):
                with translate_os_errors(path):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    if bytes_in(path) > nbytes:
                        path.unlink()
                if nbytes > constants.MAX_HTTP_DOWNLOAD_SIZE:
                    fetch_huge(found, name, stage)
                else:
                    fetch_rest(found, name, nbytes, path, transfers)

        yield step

    work(files, fetching, jobs)


def fetch_rest(found: Repository, name: str, nbytes: int, path: Path, transfers: Transfers) -> None:
    """Fetch what is missing at the end of a file."""
    with talking(found.repo_id, found.commit, path), FollowedWriter(path, partial(transfers.reach, name)) as file:
        transfers.reach(name, file.tell())
        http_get(
            hf_hub_url(found.repo_id, name, revision=found.commit),
            file,
            resume_size=file.tell(),
            headers=build_hf_headers(library_name="ckptkit", library_version=__version__),
            expected_size=nbytes,
        )


def fetch_huge(found: Repository, name: str, stage: Stage) -> None:
    """Fetch a file that is too large for plain HTTP, by the client's own means; half of it cannot be gone on with."""
    path = stage.path / name
    if not path.exists():
        with talking(found.repo_id, found.commit, path):
            hf_hub_download(found.repo_id, name, revision=found.commit, local_dir=stage.work)
            (stage.work / name).rename(path)


def check(root: Path, files: Mapping[str, HubFile], jobs: int | None, progress: Told | None) -> None:
    """Raise `Corrupt` if a file is not what the Hub has; those that are not are removed, to be fetched again."""
    sums = sum_all({name: root / name for name in files}, jobs, progress)
    wrong = {}
    for name, remote in files.items():
        found = difference(root / name, sums[name], remote)
        if found is not None:
            wrong[name] = found
            with translate_os_errors(root / name):
                (root / name).unlink()
    for name, found in wrong.items():
        hint = "pull it again: only the files that are wrong are fetched again"
        raise Corrupt(found, path=name, hint=hint)


def bytes_in(path: Path) -> int:
    """Bytes in a file; none if there is no such file."""
    with translate_os_errors(path):
        return path.lstat().st_size if path.exists() else 0

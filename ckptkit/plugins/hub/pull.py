"""Pull a checkpoint from the Hub, and verify every file with its checksum on the Hub. The output is atomic.

After an interruption, the next pull continues: it does not download bytes again, also within a file.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from io import SEEK_END
from pathlib import Path
from typing import BinaryIO, cast

from huggingface_hub import constants, hf_hub_download, hf_hub_url
from huggingface_hub.file_download import http_get
from tqdm.utils import CallbackIOWrapper

from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.checkpoints.replaceable import check_replaceable
from ckptkit.errors import Corrupt, Unsafe, Usage, translate_os_errors
from ckptkit.formats import detect_format
from ckptkit.io.allocation import require_free_space, unallocated_bytes
from ckptkit.io.file import require_plain_file_name
from ckptkit.io.path import to_local_path
from ckptkit.io.progress import BytesDone, make_progress_reporter
from ckptkit.io.staging import WORK, Stage
from ckptkit.io.stores.hub import request_headers
from ckptkit.io.stores.hub_calls import HubFile, HubRepository, require_repository, silenced_hub_client
from ckptkit.io.stores.hub_errors import translate_hub_errors
from ckptkit.plugins.hub.push import parse_repository_address
from ckptkit.plugins.hub.transfers import (
    Bars,
    Follow,
    differences_from_hub,
    no_progress,
    sha256_by_name,
    transfer_each_file,
)
from ckptkit.summary import Summarized
from ckptkit.version import __version__
from ckptkit.words import count, format_bytes

_OF_GIT = (".git*",)


@dataclass(frozen=True, slots=True)
class Pulled(Summarized):
    """The result of a pull. `files` has the size of each file in bytes, by name.

    This call downloaded `fetched_bytes`; an interrupted call had downloaded the others. `format` is None if the files
    are not a checkpoint in a known format.
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
        return sum(self.files.values())

    def summary(self) -> Iterator[str]:
        yield f"pulled {self.repo_id}, {self.revision} at {self.commit[:8]}, into {self.output}"
        yield f"{count(len(self.files), 'file')}, {format_bytes(self.nbytes)} in {self.seconds:.2f} s"


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
    bars: Bars = no_progress,
) -> Pulled:
    """Download the files of `org/model[@revision]` that match the globs from the Hub into directory `out`.

    Raises `NotACheckpoint` if the repository does not exist, `Unsafe` if a file name is a path traversal, `Corrupt` if
    a downloaded file differs from the Hub's checksum, `NoRoom` if the disk is too small, and `IOFailure` if the Hub
    cannot be reached.
    """
    began = time.perf_counter()
    name, at = parse_repository_address(repo_id, revision)
    dst = to_local_path(out)
    with silenced_hub_client():
        repository = require_repository(name, at)
        files = choose_files_to_pull(repository, tuple(include), tuple(exclude))
        sizes = {file: remote.nbytes for file, remote in files.items()}
        if overwrite:
            check_replaceable(dst, repository.files)
        stage = Stage(dst, overwrite=overwrite, sync=sync, key=pull_resume_key(repository, files))
        # an output with any file, complete or partial, can be continued
        with stage.opened(lambda _: any(p.is_file() for p in stage.path.rglob("*") if WORK not in p.parts)):
            require_free_space(stage.dst, unallocated_bytes(stage.path, sizes))
            earlier_bytes = sum(min(size, size_or_zero(stage.path / file)) for file, size in sizes.items())
            with bars("downloading") as progress:
                download_missing_files(
                    repository, files, stage, jobs, make_progress_reporter(progress, sum(sizes.values()))
                )
            with bars("verifying") as progress:
                verify_or_delete_downloads(
                    stage.path, files, jobs, make_progress_reporter(progress, sum(sizes.values()))
                )
            part = next((part.path for part in Checkpoint.at(stage.path).components), stage.path)
            reader = detect_format(part)
            stage.commit()
    seconds = time.perf_counter() - began
    format_name = reader.name if reader else None
    return Pulled(name, at, repository.commit, dst, format_name, sizes, sum(sizes.values()) - earlier_bytes, seconds)


def choose_files_to_pull(
    repository: HubRepository, include: tuple[str, ...], exclude: tuple[str, ...]
) -> dict[str, HubFile]:
    """Return the files to download, by name: those that match `include` (default: all) and do not match `exclude`.

    Raises `Unsafe` for an unsafe name, and `Usage` if no file is left.
    """
    for name in repository.files:
        require_safe_file_name(name, repository.repo_id)
    chosen = {
        name: file
        for name, file in repository.files.items()
        if (not include or matches_glob(name, include)) and not matches_glob(name, (*exclude, *_OF_GIT))
    }
    if not chosen:
        what = "no file of the repository matches" if include or exclude else "the repository has no files to pull"
        hint = "check the name and --revision"
        if include or exclude:
            hint = f"change --include or --exclude: it has {', '.join(list(repository.files)[:8])}"
        raise Usage(what, path=repository.repo_id, hint=hint)
    return chosen


def matches_glob(name: str, globs: Iterable[str]) -> bool:
    return any(fnmatchcase(name, glob) for glob in globs)


def require_safe_file_name(name: str, repo_id: str) -> None:
    """Raise `Unsafe` for a path traversal in a file name, and for a name that ckptkit reserves."""
    for component in name.split("/"):
        require_plain_file_name(component, Path(repo_id))
    if name.partition("/")[0] == WORK:
        raise Unsafe(f"the repository has a file `{name!a}`, a name that ckptkit uses itself", path=repo_id)


def pull_resume_key(repository: HubRepository, files: Mapping[str, HubFile]) -> bytes:
    """Return a key for the pull: a later call with the same key continues it after an interruption."""
    key = {
        "command": "pull",
        "ckptkit": __version__,
        "endpoint": constants.ENDPOINT,
        "repository": repository.repo_id,
        "commit": repository.commit,
        "files": sorted(files),
    }
    return json.dumps(key, indent=1).encode()


def download_missing_files(
    repository: HubRepository, files: Mapping[str, HubFile], stage: Stage, jobs: int | None, advance: BytesDone | None
) -> None:
    """Download the missing files, and the missing ends of partial files, several at once."""

    def fetch_one(name: str, follow: Follow) -> None:
        path, nbytes = stage.path / name, files[name].nbytes
        with translate_os_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            if size_or_zero(path) > nbytes:
                path.unlink()
        with translate_hub_errors(repository.repo_id, repository.commit, path):
            if nbytes <= constants.MAX_HTTP_DOWNLOAD_SIZE:
                url = hf_hub_url(repository.repo_id, name, revision=repository.commit)
                path.touch()
                with path.open("r+b") as file:
                    present = file.seek(0, SEEK_END)
                    follow(present)
                    followed_file = cast(BinaryIO, CallbackIOWrapper(lambda _: follow(file.tell()), file, "write"))
                    http_get(url, followed_file, resume_size=present, headers=request_headers(), expected_size=nbytes)
            elif not path.exists():  # `hf_hub_download` cannot resume a partial file
                hf_hub_download(repository.repo_id, name, revision=repository.commit, local_dir=stage.notes_directory)
                (stage.notes_directory / name).rename(path)

    transfer_each_file({name: remote.nbytes for name, remote in files.items()}, fetch_one, jobs, advance)


def verify_or_delete_downloads(
    root: Path, files: Mapping[str, HubFile], jobs: int | None, advance: BytesDone | None
) -> None:
    """Raise `Corrupt` if a file differs from the Hub's. Removes such files, so that the next pull downloads them."""
    contents = {name: root / name for name in files}
    wrong = differences_from_hub(contents, sha256_by_name(contents, jobs, advance), files)
    for name in wrong:
        with translate_os_errors(root / name):
            (root / name).unlink()
    for name, words in wrong.items():
        raise Corrupt(words, path=name, hint="pull it again: only the files that are wrong are fetched again")


def size_or_zero(path: Path) -> int:
    """Return the size of a file in bytes; 0 if it does not exist."""
    with translate_os_errors(path):
        return path.lstat().st_size if path.exists() else 0

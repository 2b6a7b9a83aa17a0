"""Pushes: a checkpoint to the Hub, verified on both sides. It appears there whole, in one commit, or not at all.

Large files are sent first, which changes no branch; those that arrived are not sent again by the next attempt.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, get_token

from ckptkit.engine.workers import Step, work
from ckptkit.errors import Corrupt, IOFailure, Unsafe, Usage
from ckptkit.files.path import RemotePath, to_path
from ckptkit.hub.client import MAIN, Repository, connect, find, look_up, page_of, parse_place, silent, talking
from ckptkit.hub.contents import Parcel, pack
from ckptkit.hub.digests import difference, require_same, sum_all
from ckptkit.hub.model_card import NAME as CARD
from ckptkit.hub.transfers import Bars, Follow, FollowedReader, Transfers, no_bar
from ckptkit.ops.verify import size_of, verify_part
from ckptkit.progress import Told, telling
from ckptkit.version import __version__

_DAMAGED = "push it again; if that does not help, remove the file on the Hub first"


@dataclass(frozen=True, slots=True)
class Pushed:
    """What was, or unless `is_done` would be, pushed from where to where.

    Of the `files` by name and bytes those `unchanged` were there already; `removed` are of an earlier checkpoint that
    this one does not have; `left_out` are files that stay here, with why. `has_card` says that the model card was made.
    """

    source: Path
    repo_id: str
    revision: str
    url: str
    format: str
    is_new: bool
    is_private: bool
    files: Mapping[str, int]
    removed: tuple[str, ...]
    left_out: Mapping[str, str]
    has_card: bool
    notes: tuple[str, ...] = ()
    is_done: bool = False
    commit: str | None = None
    unchanged: frozenset[str] = frozenset()
    seconds: float = 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(self.files.values())


class Addition(CommitOperationAdd):
    """A file to be sent that tells how far it is, and whose SHA-256 is known."""

    def __init__(self, name: str, content: Path | bytes, sha256: str, follow: Follow) -> None:
        super().__init__(name, content if isinstance(content, bytes) else str(content.absolute()))
        self.upload_info.sha256 = bytes.fromhex(sha256)
        self._follow = follow

    @contextmanager
    def as_file(self, with_tqdm: bool = False) -> Iterator[Any]:
        """As the client asks for its content."""
        if not isinstance(self.path_or_fileobj, str):
            with super().as_file(with_tqdm) as file:
                yield file
            return
        with FollowedReader(Path(self.path_or_fileobj), self._follow) as file:
            yield file


def push(
    path: str | Path,
    repo_id: str,
    *,
    public: bool = False,
    revision: str | None = None,
    message: str | None = None,
    yes: bool = False,
    jobs: int | None = None,
    bars: Bars = no_bar,
) -> Pushed:
    """Push the checkpoint at `path`, or the latest of the run at `path`, to `org/model` on the Hub, if `yes`.

    A repository that is made for it is private unless `public`; one that is there stays what it is, and keeps its
    model card. Raises `Corrupt` if the checkpoint is damaged here or there, and `IOFailure` if the Hub cannot be
    reached or refuses.
    """
    began = time.perf_counter()
    name, at = parse_place(repo_id, revision)
    source = to_path(path)
    if isinstance(source, RemotePath):
        raise Usage("only local checkpoints are pushed", path=source, hint="`ckptkit consolidate` brings it here first")
    parcel = pack(source, name)
    with silent():
        if get_token() is None:
            raise IOFailure("the Hub takes nothing from a stranger", hint="`hf auth login`, or set HF_TOKEN")
        head = find(name, at)
        basis = find(name, MAIN) if head is None and at != MAIN else head
        if basis and CARD in basis.files:
            parcel = parcel.keep_card()
        plan = make_plan(parcel, name, at, basis, public=public)
        if not yes:
            return plan
        with bars("verifying") as progress:
            sums = examine(parcel, jobs, telling(progress, size_of(parcel.root) + plan.nbytes))
        if basis is None:
            basis = create(name, private=not public)
            head = basis if at == MAIN else None
        done = send(parcel, plan, sums, basis, has_branch=head is not None, message=message, jobs=jobs, bars=bars)
    return replace(done, seconds=time.perf_counter() - began)


def make_plan(parcel: Parcel, repo_id: str, revision: str, basis: Repository | None, *, public: bool) -> Pushed:
    """What there is to do, given what is on the Hub."""
    there = basis.files if basis else {}
    notes = []
    if basis and public and basis.is_private:
        notes.append("the repository is there, and private; it stays so")
    if parcel.layout.format != "hf":
        notes.append("not a model that transformers loads: `ckptkit consolidate` makes one")
    return Pushed(
        parcel.root,
        repo_id,
        revision,
        page_of(repo_id),
        parcel.layout.format,
        basis is None,
        basis.is_private if basis else not public,
        parcel.sizes,
        tuple(name for name in sorted(there) if name not in parcel.contents and parcel.reader.owns(name)),
        parcel.left_out,
        parcel.has_card and CARD in parcel.contents,
        tuple(notes),
    )


def examine(parcel: Parcel, jobs: int | None, told: Told | None) -> dict[str, str]:
    """The SHA-256 of each file. Raises `Corrupt` if there is anything wrong with the checkpoint."""
    found = verify_part(parcel.root, jobs=jobs, progress=told)
    if found.problems:
        first, count = found.problems[0], len(found.problems)
        message = first.message if count == 1 else f"{first.message}; the first of {count} problems"
        hint = f"`ckptkit verify {parcel.root}` lists all problems; nothing was pushed"
        raise Corrupt(message, path=first.path, tensor=first.tensor, offset=first.offset, hint=hint)
    return sum_all(parcel.contents, jobs, told)


def create(repo_id: str, *, private: bool) -> Repository:
    """Make a repository. Raises `Unsafe` if the Hub made it public and it was to be private."""
    with talking(repo_id):
        connect().create_repo(repo_id, private=private)
    made = look_up(repo_id, MAIN)
    if private and not made.is_private:
        raise Unsafe("the Hub made the repository public; nothing was pushed", path=repo_id)
    return made


def send(
    parcel: Parcel,
    plan: Pushed,
    sums: Mapping[str, str],
    basis: Repository,
    *,
    has_branch: bool,
    message: str | None,
    jobs: int | None,
    bars: Bars,
) -> Pushed:
    """Send what the Hub does not have, let it appear, and compare what is there then."""
    changed = {
        name: content
        for name, content in parcel.contents.items()
        if difference(content, sums[name], basis.files.get(name)) is not None
    }
    with bars("uploading") as progress:
        transfers = Transfers(telling(progress, sum(plan.files[name] for name in changed)))
        additions = [
            Addition(name, content, sums[name], partial(transfers.reach, name)) for name, content in changed.items()
        ]
        upload(plan.repo_id, plan.revision if has_branch else None, additions, transfers, jobs)
        commit = basis.commit
        with talking(plan.repo_id, plan.revision):
            if not has_branch:
                connect().create_branch(plan.repo_id, branch=plan.revision, revision=basis.commit)
            if changed or plan.removed:
                commit = (
                    connect()
                    .create_commit(
                        plan.repo_id,
                        [*additions, *(CommitOperationDelete(name) for name in plan.removed)],
                        commit_message=message or f"Upload {parcel.root.resolve().name} with ckptkit {__version__}",
                        revision=plan.revision,
                        parent_commit=basis.commit,
                    )
                    .oid
                )
    require_same(parcel.contents, sums, look_up(plan.repo_id, commit).files, _DAMAGED)
    return replace(plan, is_done=True, commit=commit, unchanged=frozenset(plan.files.keys() - changed))


def upload(
    repo_id: str, revision: str | None, additions: list[Addition], transfers: Transfers, jobs: int | None
) -> None:
    """Send the content of large files, so that a commit can name it. Small ones are sent with the commit."""
    api = connect()

    @contextmanager
    def sending() -> Iterator[Step[Addition]]:
        def step(addition: Addition) -> None:
            with transfers.one(addition.path_in_repo, addition.upload_info.size), talking(repo_id):
                api.preupload_lfs_files(repo_id, [addition], revision=revision, free_memory=False)

        yield step

    work(additions, sending, jobs)

"""Push a checkpoint to the Hub in one commit, and verify it before and after.

Large files are uploaded before the commit. After an interruption, the next push does not upload them again.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete

from ckptkit.checkpoints.checkpoint import Source, path_of
from ckptkit.checks.verify import require_sound, size_of, verify_part
from ckptkit.errors import Corrupt, Usage
from ckptkit.hub.model_card import NAME as CARD
from ckptkit.hub.selection import Selection, select_files
from ckptkit.hub.transfers import Bars, Content, Follow, FollowedReader, differences, for_each, no_bar, sum_all
from ckptkit.io.path import is_remote
from ckptkit.io.progress import Told, report_progress
from ckptkit.io.stores.hub import connect
from ckptkit.io.stores.hub_calls import (
    HubRepository,
    create_branch,
    create_repository,
    find_repository,
    look_up,
    require_token,
    silent,
)
from ckptkit.io.stores.hub_errors import MAIN, page_of, translate_hub_errors
from ckptkit.summary import Summarized
from ckptkit.version import __version__
from ckptkit.words import count, format_bytes

_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)


def parse_place(place: str, revision: str | None = None) -> tuple[str, str]:
    """Return repository and revision of `org/model`, `org/model@revision` or `hf://org/model`. Raises `Usage`."""
    repo_id, _, named = place.removeprefix("hf://").partition("@")
    if not _ID.fullmatch(repo_id):
        raise Usage(
            f"expected a repository like org/model, found `{place}`",
            hint="write it like org/model, or org/model@revision",
        )
    if named and revision not in (None, named):
        raise Usage(f"`{place}` names one revision and --revision another")
    return repo_id, named or revision or MAIN


_DAMAGED = "push it again; if that does not help, remove the file on the Hub first"


@dataclass(frozen=True, slots=True)
class Pushed(Summarized):
    """A push of the checkpoint at `source` to `revision` of a repository; unless `is_done`, only its plan.

    `files` has the size of each file in bytes, by name. `unchanged` files are already on the Hub. `removed` files on
    the Hub belong to an earlier checkpoint. `left_out` has the local files that are not pushed, with reasons.
    `has_card` means that ckptkit writes the model card.
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

    def summary(self) -> Iterator[str]:
        yield f"{'pushed' if self.is_done else 'would push'} {self.source} to {self.url}"
        yield f"{count(len(self.files), 'file')}, {format_bytes(self.nbytes)}"

    @property
    def nbytes(self) -> int:
        """Return the bytes of all files."""
        return sum(self.files.values())


class Addition(CommitOperationAdd):
    """A file to upload with a known SHA-256, which reports the position that the upload has reached."""

    def __init__(self, name: str, content: Content, sha256: str, follow: Follow) -> None:
        super().__init__(name, content if isinstance(content, bytes) else str(content.absolute()))
        self.upload_info.sha256 = bytes.fromhex(sha256)
        self._follow = follow

    @contextmanager
    def as_file(self, with_tqdm: bool = False) -> Iterator[Any]:
        """Open the content for the Hub's client."""
        if not isinstance(self.path_or_fileobj, str):
            with super().as_file(with_tqdm) as file:
                yield file
            return
        with FollowedReader(Path(self.path_or_fileobj), self._follow) as file:
            yield file


def push(
    path: Source,
    repo_id: str,
    *,
    public: bool = False,
    revision: str | None = None,
    message: str | None = None,
    yes: bool = False,
    jobs: int | None = None,
    bars: Bars = no_bar,
) -> Pushed:
    """With `yes`, push the checkpoint at `path`, or the latest of the run at `path`, to `org/model` on the Hub.

    Without `yes` only returns the plan. A new repository is private unless `public`. An existing repository stays
    private or public, and keeps its model card. Raises `Corrupt` if the checkpoint is damaged locally or on the Hub,
    and `IOFailure` if the Hub cannot be reached or refuses.
    """
    began = time.perf_counter()
    name, at = parse_place(repo_id, revision)
    source = path_of(path)
    if is_remote(source):
        raise Usage("only local checkpoints are pushed", path=source, hint="copy it here with `ckptkit consolidate`")
    selection = select_files(source, name)
    with silent():
        require_token()
        head = find_repository(name, at)
        basis = find_repository(name, MAIN) if head is None and at != MAIN else head
        if basis and CARD in basis.files:
            selection = selection.without_card()
        plan = make_plan(selection, name, at, basis, public=public)
        if not yes:
            return plan
        with bars("verifying") as progress:
            sums = verify_and_sum(selection, jobs, report_progress(progress, size_of(selection.root) + plan.nbytes))
        if basis is None:
            basis = create_repository(name, private=not public)
            head = basis if at == MAIN else None
        done = send(selection, plan, sums, basis, has_branch=head is not None, message=message, jobs=jobs, bars=bars)
    return replace(done, seconds=time.perf_counter() - began)


def make_plan(
    selection: Selection, repo_id: str, revision: str, basis: HubRepository | None, *, public: bool
) -> Pushed:
    """Return the plan of a push. `basis` is the state of the repository, None for a new repository."""
    remote_files = basis.files if basis else {}
    notes = []
    if basis and public and basis.is_private:
        notes.append("the repository exists and stays private")
    if selection.layout.format != "hf":
        notes.append("not a model that transformers loads: `ckptkit consolidate` makes one")
    return Pushed(
        selection.root,
        repo_id,
        revision,
        page_of(repo_id),
        selection.layout.format,
        basis is None,
        basis.is_private if basis else not public,
        selection.sizes,
        tuple(name for name in sorted(remote_files) if name not in selection.contents and selection.reader.owns(name)),
        selection.left_out,
        selection.has_card and CARD in selection.contents,
        tuple(notes),
    )


def verify_and_sum(selection: Selection, jobs: int | None, advance: Told | None) -> dict[str, str]:
    """Return the SHA-256 of each file. Raises `Corrupt` if the checkpoint is damaged."""
    verified = verify_part(selection.root, jobs=jobs, progress=advance)
    require_sound(verified, f"`ckptkit verify {selection.root}` lists all problems; nothing was pushed")
    return sum_all(selection.contents, jobs, advance)


def send(
    selection: Selection,
    plan: Pushed,
    sums: Mapping[str, str],
    basis: HubRepository,
    *,
    has_branch: bool,
    message: str | None,
    jobs: int | None,
    bars: Bars,
) -> Pushed:
    """Upload the files that the Hub does not have, commit them, and compare the Hub with the local files.

    `basis` is the state of the repository before the push. Raises `Corrupt` if a file on the Hub differs afterwards.
    """
    changed = differences(selection.contents, sums, basis.files)
    commit = basis.commit
    with bars("uploading") as progress:
        advance = report_progress(progress, sum(plan.files[name] for name in changed))
        additions = upload(plan, {name: selection.contents[name] for name in changed}, sums, has_branch, jobs, advance)
        if not has_branch:
            create_branch(plan.repo_id, plan.revision, basis.commit)
        with translate_hub_errors(plan.repo_id, plan.revision):
            if changed or plan.removed:
                new_commit = connect().create_commit(
                    plan.repo_id,
                    [*additions, *map(CommitOperationDelete, plan.removed)],
                    commit_message=message or f"Upload {selection.root.resolve().name} with ckptkit {__version__}",
                    revision=plan.revision,
                    parent_commit=basis.commit,  # the Hub refuses if somebody else has pushed meanwhile
                )
                commit = new_commit.oid
    for name, words in differences(selection.contents, sums, look_up(plan.repo_id, commit).files).items():
        content = selection.contents[name]
        raise Corrupt(words, path=name if isinstance(content, bytes) else content, hint=_DAMAGED)
    return replace(plan, is_done=True, commit=commit, unchanged=frozenset(plan.files.keys() - changed))


def upload(
    plan: Pushed,
    contents: Mapping[str, Content],
    sums: Mapping[str, str],
    has_branch: bool,
    jobs: int | None,
    advance: Told | None,
) -> list[Addition]:
    """Upload the large files, and return the additions for a commit, which contains the small files itself."""
    additions: dict[str, Addition] = {}

    def send_one(name: str, follow: Follow) -> None:
        additions[name] = Addition(name, contents[name], sums[name], follow)
        revision = plan.revision if has_branch else None
        with translate_hub_errors(plan.repo_id):
            connect().preupload_lfs_files(plan.repo_id, [additions[name]], revision=revision, free_memory=False)

    for_each({name: plan.files[name] for name in contents}, send_one, jobs, advance)
    return [additions[name] for name in contents]

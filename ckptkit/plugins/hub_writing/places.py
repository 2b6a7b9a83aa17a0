"""Look at the repository or bucket of the Hub that a URL names, before anything is written to it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ckptkit.errors import CkptError, Unsupported, Usage
from ckptkit.io.path import RemotePath
from ckptkit.io.stores.hub import parse_repository
from ckptkit.io.stores.hub_calls import BUCKET, HubRepository, find, is_private_bucket, require_token, silent
from ckptkit.io.stores.hub_errors import MAIN, page_of

_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class Prospect:
    """A repository that is to be written to: its `head`, the `basis` of a new commit, and the files that it has.

    Without a head the branch is new, and without a basis the repository is.
    """

    repo_id: str
    revision: str
    head: HubRepository | None
    basis: HubRepository | None

    def __str__(self) -> str:
        at = "" if self.revision == MAIN else f", {'branch' if self.head else 'new branch'} {self.revision}"
        access = "private" if self.basis is None or self.basis.is_private else "public"
        return f"{page_of(self.repo_id)}{at} ({'new, ' if self.basis is None else ''}{access})"


def look_at(path: RemotePath) -> Prospect:
    """Return what is in the repository that a path names, where a branch may be written to."""
    kind, repo_id, named = parse_repository(str(path.top).partition("://")[2])
    revision = named or MAIN
    if kind != "model":
        hint = "write to hf://org/name or to hf://buckets/org/name/folder"
        raise Unsupported("ckptkit writes to repositories of models only", path=path, hint=hint)
    if _COMMIT.fullmatch(revision):
        raise Usage("a commit cannot be written to", path=path, hint="name a branch, or drop @")
    try:
        head = find(repo_id, revision)
        basis = find(repo_id, MAIN) if head is None and revision != MAIN else head
    except CkptError as error:
        raise error.blame(path=path) from error.__cause__
    return Prospect(repo_id, revision, head, basis)


def describe_place(path: RemotePath) -> str:
    """Return the address of what a URL names, and whether it would be made, and is for all to see."""
    with silent():
        require_token()
        if path.parts[1] != BUCKET:
            return str(look_at(path))
        bucket_id = bucket_of(path)
        is_private = is_private_bucket(bucket_id)
        access = "public" if is_private is False else "private"
        return f"{page_of(f'{BUCKET}/{bucket_id}')} ({'new, ' if is_private is None else ''}{access})"


def bucket_of(path: RemotePath) -> str:
    """Return the name of a bucket, with its namespace, by which the Hub is asked."""
    return "/".join(path.top.parts[2:])

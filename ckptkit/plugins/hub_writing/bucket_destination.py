"""Write to a Hub bucket: first the files, then each marker file, once all other files are visible.

A bucket changes file by file, without conditional requests. So the claim is a file that any other process could
replace: it protects from an upload that starts later, but not from one that starts at the same moment.
https://huggingface.co/docs/hub/storage-buckets
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from ckptkit.errors import CkptError, IOFailure, Occupied, Unsupported, Usage
from ckptkit.io.claims import StoreClaim, UploadTarget
from ckptkit.io.destination import CLAIM, Check
from ckptkit.io.file import destination_exists, read_small
from ckptkit.io.path import RemotePath, refresh
from ckptkit.io.pieces import is_large
from ckptkit.io.stores.hub import parse_repository
from ckptkit.io.stores.hub_calls import HubRepository, find_repository, require_token, silent
from ckptkit.io.stores.hub_errors import AGAIN, MAIN, page_of
from ckptkit.plugins.hub_writing.calls import (
    BUCKET,
    Line,
    StoredFile,
    ask_access,
    change_bucket,
    create_bucket,
    describe_paths,
    is_private_bucket,
    list_bucket,
)
from ckptkit.plugins.hub_writing.xet import XetDestination, XetFile, XetFiles, find_session

_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class TargetRepository:
    """The repository to write to: the `head` of the branch, and the `basis` of the new commit.

    `head` is None for a new branch, `basis` is None for a new repository.
    """

    repo_id: str
    revision: str
    head: HubRepository | None
    basis: HubRepository | None

    def __str__(self) -> str:
        at = "" if self.revision == MAIN else f", {'branch' if self.head else 'new branch'} {self.revision}"
        access = "private" if self.basis is None or self.basis.is_private else "public"
        return f"{page_of(self.repo_id)}{at} ({'new, ' if self.basis is None else ''}{access})"


def examine_repository(path: RemotePath) -> TargetRepository:
    """Return the state of the repository and branch in `path`.

    Raises `Unsupported` for a repository of another kind, `Usage` for a commit instead of a branch.
    """
    kind, repo_id, named = parse_repository(str(path.top).partition("://")[2])
    revision = named or MAIN
    if kind != "model":
        hint = "write to hf://org/name or to hf://buckets/org/name/folder"
        raise Unsupported("ckptkit writes to repositories of models only", path=path, hint=hint)
    if _COMMIT.fullmatch(revision):
        raise Usage("a commit cannot be written to", path=path, hint="name a branch, or drop @")
    try:
        head = find_repository(repo_id, revision)
        basis = find_repository(repo_id, MAIN) if head is None and revision != MAIN else head
    except CkptError as error:
        raise error.blame(path=path) from error.__cause__
    return TargetRepository(repo_id, revision, head, basis)


def describe_place(path: RemotePath) -> str:
    """Return the address of a destination, and whether it is new, private or public."""
    with silent():
        require_token()
        if path.parts[1] != BUCKET:
            return str(examine_repository(path))
        bucket_id = bucket_of(path)
        is_private = is_private_bucket(bucket_id)
        access = "public" if is_private is False else "private"
        return f"{page_of(f'{BUCKET}/{bucket_id}')} ({'new, ' if is_private is None else ''}{access})"


def bucket_of(path: RemotePath) -> str:
    """Return the bucket id with its namespace, as requests to the Hub need it."""
    return "/".join(path.top.parts[2:])


_MOST = 100  # file changes per request
_CLAIM_LIMIT = 1 << 16  # bytes


@dataclass(slots=True)
class HubBucketDestination(XetDestination):
    """A folder of a bucket, or a single file: a `Destination`."""

    _claim: XetFile = field(init=False, repr=False)
    _shown: set[str] = field(default_factory=set)

    @property
    def sent_bytes(self) -> int:
        return self._files.sent_bytes

    def claim(self, *, overwrite: bool, check: Check) -> None:
        """Claim the folder for this upload; see `Destination`."""
        with ExitStack() as quiet:
            quiet.enter_context(silent())
            require_token()
            find_session()
            if is_private_bucket(self._id) is None:
                create_bucket(self._id)
            existing = self._list()
            previous = self._read_claim()
            is_ours = previous is not None and previous.plan == self.plan
            if previous is not None and not is_ours and not overwrite:
                raise self._place.is_held(previous)
            if existing and not is_ours and not overwrite:
                raise destination_exists(self.path)
            first = check() if existing and previous is None else ()
            self._files = XetFiles(self.path, ask_access(BUCKET, self._id))
            self._put_claim()
            if not is_ours:
                marks = dict.fromkeys(name for name in (*first, *self.marks) if name in existing)
                for names in (marks, existing.keys() - marks.keys()):
                    self._change([{"type": "deleteFile", "path": self._place.key(name)} for name in sorted(names)])
            self._quiet = quiet.pop_all()

    def put_small(self, name: str, data: bytes | bytearray | memoryview, crc: int) -> None:  # noqa: ARG002
        """Send a full file to the storage."""
        self._files.put_small(name, data)

    def complete(self, name: str, crc: int) -> None:
        """Check that the CRC-32 of a large file equals the CRC-32 of the sent bytes. Makes a marker visible."""
        if is_large(self.sizes[name]):
            self._files.require_same(name, crc)
            if name in self.marks:
                self._show_mark(name)

    def mark(self, name: str, data: bytes | bytearray | memoryview, crc: int) -> None:
        """Send a marker file, and make it visible after all other files."""
        self.put_small(name, data, crc)
        self._show_mark(name)

    def commit(self) -> None:
        """Make all files visible, and delete the claim: the upload is complete."""
        with self._quiet:
            self._show_others()
            self._change([{"type": "deleteFile", "path": self._place.claim_key}])

    def remarks(self) -> list[str]:
        """Return the limits of the store."""
        return ["a bucket does not refuse to replace a file: two uploads that start at the same moment could collide"]

    def _show_mark(self, name: str) -> None:
        self._show_others()
        listed = describe_paths(self._id, [self._place.claim_key, self._place.key(name)])
        if listed.get(self._place.claim_key) != expected_entry(self._claim):
            raise self._place.was_lost()
        if listed.get(self._place.key(name), expected_entry(self._files.sent[name])) != expected_entry(
            self._files.sent[name]
        ):
            hint = "delete this file, then run the same command again"
            raise Occupied("another file is there", path=self.path / name, hint=hint)
        self._show([name])

    def _show_others(self) -> None:
        """Make all files visible that are no markers and not visible yet."""
        self._show([name for name in sorted(self._files.sent) if name not in self.marks and name not in self._shown])

    def _show(self, names: Sequence[str]) -> None:
        """Make files visible, and check that the Hub lists them correctly."""
        if not names:
            return
        self._change([add_line(self._place.key(name), self._files.sent[name]) for name in names])
        self._shown.update(names)
        listed = self._list()
        for name in self._shown:
            sent, entry = expected_entry(self._files.sent[name]), listed.get(name)
            if entry != sent:
                found_text = f"found {entry.nbytes} bytes, hash {entry.xet_hash}" if entry else "found no such file"
                message = (
                    f"the bucket has other bytes: expected {sent.nbytes} bytes, hash {sent.xet_hash}; {found_text}"
                )
                raise IOFailure(message, path=self.path / name, hint=AGAIN)

    def _read_claim(self) -> StoreClaim | None:
        """Return the existing claim; None if there is none."""
        refresh(self.path)
        path = self._place.claim_path
        return self._place.parse_claim(read_small(path, _CLAIM_LIMIT)) if path.exists() else None

    def _put_claim(self) -> None:
        self._files.put_small(CLAIM, StoreClaim.begin(self.plan).to_bytes())
        self._claim = self._files.sent.pop(CLAIM)
        # the claim is not data of the checkpoint
        self._files.sent_bytes = 0
        self._change([add_line(self._place.claim_key, self._claim)])

    def _change(self, lines: Sequence[Line]) -> None:
        for start in range(0, len(lines), _MOST):
            change_bucket(self._id, lines[start : start + _MOST])

    def _list(self) -> dict[str, StoredFile]:
        """Return the files in the bucket by name, without the claim."""
        if self.is_file:
            (name,) = self.sizes
            described = describe_paths(self._id, [self.path.key])
            return {name: described[self.path.key]} if described else {}
        listed = list_bucket(self._id, self.path.key)
        listed.pop(CLAIM, None)
        return listed

    @property
    def _id(self) -> str:
        return bucket_of(self.path)

    @property
    def _place(self) -> UploadTarget:
        return UploadTarget(self.path, self.is_file)


def add_line(key: str, sent: XetFile) -> Line:
    """Return the operation that makes a file visible in the bucket."""
    return {"type": "addFile", "path": key, "xetHash": sent.hash, "mtime": int(time.time() * 1000)}


def expected_entry(sent: XetFile) -> StoredFile:
    """Return the entry with which a bucket lists a sent file."""
    return StoredFile(sent.nbytes, sent.hash)

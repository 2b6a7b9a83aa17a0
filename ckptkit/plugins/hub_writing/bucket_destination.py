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

from ckptkit.errors import IOFailure, Occupied, Usage, errors_at
from ckptkit.io.claims import ClaimedOutput, StoreClaim
from ckptkit.io.destination import CLAIM, Check
from ckptkit.io.path import RemotePath
from ckptkit.io.pieces import is_sent_in_pieces
from ckptkit.io.stores import StoreEntry
from ckptkit.io.stores.hub import parse_kind_id_and_revision
from ckptkit.io.stores.hub_calls import HubRepository, find_repository, require_token, silenced_hub_client
from ckptkit.io.stores.hub_errors import AGAIN, MAIN, repository_url
from ckptkit.plugins.hub_writing.bucket_store import HubBucketStore, to_entry
from ckptkit.plugins.hub_writing.calls import BUCKET, Line, request_xet_access
from ckptkit.plugins.hub_writing.xet import XetDestination, XetFile, XetFiles, require_session_class

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
        return f"{repository_url(self.repo_id)}{at} ({'new, ' if self.basis is None else ''}{access})"


def examine_repository(path: RemotePath) -> TargetRepository:
    """Return the state of the repository and branch in `path`. Raises `Usage` for a commit instead of a branch."""
    _, repo_id, named = parse_kind_id_and_revision(str(path.store_root).partition("://")[2])
    revision = named or MAIN
    if _COMMIT.fullmatch(revision):
        raise Usage("a commit cannot be written to", path=path, hint="name a branch, or drop @")
    with errors_at(path=path):
        head = find_repository(repo_id, revision)
        basis = find_repository(repo_id, MAIN) if head is None and revision != MAIN else head
    return TargetRepository(repo_id, revision, head, basis)


def describe_hub_destination(path: RemotePath) -> str:
    """Return the address of a destination, and whether it is new, private or public."""
    with silenced_hub_client():
        require_token()
        if path.parts[1] != BUCKET:
            return str(examine_repository(path))
        bucket = HubBucketStore(str(path.store_root))
        is_private = bucket.is_private
        access = "public" if is_private is False else "private"
        return f"{repository_url(f'{BUCKET}/{bucket.id}')} ({'new, ' if is_private is None else ''}{access})"


@dataclass(slots=True)
class HubBucketDestination(XetDestination, ClaimedOutput[HubBucketStore]):
    """A folder of a bucket, or a single file: a `Destination`."""

    _bucket: HubBucketStore = field(init=False, repr=False)
    _claim: XetFile = field(init=False, repr=False)
    _shown: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._bucket = HubBucketStore(str(self.path.store_root))

    def claim(self, *, overwrite: bool, check: Check) -> None:
        with ExitStack() as quiet:
            quiet.enter_context(silenced_hub_client())
            require_token()
            require_session_class()
            if self._bucket.is_private is None:
                self._bucket.create()
            self._files = XetFiles(self.path, request_xet_access(BUCKET, self._bucket.id))
            ClaimedOutput.claim(self, overwrite=overwrite, check=check)
            self._quiet = quiet.pop_all()

    def put_small_file(self, name: str, content: bytes | bytearray | memoryview, crc32: int) -> None:  # noqa: ARG002
        self._files.put_small_file(name, content)

    def finish_file(self, name: str, crc32: int) -> None:
        XetDestination.finish_file(self, name, crc32)
        if is_sent_in_pieces(self.sizes[name]) and name in self.marks:
            self._publish_marker(name)

    def put_marker(self, name: str, content: bytes | bytearray | memoryview, crc32: int) -> None:
        """Send a marker file, and make it visible after all other files."""
        self.put_small_file(name, content, crc32)
        self._publish_marker(name)

    def commit(self) -> None:
        """Make all files visible, and delete the claim: the upload is complete."""
        with self._quiet:
            self._publish_other_files()
            ClaimedOutput.commit(self)

    def missing_feature_remarks(self) -> list[str]:
        return ["a bucket does not refuse to replace a file: two uploads that start at the same moment could collide"]

    def _try_resume(self, begun: StoreClaim) -> bool:
        self._claimed = begun.files
        self._create_claim()
        # these are older files, or files that are sent again
        self._delete_claimed(begun.files, self._existing_files())
        return True

    def _create_claim(self) -> None:
        self._files.put_small_file(CLAIM, StoreClaim.begin(self.plan, self._claimed).to_bytes())
        self._claim = self._files.sent.pop(CLAIM)
        self._files.sent_bytes = 0  # the claim is not data of the checkpoint
        self._bucket.change_files([operation_to_add_file(self._upload_target.claim_key, self._claim)])

    def _publish_marker(self, name: str) -> None:
        self._publish_other_files()
        claim_key, key = self._upload_target.claim_key, self._upload_target.object_key(name)
        expected = expected_entry(key, self._files.sent[name])
        listed = self._bucket.find_objects([claim_key, key])
        if listed.get(claim_key) != expected_entry(claim_key, self._claim):
            raise self._upload_target.lost_claim_error()
        if listed.get(key, expected) != expected:
            hint = "delete this file, then run the same command again"
            raise Occupied("another file is there", path=self.path / name, hint=hint)
        self._publish_files([name])

    def _publish_other_files(self) -> None:
        """Make all files visible that are no markers and not visible yet."""
        self._publish_files(sorted(self._files.sent.keys() - set(self.marks) - self._shown))

    def _publish_files(self, names: Sequence[str]) -> None:
        """Make files visible, and check that the Hub lists them correctly."""
        if not names:
            return
        files = self._files.sent
        self._bucket.change_files(
            [operation_to_add_file(self._upload_target.object_key(name), files[name]) for name in names]
        )
        self._shown.update(names)
        listed = self._existing_files()
        for name in self._shown:
            sent, entry = expected_entry(name, files[name]), listed.get(name)
            if entry != sent:
                found = f"{entry.size} bytes, hash {entry.tag}" if entry else "no such file"
                expected = f"{sent.size} bytes, hash {sent.tag}"
                message = f"the bucket has other bytes: expected {expected}; found {found}"
                raise IOFailure(message, path=self.path / name, hint=AGAIN)


def operation_to_add_file(key: str, sent: XetFile) -> Line:
    """Return the operation that makes a file visible in the bucket."""
    return {"type": "addFile", "path": key, "xetHash": sent.hash, "mtime": int(time.time() * 1000)}


def expected_entry(key: str, sent: XetFile) -> StoreEntry:
    return to_entry(key, sent.nbytes, sent.hash)

"""Write to a Hub bucket: first the files, then each marker file, once all other files are visible.

A bucket changes file by file, without conditional requests. So the claim is a file that any other process could
replace: it protects from an upload that starts later, but not from one that starts at the same moment.
https://huggingface.co/docs/hub/storage-buckets
"""

from __future__ import annotations

import re
import time
from collections.abc import Container, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from huggingface_hub import constants
from huggingface_hub.utils import hf_raise_for_status, http_backoff

from ckptkit.errors import IOFailure, Occupied, Usage, errors_at
from ckptkit.io.claims import LIMIT, StoreClaim
from ckptkit.io.destination import CLAIM, Check
from ckptkit.io.file import destination_exists_error, read_small
from ckptkit.io.path import RemotePath, drop_cached_listing
from ckptkit.io.pieces import is_sent_in_pieces
from ckptkit.io.stores.hub import make_hub_client, parse_repository_path, request_headers
from ckptkit.io.stores.hub_calls import HubRepository, find_repository, require_token, silenced_hub_client
from ckptkit.io.stores.hub_errors import AGAIN, MAIN, as_line_without_token, repository_url, translate_hub_errors
from ckptkit.plugins.hub_writing.calls import (
    BUCKET,
    NDJSON,
    Line,
    StoredFile,
    create_bucket,
    is_private_bucket,
    request_xet_access,
    stored_files_among,
    to_json_lines,
)
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
    _, repo_id, named = parse_repository_path(str(path.store_root).partition("://")[2])
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
        bucket_id = bucket_id_of(path)
        is_private = is_private_bucket(bucket_id)
        access = "public" if is_private is False else "private"
        return f"{repository_url(f'{BUCKET}/{bucket_id}')} ({'new, ' if is_private is None else ''}{access})"


def bucket_id_of(path: RemotePath) -> str:
    """Return the bucket id with its namespace, as requests to the Hub need it."""
    return "/".join(path.store_root.parts[2:])


_MOST = 100  # file changes per request


@dataclass(slots=True)
class HubBucketDestination(XetDestination):
    """A folder of a bucket, or a single file: a `Destination`."""

    _claim: XetFile = field(init=False, repr=False)
    _shown: set[str] = field(default_factory=set)

    @property
    def sent_bytes(self) -> int:
        return self._files.sent_bytes

    def claim(self, *, overwrite: bool, check: Check) -> None:
        with ExitStack() as quiet:
            quiet.enter_context(silenced_hub_client())
            require_token()
            require_session_class()
            if is_private_bucket(self._id) is None:
                create_bucket(self._id)
            existing = set(self._list_files())
            drop_cached_listing(self.path)
            path = self._upload_target.claim_path
            previous = self._upload_target.parse_claim(read_small(path, LIMIT)) if path.exists() else None
            if previous is not None and previous.plan != self.plan:
                if not overwrite:
                    raise self._upload_target.claimed_error(previous)
                self._delete_claimed(previous.files, existing)
                self._apply_operations([{"type": "deleteFile", "path": self._upload_target.claim_key}])
                existing.difference_update(previous.files)
                previous = None
            if previous is None and existing and not overwrite:
                raise destination_exists_error(self.path)
            claimed = previous.files if previous else self._files_to_claim(check() if existing else (), existing)
            claim = StoreClaim.begin(self.plan, claimed)
            self._files = XetFiles(self.path, request_xet_access(BUCKET, self._id))
            self._files.put_small_file(CLAIM, claim.to_bytes())
            self._claim = self._files.sent.pop(CLAIM)
            self._files.sent_bytes = 0  # the claim is not data of the checkpoint
            self._apply_operations([add_file_operation(self._upload_target.claim_key, self._claim)])
            # after an interrupted attempt these are older files, or files that are sent again
            self._delete_claimed(claimed, existing)
            self._quiet = quiet.pop_all()

    def put_small_file(self, name: str, content: bytes | bytearray | memoryview, crc32: int) -> None:  # noqa: ARG002
        self._files.put_small_file(name, content)

    def finish_file(self, name: str, crc32: int) -> None:
        """Check that the CRC-32 of a large file equals the CRC-32 of the sent bytes. Makes a marker visible."""
        if is_sent_in_pieces(self.sizes[name]):
            self._files.require_sent_crc32(name, crc32)
            if name in self.marks:
                self._publish_marker(name)

    def put_marker(self, name: str, content: bytes | bytearray | memoryview, crc32: int) -> None:
        """Send a marker file, and make it visible after all other files."""
        self.put_small_file(name, content, crc32)
        self._publish_marker(name)

    def commit(self) -> None:
        """Make all files visible, and delete the claim: the upload is complete."""
        with self._quiet:
            self._publish_other_files()
            self._apply_operations([{"type": "deleteFile", "path": self._upload_target.claim_key}])

    def remarks_on_upload(self) -> list[str]:
        return ["a bucket does not refuse to replace a file: two uploads that start at the same moment could collide"]

    def _delete_claimed(self, claimed: Sequence[str], existing: Container[str]) -> None:
        """Delete the existing files of a claim: the marks first, so that no reader sees a checkpoint."""
        for names in self._in_deletion_order(claimed, existing):
            keys = map(self._upload_target.object_key, sorted(names))
            self._apply_operations([{"type": "deleteFile", "path": key} for key in keys])

    def _publish_marker(self, name: str) -> None:
        self._publish_other_files()
        claim_key, key, expected = (
            self._upload_target.claim_key,
            self._upload_target.object_key(name),
            expected_entry(self._files.sent[name]),
        )
        listed = stored_files_among(self._id, [claim_key, key])
        if listed.get(claim_key) != expected_entry(self._claim):
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
        self._apply_operations(
            [add_file_operation(self._upload_target.object_key(name), files[name]) for name in names]
        )
        self._shown.update(names)
        listed = self._list_files()
        for name in self._shown:
            sent, entry = expected_entry(files[name]), listed.get(name)
            if entry != sent:
                found = f"{entry.nbytes} bytes, hash {entry.xet_hash}" if entry else "no such file"
                expected = f"{sent.nbytes} bytes, hash {sent.xet_hash}"
                message = f"the bucket has other bytes: expected {expected}; found {found}"
                raise IOFailure(message, path=self.path / name, hint=AGAIN)

    def _apply_operations(self, lines: Sequence[Line]) -> None:
        """Add and delete files of the bucket. Raises `IOFailure` if some of the changes failed.

        Each file is changed completely or not at all, but the changes are not one transaction.
        https://huggingface.co/docs/hub/storage-buckets
        """
        address = f"{constants.ENDPOINT}/api/{BUCKET}/{self._id}/batch"
        for start in range(0, len(lines), _MOST):
            batch = lines[start : start + _MOST]
            with translate_hub_errors(self._id):
                headers = request_headers() | NDJSON
                response = http_backoff("POST", address, headers=headers, content=to_json_lines(batch))
                failed = response.json().get("failed") if response.status_code in (200, 422) else None
                if failed:
                    why = as_line_without_token(str(failed[0].get("error")))
                    message = f"the Hub did not change {len(failed)} of {len(batch)} files: {why}"
                    path = f"hf://{BUCKET}/{self._id}/{failed[0].get('path')}"
                    raise IOFailure(message, path=path, hint=AGAIN)
                hf_raise_for_status(response)

    def _list_files(self) -> dict[str, StoredFile]:
        """Return the files in the bucket by name, without the claim."""
        if self.is_file:
            (name,) = self.sizes
            described = stored_files_among(self._id, [self.path.key])
            return {name: described[self.path.key]} if described else {}
        base = f"{self.path.key}/"
        with translate_hub_errors(self._id):
            tree = make_hub_client().list_bucket_tree(self._id, prefix=self.path.key, recursive=True)
            files = [item for item in tree if item.type == "file" and item.path.startswith(base)]
        listed = {file.path.removeprefix(base): StoredFile(file.size, file.xet_hash) for file in files}
        listed.pop(CLAIM, None)
        return listed

    @property
    def _id(self) -> str:
        return bucket_id_of(self.path)


def add_file_operation(key: str, sent: XetFile) -> Line:
    """Return the operation that makes a file visible in the bucket."""
    return {"type": "addFile", "path": key, "xetHash": sent.hash, "mtime": int(time.time() * 1000)}


def expected_entry(sent: XetFile) -> StoredFile:
    return StoredFile(sent.nbytes, sent.hash)

"""Write to a Hub repository: all files appear in one commit on top of the head at the start.

Large files go to the Hub's storage first, where nobody sees them. No lock is needed: if somebody else commits in the
meantime, our commit fails, and a new run of the command skips the files that the storage already has.
https://huggingface.co/docs/huggingface_hub/package_reference/hf_api
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from hashlib import sha1
from pathlib import PurePosixPath
from threading import Lock
from urllib.parse import quote

from huggingface_hub import constants
from huggingface_hub.utils import get_session, hf_raise_for_status

from ckptkit.errors import Corrupt, IOFailure, Occupied, Usage, and_more
from ckptkit.io.destination import Check
from ckptkit.io.file import destination_exists_error
from ckptkit.io.stores.hub import request_headers
from ckptkit.io.stores.hub_calls import (
    HubRepository,
    create_branch,
    create_repository,
    find_repository,
    require_repository,
    require_token,
    silenced_hub_client,
)
from ckptkit.io.stores.hub_errors import MAIN, translate_hub_errors
from ckptkit.plugins.hub_writing.bucket_destination import TargetRepository, examine_repository
from ckptkit.plugins.hub_writing.calls import (
    MODEL,
    NDJSON,
    Line,
    request_xet_access,
    to_json_lines,
    wants_lfs_storage,
)
from ckptkit.plugins.hub_writing.xet import XetDestination, XetFiles, require_session_class
from ckptkit.version import __version__

_INLINE = 10_000_000  # bytes; the Hub takes no larger file into git itself
_MOST_NAMED = 5
_OF_GIT = (".gitattributes", ".gitignore")


@dataclass(slots=True)
class HubRepoDestination(XetDestination):
    """A repository, a folder in it, or a single file: a `Destination`.

    After `commit`, `made` is the commit id, or "" if the repository already had all files.
    """

    made: str = ""
    _repository: TargetRepository = field(init=False, repr=False)
    _inline: dict[str, bytes] = field(default_factory=dict)
    _replaced: frozenset[str] = frozenset()  # the files of the checkpoint to replace
    _overwrite: bool = False
    _inline_bytes: int = 0
    _lock: Lock = field(default_factory=Lock)

    @property
    def sent_bytes(self) -> int:
        return self._files.sent_bytes + self._inline_bytes

    def claim(self, *, overwrite: bool, check: Check) -> None:
        with ExitStack() as quiet:
            quiet.enter_context(silenced_hub_client())
            require_token()
            require_session_class()
            prospect = examine_repository(self.path)
            if self.is_file and not self.path.key:
                hint = f"name a file in the repository, like {self.path}/{next(iter(self.sizes))}"
                raise Usage("a repository is a directory, and this format is one file", path=self.path, hint=hint)
            self._overwrite = overwrite
            self._replaced = self._files_deleted_by_commit(prospect, check)
            self._require_free([*self.sizes, *self.marks], prospect)
            if prospect.basis is None:
                basis = create_repository(prospect.repo_id, private=True)
                head = basis if prospect.revision == MAIN else None
                prospect = TargetRepository(prospect.repo_id, prospect.revision, head, basis)
            self._repository = prospect
            self._files = XetFiles(self.path, request_xet_access(MODEL, prospect.repo_id, self._existing_branch))
            self._quiet = quiet.pop_all()

    def put_small_file(self, name: str, content: bytes | bytearray | memoryview, crc32: int) -> None:  # noqa: ARG002
        """Send a full file to the storage, or keep it for the commit if the Hub stores it in git."""
        key, repository = self._upload_target.object_key(name), self._repository
        if len(content) > _INLINE or wants_lfs_storage(repository.repo_id, self._existing_branch, key, bytes(content)):
            self._files.put_small_file(name, content)
            return
        with self._lock:
            self._inline[name] = bytes(content)

    put_marker = put_small_file  # in any order, because all files appear in one commit

    def commit(self) -> None:
        """Commit all files, and compare them with the files that the Hub then lists.

        Raises `Occupied` if the branch changed since `claim`, and `Corrupt` if a file differs on the Hub.
        """
        repository = self._repository
        basis = repository.basis
        assert basis is not None
        self._require_free(self._names, repository)
        lines = list(self._operations(basis))
        with self._quiet:
            if repository.head is None:
                create_branch(repository.repo_id, repository.revision, basis.commit)
            self.made = self._commit(repository, basis, lines) if lines else ""
            listed = require_repository(repository.repo_id, self.made or basis.commit)
            for name, (expected, found) in self._differences(listed).items():
                message = f"the Hub has other bytes: expected {expected}; found {found}"
                raise Corrupt(message, path=self.path / name, hint="run the same command again with --overwrite")

    def missing_feature_remarks(self) -> list[str]:
        if not self.made:
            return ["the repository had all of these files before: there is nothing to commit"]
        at = "" if self._repository.revision == MAIN else f" of {self._repository.revision}"
        return [f"one commit{at}: {self.made[:8]}"]

    @property
    def _names(self) -> list[str]:
        return [*self._files.sent, *self._inline]

    @property
    def _existing_branch(self) -> str:
        """Return an existing branch for requests to the Hub: the target branch, or main."""
        return self._repository.revision if self._repository.head else MAIN

    def _files_deleted_by_commit(self, prospect: TargetRepository, check: Check) -> frozenset[str]:
        """Return the files that the commit deletes unless it replaces them.

        A new branch starts with all files of main. Raises `Occupied` if a checkpoint exists and `overwrite` was not
        passed.
        """
        if prospect.head is None:
            base = "" if self.is_file else self._upload_target.object_key("")
            keys = prospect.basis.files if prospect.basis and not self.is_file else {}
            return frozenset(key.removeprefix(base) for key in keys if key.startswith(base) and key not in _OF_GIT)
        names = frozenset(check())
        if names and not self._overwrite:
            raise destination_exists_error(self.path)
        return names

    def _require_free(self, names: Iterable[str], prospect: TargetRepository) -> None:
        """Raise `Occupied` if files of these names exist and must not be replaced."""
        files = prospect.head.files if prospect.head else {}
        keys = {self._upload_target.object_key(name): name for name in names}
        above = {str(folder) for key in keys for folder in PurePosixPath(key).parents}
        below = tuple(f"{key}/" for key in keys)
        blocked = next((key for key in files if key in above or key.startswith(below)), None)
        if blocked is not None:
            message = f"expected a directory or nothing at `{blocked}`, found a file"
            raise Occupied(message, path=self.path, hint="choose another destination")
        taken = sorted(name for key, name in keys.items() if key in files)
        if taken and not self._overwrite:
            named = ", ".join(taken[:_MOST_NAMED]) + and_more(len(taken) - _MOST_NAMED)
            hint = "choose another folder, or replace these files with --overwrite"
            raise Occupied(f"the repository has files of these names: {named}", path=self.path, hint=hint)

    def _operations(self, basis: HubRepository) -> Iterator[Line]:
        changed = self._differences(basis)
        for name, sent in sorted(self._files.sent.items()):
            if name in changed:
                stored = {"algo": "sha256", "oid": sent.sha256, "size": sent.nbytes}
                yield {"key": "lfsFile", "value": {"path": self._upload_target.object_key(name), **stored}}
        for name, data in sorted(self._inline.items()):
            if name in changed:
                self._inline_bytes += len(data)
                content = {"content": b64encode(data).decode(), "encoding": "base64"}
                yield {"key": "file", "value": {"path": self._upload_target.object_key(name), **content}}
        for key in map(self._upload_target.object_key, sorted(self._replaced.difference(self._names))):
            if key in basis.files:
                yield {"key": "deletedFile", "value": {"path": key}}

    def _commit(self, prospect: TargetRepository, basis: HubRepository, lines: Sequence[Line]) -> str:
        """Make the commit and return its id. If the response was lost, check whether the commit was made."""
        subject = self.path.key.rpartition("/")[2] or prospect.repo_id.partition("/")[2]
        value = {
            "summary": f"Upload {subject} with ckptkit {__version__}",
            "description": "",
            "parentCommit": basis.commit,
        }
        content = to_json_lines([{"key": "header", "value": value}, *lines])
        address = f"{constants.ENDPOINT}/api/{MODEL}/{prospect.repo_id}/commit/{quote(prospect.revision, safe='')}"
        try:
            # not retried: without a response, the commit may have been made
            with translate_hub_errors(prospect.repo_id, prospect.revision):
                response = get_session().post(address, headers=request_headers() | NDJSON, content=content)
                hf_raise_for_status(response)
                return str(response.json()["commitOid"])
        except Occupied as error:
            message = f"somebody else pushed to {prospect.revision} of `{prospect.repo_id}` since {basis.commit[:8]}"
            raise Occupied(message, path=self.path, hint="run the same command again") from error
        except IOFailure:
            head = find_repository(prospect.repo_id, prospect.revision)
            if head is None or head.commit == basis.commit or self._differences(head):
                raise
            return head.commit

    def _differences(self, repository: HubRepository) -> dict[str, tuple[str, str]]:
        """Return size and checksum, as sent and as listed, of each file that the Hub lists differently, by name."""
        expected = {name: describe_file(sent.nbytes, sent.sha256) for name, sent in self._files.sent.items()}
        expected |= {name: describe_file(len(data), oid=git_blob_id(data)) for name, data in self._inline.items()}
        listed = {name: repository.files.get(self._upload_target.object_key(name)) for name in expected}
        found = {
            name: describe_file(file.nbytes, file.sha256, file.oid) if file else "no such file"
            for name, file in listed.items()
        }
        return {name: (words, found[name]) for name, words in expected.items() if words != found[name]}


def describe_file(nbytes: int, sha256: str | None = None, oid: str = "") -> str:
    """Return size and checksum of a file, which is in the Hub's storage, or else in git."""
    return f"{nbytes} bytes, {f'SHA-256 {sha256}' if sha256 else f'{oid} in git'}"


def git_blob_id(data: bytes) -> str:
    return sha1(b"blob %d\0%b" % (len(data), data), usedforsecurity=False).hexdigest()

"""Write to a repository of the Hub: all files appear in one commit, behind the one that was the head at the start.

Large files go to the Hub's storage first, which shows them to nobody. So nothing has to be claimed: a commit of
somebody else meanwhile makes ours fail, and the same command begins anew with the files that the storage has.
https://huggingface.co/docs/huggingface_hub/package_reference/hf_api
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from hashlib import sha1
from pathlib import PurePosixPath
from threading import Lock

from ckptkit.errors import Corrupt, IOFailure, Occupied, Usage, and_more
from ckptkit.io.claims import UploadTarget
from ckptkit.io.destination import Check
from ckptkit.io.file import destination_exists
from ckptkit.io.pieces import is_large
from ckptkit.io.stores.hub_calls import (
    MODEL,
    HubFile,
    HubRepository,
    Line,
    ask_access,
    commit_files,
    create_branch,
    create_repository,
    data_line,
    deletion_line,
    find,
    inline_line,
    is_kept_as_data,
    look_up,
    require_token,
    silent,
)
from ckptkit.io.stores.hub_errors import MAIN
from ckptkit.plugins.hub_writing.bucket_destination import Prospect, look_at
from ckptkit.plugins.hub_writing.xet import XetDestination, XetFile, XetFiles, find_session
from ckptkit.version import __version__

_INLINE = 10_000_000  # bytes; the Hub takes no larger file into git itself
_MOST_NAMED = 5
_OF_GIT = (".gitattributes", ".gitignore")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(slots=True)
class HubRepoDestination(XetDestination):
    """A repository, a folder in it, or a single file: a `Destination`.

    After `commit`, `made` is the id of the commit, "" if the repository had all files before.
    """

    made: str = ""
    _repository: Prospect = field(init=False, repr=False)
    _inline: dict[str, bytes] = field(default_factory=dict)
    _replaced: frozenset[str] = frozenset()  # the files of the checkpoint that was there
    _overwrite: bool = False
    _inline_bytes: int = 0
    _lock: Lock = field(default_factory=Lock)

    @property
    def sent_bytes(self) -> int:
        return self._files.sent_bytes + self._inline_bytes

    def claim(self, *, overwrite: bool, check: Check) -> None:
        """Look at the repository, which is made if it is missing; see `Destination`."""
        with ExitStack() as quiet:
            quiet.enter_context(silent())
            require_token()
            find_session()
            found = look_at(self.path)
            if self.is_file and not self.path.key:
                hint = f"name a file in the repository, like {self.path}/{next(iter(self.sizes))}"
                raise Usage("a repository is a directory, and this format is one file", path=self.path, hint=hint)
            self._overwrite = overwrite
            self._replaced = self._find_replaced(found, check)
            self._require_free([*self.sizes, *self.marks], found)
            if found.basis is None:
                basis = create_repository(found.repo_id, private=True)
                head = basis if found.revision == MAIN else None
                found = Prospect(found.repo_id, found.revision, head, basis)
            self._repository = found
            self._files = XetFiles(self.path, ask_access(MODEL, found.repo_id, self._branch))
            self._quiet = quiet.pop_all()

    def put_small(self, name: str, data: bytes | bytearray | memoryview, crc: int) -> None:  # noqa: ARG002
        """Send a whole file to the storage, or hold it for the commit if the Hub wants that."""
        key, there = self._key(name), self._repository
        if len(data) > _INLINE or is_kept_as_data(there.repo_id, self._branch, key, bytes(data)):
            self._files.put_small(name, data)
            return
        with self._lock:
            self._inline[name] = bytes(data)

    def complete(self, name: str, crc: int) -> None:
        """Compare the CRC-32 of a large file with that of the bytes that were sent."""
        if is_large(self.sizes[name]):
            self._files.require_same(name, crc)

    def mark(self, name: str, data: bytes | bytearray | memoryview, crc: int) -> None:
        """Send a whole file: a mark appears with all others."""
        self.put_small(name, data, crc)

    def commit(self) -> None:
        """Make all files appear, and compare them with what the Hub then lists.

        Raises `Occupied` if somebody else changed the branch since `claim`, and `Corrupt` if a file differs there.
        """
        there = self._repository
        basis = there.basis
        assert basis is not None
        self._require_free(self._names, there)
        lines = list(self._lines(basis))
        with self._quiet:
            if there.head is None:
                create_branch(there.repo_id, there.revision, basis.commit)
            self.made = self._commit(there, basis, lines) if lines else ""
            self._require_same(look_up(there.repo_id, self.made or basis.commit))

    def remarks(self) -> list[str]:
        """Return which commit shows the files."""
        if not self.made:
            return ["the repository had all of these files before: there is nothing to commit"]
        at = "" if self._repository.revision == MAIN else f" of {self._repository.revision}"
        return [f"one commit{at}: {self.made[:8]}"]

    @property
    def _names(self) -> list[str]:
        return [*self._files.sent, *self._inline]

    @property
    def _branch(self) -> str:
        """Return a branch that exists by which the Hub is asked."""
        return self._repository.revision if self._repository.head else MAIN

    def _find_replaced(self, there: Prospect, check: Check) -> frozenset[str]:
        """Return the files that our commit deletes unless it has them: a new branch begins with all of main's.

        Raises `Occupied` if a checkpoint is there that is not to be replaced.
        """
        if there.head is None:
            base = "" if self.is_file else self._key("")
            keys = there.basis.files if there.basis and not self.is_file else {}
            return frozenset(key.removeprefix(base) for key in keys if key.startswith(base) and key not in _OF_GIT)
        found = frozenset(check())
        if found and not self._overwrite:
            raise destination_exists(self.path)
        return found

    def _require_free(self, names: Iterable[str], there: Prospect) -> None:
        """Raise `Occupied` if files of these names are there and are not to be replaced."""
        files = there.head.files if there.head else {}
        keys = {self._key(name): name for name in names}
        above = {str(folder) for key in keys for folder in PurePosixPath(key).parents}
        below = tuple(f"{key}/" for key in keys)
        blocked = next((key for key in files if key in above or key.startswith(below)), None)
        if blocked is not None:
            message = f"`{blocked}` is there, and no folder can be a file too"
            raise Occupied(message, path=self.path, hint="choose another destination")
        taken = sorted(name for key, name in keys.items() if key in files)
        if taken and not self._overwrite:
            named = ", ".join(taken[:_MOST_NAMED]) + and_more(len(taken) - _MOST_NAMED)
            hint = "choose another folder, or replace these files with --overwrite"
            raise Occupied(f"the repository has files of these names: {named}", path=self.path, hint=hint)

    def _lines(self, basis: HubRepository) -> Iterator[Line]:
        """Yield what the commit changes."""
        for name, sent in sorted(self._files.sent.items()):
            if not is_same_data(sent, basis.files.get(self._key(name))):
                yield data_line(self._key(name), sent.nbytes, sent.sha256)
        for name, data in sorted(self._inline.items()):
            if not is_same_text(data, basis.files.get(self._key(name))):
                self._inline_bytes += len(data)
                yield inline_line(self._key(name), data)
        written = set(self._names)
        for name in sorted(self._replaced - written):
            if self._key(name) in basis.files:
                yield deletion_line(self._key(name))

    def _commit(self, there: Prospect, basis: HubRepository, lines: Sequence[Line]) -> str:
        """Make the commit, or find out that a request without an answer made it. Returns its id."""
        what = self.path.key.rpartition("/")[2] or there.repo_id.partition("/")[2]
        message = f"Upload {what} with ckptkit {__version__}"
        try:
            return commit_files(there.repo_id, there.revision, message, basis.commit, lines)
        except Occupied as error:
            message = f"somebody else pushed to {there.revision} of `{there.repo_id}` since {basis.commit[:8]}"
            raise Occupied(message, path=self.path, hint="run the same command again") from error
        except IOFailure:
            head = find(there.repo_id, there.revision)
            if head is None or head.commit == basis.commit or self._differences(head):
                raise
            return head.commit

    def _require_same(self, there: HubRepository) -> None:
        """Raise `Corrupt` unless the Hub lists every file with its size and checksum."""
        for name, words in self._differences(there).items():
            hint = "run the same command again with --overwrite"
            raise Corrupt(f"the Hub has other bytes: {words}", path=self.path / name, hint=hint)

    def _differences(self, there: HubRepository) -> dict[str, str]:
        """Say of each file that the Hub does not list as it was sent what it lists, by name."""
        found = {}
        for name in self._names:
            listed, sent = there.files.get(self._key(name)), self._files.sent.get(name)
            same = is_same_data(sent, listed) if sent else is_same_text(self._inline[name], listed)
            if not same:
                expected = f"{sent.nbytes} bytes, SHA-256 {sent.sha256}" if sent else describe_text(self._inline[name])
                found[name] = f"expected {expected}; found {describe(listed)}"
        return found

    def _key(self, name: str) -> str:
        return UploadTarget(self.path, self.is_file).key(name)


def is_same_data(sent: XetFile, listed: HubFile | None) -> bool:
    """Return whether the Hub lists a file of its storage as it was sent."""
    return listed is not None and (listed.nbytes, listed.sha256) == (sent.nbytes, sent.sha256)


def is_same_text(data: bytes, listed: HubFile | None) -> bool:
    """Return whether the Hub lists a file of these bytes in git."""
    return listed is not None and listed.sha256 is None and listed.oid == git_id(data)


def describe_text(data: bytes) -> str:
    return f"{len(data)} bytes, {git_id(data)} in git"


def describe(listed: HubFile | None) -> str:
    if listed is None:
        return "no such file"
    kind = f"SHA-256 {listed.sha256}" if listed.sha256 else f"{listed.oid} in git"
    return f"{listed.nbytes} bytes, {kind}"


def git_id(data: bytes) -> str:
    """Return what git calls a file of these bytes."""
    return sha1(b"blob %d\0%b" % (len(data), data), usedforsecurity=False).hexdigest()

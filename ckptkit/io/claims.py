"""Name and read the objects with which an upload or deletion claims a directory or file in a store.

A claim is a small object in the directory, or beside a single file. An upload creates it before its first byte and
deletes it after its last byte; a deletion does the same.
"""

from __future__ import annotations

import json
import socket
from abc import ABC, abstractmethod
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Generic, Protocol, Self, TypeVar
from uuid import uuid4

from ckptkit.errors import CkptError, Corrupt, Incomplete, IOFailure, Occupied
from ckptkit.io.destination import CLAIM, NOTES, Check
from ckptkit.io.file import destination_exists_error, names_in, read_small
from ckptkit.io.path import RemotePath, drop_cached_listing, is_remote
from ckptkit.io.stores import StoreEntry
from ckptkit.version import __version__
from ckptkit.words import command_line

_DELETION = "deletion "  # prefix of a deletion's plan
_READ_TRIES = 3  # a claim may be replaced between the listing and the read
LIMIT = 1 << 24  # bytes of a claim: it names every file
_ABANDON = "wait for it to end, or abandon it with --overwrite"


@dataclass(frozen=True, slots=True)
class StoreClaim:
    """The content of a claim: the `plan` that it belongs to, when it `started`, and on which `host`.

    `files` are the files that it may delete: those that it writes, and those that it replaces or deletes; none in a
    claim of an older ckptkit. `uploads` maps files to multipart upload ids, None until the uploads begin. `owner` is
    the process that works on the upload, if only one process can. `conditions` and `checksums` record whether the store
    supports these features.
    """

    plan: str
    started: str
    host: str
    files: tuple[str, ...] = ()
    owner: str = ""
    uploads: Mapping[str, str] | None = None
    conditions: bool = True
    checksums: bool = True

    @classmethod
    def begin(cls, plan: str, files: Iterable[str], **fields: Any) -> Self:
        started = datetime.now(UTC).isoformat(timespec="seconds")
        return cls(plan, started, socket.gethostname(), tuple(dict.fromkeys(files)), **fields)

    @classmethod
    def for_deletion(cls, files: Iterable[str]) -> Self:
        return cls.begin(f"{_DELETION}{uuid4().hex}", files)

    @classmethod
    def parse(cls, content: bytes) -> Self:
        """Parse a claim. Unreadable content, such as another version's, becomes an upload with an empty plan."""
        try:
            fields = json.loads(content)
            uploads = fields.get("uploads")
            return cls(
                str(fields["plan"]),
                str(fields["started"]),
                str(fields["host"]),
                files=tuple(str(name) for name in fields.get("files", ())),
                owner=str(fields.get("owner", "")),
                uploads=uploads and {str(name): str(upload) for name, upload in uploads.items()},
                conditions=bool(fields.get("conditions", True)),
                checksums=bool(fields.get("checksums", True)),
            )
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
            return cls("", "", "")

    def to_bytes(self) -> bytes:
        return json.dumps({"ckptkit": __version__, **asdict(self)}, indent=1).encode()

    @property
    def is_deletion(self) -> bool:
        return self.plan.startswith(_DELETION)

    @property
    def kind(self) -> str:
        return "deletion" if self.is_deletion else "upload"

    def describe(self) -> str:
        """Return a description of the operation, to follow an article."""
        since = f"has been under way since {self.started}, from {self.host}" if self.started else "is under way"
        return f"{self.kind} {since}"


def find_claim(target: Path) -> StoreClaim | None:
    """Return the claim on a directory or file in a store, from the cached listing; None without one.

    Returns None for a local path.
    """
    failure: CkptError | None = None
    for _ in range(_READ_TRIES):
        path = find_claim_object(target)
        if path is None:
            return None
        try:
            return StoreClaim.parse(read_small(path, LIMIT))
        except (Corrupt, IOFailure) as error:  # deleted or replaced since it was listed
            failure = error
            drop_cached_listing(path)
    assert failure is not None
    raise failure


def find_unfinished_upload_error(path: Path, claim: StoreClaim | None) -> Incomplete | None:
    """Return the error for a path in a store with an upload in progress, according to its claim; else None."""
    if claim is None or claim.is_deletion:
        return None
    abort = command_line("prune", "--uploads", path)
    hint = f"wait for it; if it died, run its command again, or abort it with {abort}"
    return Incomplete(f"found no complete checkpoint: an {claim.describe()}", path=path, hint=hint)


def find_claim_object(path: Path) -> RemotePath | None:
    """Return the object that claims a directory or file in a store; None without one."""
    if not is_remote(path):
        return None
    if path.is_dir() and CLAIM in names_in(path):
        return path / CLAIM
    beside = path.parent / f"{path.name}{CLAIM}"
    return beside if path.key and beside.exists() else None


def unpublished_files_in(root: Path) -> list[Path]:
    """Return the files in a directory of a store that are being uploaded and not visible yet."""
    if not is_remote(root):
        return []
    names = set(names_in(root))
    files = (name.removesuffix(CLAIM) for name in names if name.endswith(CLAIM) and name != CLAIM)
    return [root / name for name in sorted(files) if name not in names]


@dataclass(frozen=True, slots=True)
class UploadTarget:
    """The target of an upload: the directory `path` in a store or, if `is_file`, the single object at `path`."""

    path: RemotePath
    is_file: bool = False

    def object_key(self, name: str) -> str:
        return self.path.key if self.is_file else f"{prefix_below(self.path.key)}{name}"

    @property
    def claim_key(self) -> str:
        return f"{self._own}{CLAIM}"

    @property
    def notes_prefix(self) -> str:
        return f"{self._own}{NOTES}/"

    @property
    def claim_path(self) -> RemotePath:
        return self.path.store_root / self.claim_key

    def is_claim_or_note(self, key: str) -> bool:
        """Return whether a key belongs to the claim or a note, instead of a file."""
        return key == self.claim_key or key.startswith(self.notes_prefix)

    def parse_claim(self, content: bytes) -> StoreClaim:
        """Parse a claim on this path. Raises `Occupied` if it does not list its files, as another version's."""
        claim = StoreClaim.parse(content)
        if not claim.files:
            hint = "finish the upload with that version, or delete this file and the files of the upload"
            raise Occupied(
                "another version of ckptkit wrote this record of its upload", path=self.claim_path, hint=hint
            )
        return claim

    def claimed_error(self, claim: StoreClaim) -> Occupied:
        return Occupied(f"another {claim.describe()}", path=self.path, hint=_ABANDON)

    def taken_meanwhile_error(self) -> Occupied:
        """Return the error for a path that another process claimed after ckptkit checked it."""
        hint = "run the same command again when it is done"
        return Occupied("another upload began at this moment", path=self.path, hint=hint)

    def lost_claim_error(self, action: str = "has canceled") -> Occupied:
        """Return the error for an upload whose claim another process has replaced; `action` is what it did."""
        hint = "run the same command again when the other process has ended"
        return Occupied(f"another process {action} this upload", path=self.path, hint=hint)

    def no_claim_error(self) -> Occupied:
        """Return the error for a process that joins an upload without a claim."""
        hint = "start the save or the command again, on all ranks or parts"
        return Occupied("the upload that this process should join does not exist", path=self.path, hint=hint)

    @property
    def _own(self) -> str:
        return self.path.key if self.is_file else prefix_below(self.path.key)


@dataclass(slots=True)
class StoreOutput:
    """The arguments of every `Destination`, which describes them, and the target of its upload.

    `resumed` says whether the upload continues an earlier one.
    """

    path: RemotePath
    sizes: Mapping[str, int]
    marks: Sequence[str]
    plan: str
    is_file: bool = False
    more_files: Collection[str] = ()
    resumed: bool = False
    _owner: str = ""  # names this process in the claim, if only one process can work on the upload
    _claimed: Sequence[str] = ()  # the files that our claim lists, the marks before most others

    @property
    def _upload_target(self) -> UploadTarget:
        return UploadTarget(self.path, self.is_file)


class Bucket(Protocol):
    """What an upload needs to claim a part of a store."""

    def find_object_content(self, key: str) -> bytes | None:
        """Return the content of a small object; None if it does not exist."""

    def list_objects(self, prefix: str) -> Mapping[str, StoreEntry]:
        """Return the objects below a `prefix` that ends in a slash, or the object of this name, by key."""

    def delete_objects(self, keys: Sequence[str]) -> None:
        """Delete objects, in any order. A missing object is not an error."""


B = TypeVar("B", bound=Bucket)


class ClaimedOutput(StoreOutput, ABC, Generic[B]):
    """An output in a bucket, which an object claims until the output is complete."""

    __slots__ = ()
    _bucket: B

    def claim(self, *, overwrite: bool, check: Check) -> None:
        begun = self._read_claim()
        if begun is not None and begun.plan != self.plan:
            if not overwrite:
                raise self._upload_target.claimed_error(begun)
            self._abandon(begun)
            begun = None
        self.resumed = begun is not None
        if begun is not None and self._try_resume(begun):
            return
        existing = self._existing_files()
        if existing and not overwrite:
            raise destination_exists_error(self.path)
        first = check() if existing and begun is None else ()
        before_marks = (name for name in first if name not in self.marks)
        planned = (*before_marks, *self.marks, *self.sizes, *self.more_files, *existing)
        self._claimed = begun.files if begun else tuple(dict.fromkeys(planned))
        self._create_claim()
        self._delete_claimed(self._claimed, existing)
        self._start_uploads()

    def commit(self) -> None:
        """Delete the notes, and last the claim: the upload is complete."""
        self._bucket.delete_objects(list(self._bucket.list_objects(self._upload_target.notes_prefix)))
        self._bucket.delete_objects([self._upload_target.claim_key])

    def _abandon(self, claim: StoreClaim) -> None:
        """Delete the files of another upload, and its claim."""
        self._delete_claimed(claim.files, self._existing_files())
        ClaimedOutput.commit(self)

    def _delete_claimed(self, claimed: Sequence[str], existing: Container[str]) -> None:
        """Delete the existing files of a claim, first those up to the last mark: no reader sees a part of them."""
        end = max((i + 1 for i, name in enumerate(claimed) if name in self.marks), default=0)
        for group in (claimed[:end], claimed[end:]):
            self._bucket.delete_objects([self._upload_target.object_key(name) for name in group if name in existing])

    def _read_claim(self) -> StoreClaim | None:
        content = self._bucket.find_object_content(self._upload_target.claim_key)
        return None if content is None else self._upload_target.parse_claim(content)

    def _require_claim(self) -> None:
        """Raise `Occupied` if another process has taken over the target."""
        current = self._read_claim()
        if current is None or (current.plan, current.owner) != (self.plan, self._owner):
            goes_on = current is not None and current.plan == self.plan
            raise self._upload_target.lost_claim_error("goes on with" if goes_on else "has canceled")

    @abstractmethod
    def _try_resume(self, begun: StoreClaim) -> bool:
        """Continue an upload of the same plan; returns False if that upload has sent nothing yet."""

    @abstractmethod
    def _create_claim(self) -> None:
        """Create the claim. Raises `Occupied` if another process has just created one."""

    def _start_uploads(self) -> None:
        """Begin the uploads of the large files, in a store that needs that."""

    def _existing_files(self) -> dict[str, StoreEntry]:
        """Return the files at the target by name, without the claim and the notes."""
        base, target = self._upload_target.object_key(""), self._upload_target
        objects = self._bucket.list_objects(base)
        if self.is_file:
            (name,) = self.sizes
            return {name: objects[base]} if base in objects else {}
        # some tools create an empty object for a directory, with a name that ends in a slash
        keys = (key for key in objects if key != base and not target.is_claim_or_note(key))
        return {key.removeprefix(base): objects[key] for key in keys}


def prefix_below(key: str) -> str:
    return f"{key}/" if key else ""

"""Read the claims on places in a store: which upload or deletion holds a place, since when and from which host.

A claim is a small object in the place, or beside it if the place is one file. An upload creates it before its first
byte and deletes it after its last; a deletion does the same.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

from ckptkit.errors import CkptError, Corrupt, Incomplete, IOFailure
from ckptkit.io.destination import CLAIM
from ckptkit.io.file import names_in, read_small
from ckptkit.io.path import RemotePath, is_remote
from ckptkit.version import __version__

_DELETION = "deletion "  # how the plan of a deletion begins
_LOOKS = 3
_LIMIT = 1 << 24  # bytes of a claim: it names every large file


@dataclass(frozen=True, slots=True)
class StoreClaim:
    """What a claim says: the `plan` that it stands for, when it `started`, and from which `host`.

    `uploads` are the ids of multipart uploads by file, None until they were begun. `owner` is the process that works on
    the upload, where only one can. `conditions` and `checksums` say what the store was found to know.
    """

    plan: str
    started: str
    host: str
    owner: str = ""
    uploads: Mapping[str, str] | None = None
    conditions: bool = True
    checksums: bool = True

    @classmethod
    def begin(cls, plan: str, **more: Any) -> Self:
        """Return a claim of this moment and host."""
        return cls(plan, datetime.now(UTC).isoformat(timespec="seconds"), socket.gethostname(), **more)

    @classmethod
    def for_deletion(cls) -> Self:
        """Return a claim for a deletion by this process."""
        return cls.begin(f"{_DELETION}{uuid4().hex}")

    @classmethod
    def parse(cls, content: bytes) -> Self:
        """Read a claim. One that cannot be read, as of another version, is an upload of no plan."""
        try:
            found = json.loads(content)
            uploads = found.get("uploads")
            return cls(
                str(found["plan"]),
                str(found["started"]),
                str(found["host"]),
                owner=str(found.get("owner", "")),
                uploads=uploads and {str(name): str(upload) for name, upload in uploads.items()},
                conditions=bool(found.get("conditions", True)),
                checksums=bool(found.get("checksums", True)),
            )
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
            return cls("", "", "")

    def to_bytes(self) -> bytes:
        """Return the content of the object."""
        return json.dumps({"ckptkit": __version__, **asdict(self)}, indent=1).encode()

    @property
    def is_deletion(self) -> bool:
        """Return whether the place is being deleted."""
        return self.plan.startswith(_DELETION)

    @property
    def kind(self) -> str:
        """Return what is under way: "upload" or "deletion"."""
        return "deletion" if self.is_deletion else "upload"

    def describe(self) -> str:
        """Return in words what is under way, to follow an article."""
        since = f"has been under way since {self.started}, from {self.host}" if self.started else "is under way"
        return f"{self.kind} {since}"


def read_claim(place: Path) -> StoreClaim | None:
    """Return the claim on a directory or file in a store, as far as the store was looked at; None if there is none.

    On a local disk nothing is claimed by an object.
    """
    failure: CkptError | None = None
    for _ in range(_LOOKS):
        path = find_claim(place)
        if path is None:
            return None
        try:
            return StoreClaim.parse(read_small(path, _LIMIT))
        except (Corrupt, IOFailure) as error:  # deleted or replaced since it was listed
            failure = error
            path.store.forget()
    assert failure is not None
    raise failure


def unfinished_upload(place: Path, claim: StoreClaim | None) -> Incomplete | None:
    """Return the error for a place in a store to which, by the claim on it, an upload is under way; else None."""
    if claim is None or claim.is_deletion:
        return None
    hint = f"wait for it; if it died, run its command again, or abort it with `ckptkit prune --uploads {place}`"
    return Incomplete(f"found no complete checkpoint: an {claim.describe()}", path=place, hint=hint)


def find_claim(place: Path) -> RemotePath | None:
    """Return the object that claims a directory or file in a store, None if there is none."""
    if not is_remote(place):
        return None
    if place.is_dir() and CLAIM in names_in(place):
        return place / CLAIM
    beside = place.parent / f"{place.name}{CLAIM}"
    return beside if place.key and beside.exists() else None


def claimed_in(root: Path) -> list[Path]:
    """Return the files in a directory of a store that are being uploaded and that no reader sees yet."""
    if not is_remote(root):
        return []
    names = set(names_in(root))
    files = (name.removesuffix(CLAIM) for name in names if name.endswith(CLAIM) and name != CLAIM)
    return [root / name for name in sorted(files) if name not in names]

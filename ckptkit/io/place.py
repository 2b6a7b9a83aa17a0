"""Name the objects of an upload in a store: its files, its claim and its notes. Asks the store nothing."""

from __future__ import annotations

from dataclasses import dataclass

from ckptkit.errors import Occupied
from ckptkit.io.claims import StoreClaim
from ckptkit.io.destination import CLAIM, NOTES
from ckptkit.io.path import RemotePath

_ABANDON = "wait for it to end, or abandon it with --overwrite"


@dataclass(frozen=True, slots=True)
class UploadPlace:
    """What an upload fills: the directory `path` in a store or, if `is_file`, the one object at `path`."""

    path: RemotePath
    is_file: bool = False

    def key(self, name: str) -> str:
        """Return the key of a file."""
        return self.path.key if self.is_file else f"{beneath(self.path.key)}{name}"

    @property
    def claim_key(self) -> str:
        return f"{self._own}{CLAIM}"

    @property
    def notes_prefix(self) -> str:
        """Return how the keys of notes begin."""
        return f"{self._own}{NOTES}/"

    @property
    def claim_path(self) -> RemotePath:
        return self.path.top / self.claim_key

    def is_own(self, key: str) -> bool:
        """Return whether a key is of the claim or of a note, and of no file."""
        return key == self.claim_key or key.startswith(self.notes_prefix)

    def parse_claim(self, content: bytes) -> StoreClaim:
        """Read a claim on this place. Raises `Occupied` if it cannot be read."""
        claim = StoreClaim.parse(content)
        if not claim.plan:
            hint = "another version wrote it: delete this object, and its upload is forgotten"
            raise Occupied("the claim of another upload cannot be read", path=self.claim_path, hint=hint)
        return claim

    def exists(self) -> Occupied:
        """Return the error for a place that is not empty."""
        return Occupied("the destination exists", path=self.path, hint="choose another, or replace it with --overwrite")

    def is_held(self, claim: StoreClaim) -> Occupied:
        """Return the error for a place that another upload or deletion has claimed."""
        return Occupied(f"another {claim.describe()}", path=self.path, hint=_ABANDON)

    def was_taken(self) -> Occupied:
        """Return the error for a place that another process claimed after ckptkit looked."""
        hint = "run the same command again when it is done"
        return Occupied("another upload began at this moment", path=self.path, hint=hint)

    def was_lost(self, did: str = "has abandoned") -> Occupied:
        """Return the error for an upload whose claim is another process's by now, and what that `did`."""
        hint = "only one process may write here at a time"
        return Occupied(f"another process {did} this upload", path=self.path, hint=hint)

    def is_not_begun(self) -> Occupied:
        """Return the error for a process that joins an upload which nobody has claimed."""
        hint = "start the process that claims it first, with the same sources and options"
        return Occupied("no upload of these files is under way", path=self.path, hint=hint)

    @property
    def _own(self) -> str:
        return self.path.key if self.is_file else beneath(self.path.key)


def beneath(key: str) -> str:
    """Return how the keys begin that lie below a key."""
    return f"{key}/" if key else ""

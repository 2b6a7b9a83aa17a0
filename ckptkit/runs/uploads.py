"""List the unfinished uploads to a store, and abort the stale ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from ckptkit.checkpoints.checkpoint import Source
from ckptkit.errors import Usage, too_small_error
from ckptkit.io.path import RemotePath, capabilities_at, is_remote
from ckptkit.runs.run_backend import uncached_path_of
from ckptkit.summary import Summarized
from ckptkit.words import count, format_bytes

if TYPE_CHECKING:
    from ckptkit.io.claims import StoreClaim
    from ckptkit.io.stores.s3 import MultipartUpload

WEEK = 7 * 86400.0  # seconds


@dataclass(frozen=True, slots=True)
class OpenUpload:
    """An unfinished upload to `path`: an upload of ckptkit with a claim, or another tool's upload of one object.

    `started` is its start time; `host` is known only from a claim. It has sent nothing for `idle_seconds`. `files` are
    its multipart uploads, whose parts in the store have `sent_bytes`. `whole_bytes` is the size of the complete objects
    at the path.
    """

    path: RemotePath
    started: str
    host: str | None
    idle_seconds: float
    files: tuple[MultipartUpload, ...]
    sent_bytes: int
    whole_bytes: int = 0
    claim: StoreClaim | None = None


@dataclass(frozen=True, slots=True)
class PrunedUploads(Summarized):
    """The unfinished uploads to `root`: `stale` ones, and recently active ones to `keep`.

    `aborted` is True if the stale uploads were aborted, False if they are only listed.
    """

    root: RemotePath
    stale: tuple[OpenUpload, ...]
    keep: tuple[OpenUpload, ...]
    aborted: bool

    @property
    def freed_bytes(self) -> int:
        """Return the bytes of the aborted parts; 0 if nothing was aborted."""
        return sum(upload.sent_bytes for upload in self.stale) if self.aborted else 0

    def summary(self) -> Iterator[str]:
        what, nbytes = count(len(self.stale), "upload"), format_bytes(sum(upload.sent_bytes for upload in self.stale))
        if not self.stale:
            yield f"no stale upload; {count(len(self.keep), 'upload')} under way" if self.keep else "no upload"
        elif self.aborted:
            yield f"aborted {what}, {nbytes} of parts freed"
        else:
            yield f"would abort {what} and free {nbytes} of parts; nothing was aborted yet"


def prune_uploads(run: Source, *, older: float = WEEK, yes: bool = False) -> PrunedUploads:
    """Find the unfinished uploads at or below a prefix on S3, and with `yes` abort the stale ones.

    An upload is stale if it sent nothing for `older` seconds. Includes uploads of ckptkit, with their claims and notes,
    and multipart uploads of other tools. Never deletes complete objects. Raises `Usage` for a local path and for other
    stores.
    """
    root = uncached_path_of(run)
    if older < 0:
        raise too_small_error("older", 0, f"{older:g} seconds")
    if not is_remote(root):
        hint = "run `ckptkit prune RUN --keep-last N --yes`, which also removes the remains of interrupted saves"
        raise Usage("only stores have uploads, and this is a local path", path=root, hint=hint)
    if not capabilities_at(root).uploads:
        hint = "abort uploads there with the tools of the store"
        raise Usage("ckptkit lists and aborts uploads on s3:// only", path=root, hint=hint)
    module = import_module(capabilities_at(root).uploads)
    uploads: list[OpenUpload] = module.find_uploads(root)
    stale = [upload for upload in uploads if upload.idle_seconds >= older]
    # `abort_open_upload` returns False if another upload has taken the place of this one
    aborted = [upload for upload in stale if module.abort_open_upload(upload)] if yes else stale
    return PrunedUploads(root, tuple(aborted), tuple(u for u in uploads if u not in aborted), aborted=yes)

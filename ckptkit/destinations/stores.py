"""Find the destination that a URL means: the table of all stores that are written to."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import cast

from ckptkit.destinations.destination import CLAIM, Destination
from ckptkit.destinations.pieces import FilePiece
from ckptkit.errors import CkptError, NotACheckpoint, Occupied, Unsupported, Usage
from ckptkit.files.path import RemotePath, is_url, parse_url

DESTINATIONS = {  # by the scheme of a URL, or its beginning
    "az": "ckptkit.destinations.objects:ObjectDestination",
    "gs": "ckptkit.destinations.objects:ObjectDestination",
    "s3": "ckptkit.destinations.s3:S3Destination",
    "hf": "ckptkit.destinations.hub_repo:HubRepoDestination",
    "hf://buckets": "ckptkit.destinations.hub_bucket:HubBucketDestination",
}
REPOSITORY = "hf"  # the one whose places have a history: a whole repository is a place too


@dataclass(frozen=True, slots=True)
class StorePieces:
    """The `PieceSink` of a destination in a store. A small file among the `marks` is not sent: `mark` does that."""

    there: Destination
    marks: Collection[str]

    def recall(self, piece: FilePiece, data: memoryview) -> bool:  # noqa: ARG002
        """Return False: what a store has is compared by its checksum, and not read."""
        return False

    def put(self, piece: FilePiece, data: memoryview, crc: int) -> None:
        """Send a piece."""
        if piece.count > 1 or piece.name not in self.marks:
            self.there.put(piece, data, crc)

    def stop(self, error: BaseException) -> None:
        self.there.stop(error)


def to_destination(place: str | os.PathLike[str]) -> Path:
    """Return the path that a user means by `place`, to be written to: a local one, or one in a store.

    Raises `Usage` for a URL that ckptkit does not write to.
    """
    path = parse_url(place) if isinstance(place, str) and is_url(place) else place
    if not isinstance(path, RemotePath):
        return Path(path)
    if kind_of(path) not in DESTINATIONS:
        schemes = dict.fromkeys(f"{name.partition('://')[0]}://" for name in DESTINATIONS)
        hint = f"write to a local directory, or to {', '.join(schemes)}"
        raise Usage(f"ckptkit does not write to `{place}`", hint=hint)
    if path == path.top and not keeps_others(path):
        raise Usage(f"`{place}` is a whole bucket", hint=f"write it like {place}/run/ckpt-5")
    return path


def open_destination(
    path: RemotePath, sizes: Mapping[str, int], marks: Sequence[str], *, plan: str, is_file: bool = False
) -> Destination:
    """Return the destination at a path that `to_destination` gave; see `Destination` for the other arguments."""
    module, _, name = DESTINATIONS[kind_of(path)].partition(":")
    kind = getattr(import_module(module), name)
    return cast(Destination, kind(path, sizes, marks, plan=plan, is_file=is_file))


def require_shared(path: RemotePath) -> None:
    """Raise `Unsupported` if only one process can write to a place, whose files become visible at once."""
    if is_on_hub(path):
        message = "several processes cannot write to hf:// together"
        hint = "write to a local directory or to s3://, then `ckptkit cp` it there"
        raise Unsupported(message, path=path, hint=hint)


def check_absent(dst: RemotePath) -> None:
    """Raise `Occupied` if something is at a destination in a store. Where an upload began the claim decides."""
    dst.store.forget()
    claims = (dst / CLAIM, dst.parent / f"{dst.name}{CLAIM}")
    with suppress(NotACheckpoint):  # there is no such bucket yet
        if dst.exists() and not any(claim.exists() for claim in claims):
            raise Occupied("the destination exists", path=dst, hint="choose another, or replace it with --overwrite")


def keeps_others(path: RemotePath) -> bool:
    """Return whether other files may stay where a checkpoint appears, as in a repository with its history."""
    return kind_of(path) == REPOSITORY


def is_on_hub(path: Path | None) -> bool:
    """Return whether a path is in a repository or bucket of the Hugging Face Hub."""
    return isinstance(path, RemotePath) and scheme_of(path) == REPOSITORY


def kind_of(path: RemotePath) -> str:
    """Return by which name the table of destinations has the store of a path."""
    start = f"{scheme_of(path)}://{path.parts[1]}" if len(path.parts) > 1 else ""
    return start if start in DESTINATIONS else scheme_of(path)


def scheme_of(path: RemotePath) -> str:
    return path.parts[0].removesuffix(":")


@contextmanager
def keeping(there: Destination) -> Iterator[None]:
    """Say of an error inside the block, which ends an upload, that the store keeps what was sent."""
    words = f"the store keeps the parts that were sent to {there.path}: the same command continues the upload"
    try:
        yield
    except CkptError as error:
        there.stop(error)
        error.hint = f"{error.hint}; {words}" if error.hint else words
        raise
    except BaseException as error:
        there.stop(error)
        error.add_note(words)
        raise

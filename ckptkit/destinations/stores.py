"""Find the destination that a URL means: the table of all stores that are written to."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import cast

from ckptkit.destinations.destination import CLAIM, Destination
from ckptkit.destinations.pieces import FilePiece
from ckptkit.errors import CkptError, Occupied, Usage
from ckptkit.files.path import RemotePath, is_url, parse_url

DESTINATIONS = {  # by the scheme of a URL
    "s3": "ckptkit.destinations.s3:S3Destination",
}


@dataclass(frozen=True, slots=True)
class StorePieces:
    """The `PieceSink` of a destination in a store. A small file among the `marks` is not sent: `mark` does that."""

    there: Destination
    marks: Collection[str]

    def recall(self, piece: FilePiece, data: bytearray) -> bool:  # noqa: ARG002
        """Return False: what a store has is compared by its checksum, and not read."""
        return False

    def put(self, piece: FilePiece, data: bytearray, crc: int) -> None:
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
    if scheme_of(path) not in DESTINATIONS:
        hint = f"write to a local directory, or to {', '.join(f'{scheme}://' for scheme in DESTINATIONS)}"
        raise Usage(f"`{place}` is no place that ckptkit writes to", hint=hint)
    if not path.key:
        raise Usage(f"`{place}` is a whole bucket", hint=f"write it like {place}/run/ckpt-5")
    return path


def open_destination(
    path: RemotePath, sizes: Mapping[str, int], marks: Sequence[str], *, plan: str, is_file: bool = False
) -> Destination:
    """Return the destination at a path that `to_destination` gave; see `Destination` for the other arguments."""
    module, _, name = DESTINATIONS[scheme_of(path)].partition(":")
    kind = getattr(import_module(module), name)
    return cast(Destination, kind(path, sizes, marks, plan=plan, is_file=is_file))


def check_absent(dst: RemotePath) -> None:
    """Raise `Occupied` if something is at a destination in a store.

    Where an upload began the claim decides, and in a repository its history.
    """
    claims = (dst / CLAIM, dst.parent / f"{dst.name}{CLAIM}")
    if dst.key and dst.exists() and not any(claim.exists() for claim in claims):
        raise Occupied("the destination exists", path=dst, hint="choose another, or replace it with --overwrite")


def scheme_of(path: RemotePath) -> str:
    return path.parts[0].removesuffix(":")


@contextmanager
def keeping(there: Destination) -> Iterator[None]:
    """Say of an error inside the block, which ends an upload, that the store keeps what was sent."""
    words = f"the store keeps what was sent to {there.path}: the same command goes on with it"
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

"""Refuse a destination at which the source would be lost, or would no longer be what it is. Writes nothing."""

from __future__ import annotations

from pathlib import Path

from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.checkpoints.part import Part
from ckptkit.conversion.other_files import own_files
from ckptkit.errors import Unsafe
from ckptkit.files.joined import JoinedPath, roots_of
from ckptkit.formats import FORMATS, FormatWriter
from ckptkit.trainers.ckptkit import TRAINING

_HINT = "choose another destination"


def check_apart(source: Checkpoint, dst: Path, writer: FormatWriter) -> None:
    """Raise `Unsafe` if making `dst` would take away what is being read, or change what the source is.

    A result may lie inside the source where nothing of that is touched, and where it is no part of it afterwards.
    """
    target = dst.resolve()
    for path in (source.path, *(part.path for part in source.parts)):
        if any(contains(target, place) for place in resolved(path)):
            raise Unsafe("the source is the destination, or lies inside it", path=dst, hint=_HINT)
    if target.parent in resolved(source.path):
        check_beside_parts(source, dst)
    for part in source.parts:
        if target.parent in resolved(part.path):
            check_in_part(part, dst, writer)


def resolved(path: Path) -> list[Path]:
    """Return where a path leads, without links: to one place, or to each directory that it means."""
    return [place.resolve() for place in roots_of(path)] if isinstance(path, JoinedPath) else [path.resolve()]


def contains(one: Path, other: Path) -> bool:
    """Return whether a path is another, or the other lies in it."""
    return one == other or one in other.parents


def check_beside_parts(source: Checkpoint, dst: Path) -> None:
    """Raise `Unsafe` if a result directly in a checkpoint's directory would be taken for a part of it."""
    if not source.is_direct or dst.name == TRAINING:
        raise Unsafe("the destination would become a part of the source", path=dst, hint=_HINT)


def check_in_part(part: Part, dst: Path, writer: FormatWriter) -> None:
    """Raise `Unsafe` if a result in the directory of a part is a file of that, or could be taken for one."""
    if part.reader.owns(dst.name) or dst.resolve() in (file.resolve() for file in own_files(part.layout)):
        raise Unsafe("the destination is a file of the source", path=dst, hint=_HINT)
    order = list(FORMATS)
    if dst.suffix in writer.suffixes and order.index(writer.name) <= order.index(part.reader.name):
        raise Unsafe("the destination would be taken for the source, whose files it lies beside", path=dst, hint=_HINT)


def entry_at(root: Path, dst: Path) -> Path | None:
    """Return `dst` as it is called in directory `root`, None if it lies elsewhere."""
    target = dst.resolve()
    there = next((place for place in resolved(root) if place in target.parents), None)
    return None if there is None else root / target.relative_to(there)

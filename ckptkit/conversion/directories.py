"""Look around in the directories of source and destination: what collides, what goes along, what stays behind.

Writes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.checkpoints.manifest import NAME as MANIFEST
from ckptkit.checkpoints.part import Part
from ckptkit.errors import Unsafe, and_more, translate_os_errors
from ckptkit.files.file import children
from ckptkit.files.joined import JoinedPath, roots_of
from ckptkit.files.local import is_strange_link
from ckptkit.formats import FORMATS, FormatWriter, get_format, is_known_file
from ckptkit.layout import Layout
from ckptkit.models.companions import FILES, places_of
from ckptkit.names.weights import TRAINING as OF_TRAINING
from ckptkit.trainers import ONE_FILE, is_kept, is_other_part, is_training_state, step_of
from ckptkit.trainers.ckptkit import TRAINING

_HINT = "choose another destination"
LINK = "not a regular file"
HIDDEN = "hidden"
WEIGHTS = "weights of another model, or of an earlier save"
NOT_KNOWN = "not known"
COMPANION = "config or tokenizer"


class LeftBehind(NamedTuple):
    """A file of a source that is neither read nor taken along, or a directory of such files, and why."""

    path: Path
    why: str
    name: str  # as seen from the directory of the checkpoint

    @property
    def is_known(self) -> bool:
        """Return whether a rule says that it stays: nobody asked for the others to be lost."""
        return self.why not in (WEIGHTS, NOT_KNOWN)


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


def files_beside(root: Path, taken: frozenset[Path]) -> tuple[dict[str, Path], list[str]]:
    """Return the regular files anywhere in a checkpoint directory, by their names in it, and the names of all others.

    What is in `taken`, files and directories, is not among them, nor are manifests, which are true of what they
    describe only. Hidden files are only if a trainer's checkpoint needs them.
    """
    found: dict[str, Path] = {}
    left: list[str] = []
    with translate_os_errors(root):
        for path in walk(root, taken):
            if is_strange_link(path) or not path.is_file():
                left.append(str(path.relative_to(root)))
            else:
                found[str(path.relative_to(root))] = path
    return found, left


def walk(folder: Path, taken: frozenset[Path]) -> Iterator[Path]:
    """Yield all that is anywhere in a directory, but for directories and what is in `taken`; the deeper the later."""
    there = children(folder)
    names = {path.name for path in there}
    inside = [path for path in there if path not in taken and not is_left(path.name, names)]
    below = [path for path in inside if path.is_dir() and not path.is_symlink()]
    yield from (path for path in inside if path not in below and path.name != MANIFEST)
    for path in below:
        yield from walk(path, taken)


def is_left(name: str, beside: Iterable[str]) -> bool:
    """Return whether a hidden file stays behind, as all do that are no part of some trainer's checkpoint."""
    return name.startswith(".") and not is_kept(name, beside)


def own_files(layout: Layout) -> list[Path]:
    """Return the files that a part consists of, and others of its format, which an earlier save has left there."""
    used, reader = {Path(name).parts[0] for name in layout.files}, get_format(layout.format)
    return [file for file in layout.root.iterdir() if file.name in used or reader.owns(file.name)]


def find_left_behind(checkpoint: Checkpoint, used: Iterable[Path]) -> list[LeftBehind]:
    """Return what of a checkpoint's directory is not among the files and directories `used`, each with why."""
    root = checkpoint.path
    if not root.is_dir():
        return []
    parts = {part.path for part in checkpoint.parts} - {root}
    with translate_os_errors(root):
        return list(left_in(root, frozenset(used), parts))


def files_taken(checkpoint: Checkpoint, made: Iterable[str], dst: Path) -> Iterator[Path]:
    """Yield what else is used in a checkpoint's directory: companions of the names `made`, and the result at `dst`."""
    places = [*places_of(checkpoint.path), *(part.path for part in checkpoint.parts)]
    yield from (place / name for name in made for place in places)
    result = entry_at(checkpoint.path, dst)
    yield from [result] if result else []


def describe_left(found: Iterable[LeftBehind], verb: str) -> list[str]:
    """Return a line for each reason: the verb, the first names, and the reason."""
    names: dict[str, list[str]] = {}
    for left in found:
        names.setdefault(left.why, []).append(left.name)
    return [f"{verb}: {', '.join(some[:6])}{and_more(len(some) - 6)} ({why})" for why, some in names.items()]


def left_in(root: Path, used: frozenset[Path], parts: set[Path], folder: Path | None = None) -> Iterator[LeftBehind]:
    """Yield what of directory `root` is not `used`, or of a folder in it; in `parts` is state of the training."""
    there = children(folder or root)
    names = {path.name for path in there}
    for path in there:
        if path in used or path.name == MANIFEST:
            continue
        name = str(path.relative_to(root))
        if path in parts and path.is_dir() and not any(path in one.parents for one in used):
            yield LeftBehind(path, OF_TRAINING if is_other_part(path.name) else WEIGHTS, name)
        elif path.is_dir() and not path.is_symlink() and not is_left(path.name, names) and step_of(path) is None:
            yield from left_in(root, used, parts, path)
        else:
            yield LeftBehind(path, OF_TRAINING if folder in parts else reason_to_leave(path, names), name)


def reason_to_leave(path: Path, beside: Iterable[str]) -> str:
    """Return what a file or directory that is not used seems to be, by its name."""
    if is_strange_link(path) or not (path.is_file() or path.is_dir()):
        return LINK
    if is_left(path.name, beside):
        return HIDDEN
    if path.is_dir():
        return "a checkpoint of its own"
    if is_training_state(path.name):
        return OF_TRAINING
    if path.name in FILES:
        return COMPANION
    return WEIGHTS if path.suffix in ONE_FILE or is_known_file([path.name]) else NOT_KNOWN

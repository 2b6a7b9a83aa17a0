"""Check the directories of source and destination: collisions, and files to copy or to leave."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.checkpoints.component import Component
from ckptkit.checkpoints.find_components import is_left, is_save_marker
from ckptkit.checkpoints.replaceable import require_no_checkpoint, states_only_at
from ckptkit.errors import Occupied, Unsafe, Usage, translate_os_errors
from ckptkit.formats import FORMATS, FormatWriter, format_of_file, get_format
from ckptkit.io.destination import check_absent, keeps_others
from ckptkit.io.file import children
from ckptkit.io.joined import JoinedPath, roots_of
from ckptkit.io.local import is_strange_link
from ckptkit.io.path import is_remote
from ckptkit.io.staging import check_destination
from ckptkit.layout import Layout
from ckptkit.models.companions import places_of
from ckptkit.trainers import is_kept
from ckptkit.trainers.ckptkit import TRAINING

_HINT = "choose another destination"


def check_free(dst: Path, *, overwrite: bool, is_file: bool) -> None:
    """Raise `Occupied` if something is at a destination that may not be replaced."""
    if not is_remote(dst):
        try:
            check_destination(dst, overwrite, is_file=is_file)
        except Occupied as error:
            if not overwrite and states_only_at(dst):
                error.hint = _HINT  # a wrong --overwrite could lose it
            raise
    elif not overwrite:
        if keeps_others(dst):
            require_no_checkpoint(dst)
        else:
            check_absent(dst)


def require_directory_name(dst: Path, writer: FormatWriter) -> None:
    """Raise `Usage` if the format writes a directory, and the destination is named like a file, as `model.pt`."""
    if dst.suffix not in writer.suffixes and format_of_file(dst.name) is not None:
        hint = f"name a directory, such as `{dst.name.removesuffix(dst.suffix)}`"
        raise Usage(f"`{writer.name}` writes a directory, but this is the name of a file", path=dst, hint=hint)


def require_separate_destination(source: Checkpoint, dst: Path, writer: FormatWriter) -> None:
    """Raise `Unsafe` if making `dst` would take away what is being read, or change what the source is.

    A result may lie inside the source where nothing of that is touched, and where it is no part of it afterwards.
    """
    target = dst.resolve()
    for path in (source.path, *(part.path for part in source.components)):
        if any(contains(target, place) for place in resolved(path)):
            raise Unsafe("the source is the destination, or inside it", path=dst, hint=_HINT)
    if target.parent in resolved(source.path):
        check_beside_parts(source, dst)
    for part in source.components:
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
        raise Unsafe("the destination is inside the source", path=dst, hint=_HINT)


def check_in_part(part: Component, dst: Path, writer: FormatWriter) -> None:
    """Raise `Unsafe` if a result in the directory of a part is a file of that, or could be taken for one."""
    if part.reader.owns(dst.name) or dst.resolve() in (file.resolve() for file in own_files(part.layout)):
        raise Unsafe("the destination is a file of the source", path=dst, hint=_HINT)
    order = list(FORMATS)
    if dst.suffix in writer.suffixes and order.index(writer.name) <= order.index(part.reader.name):
        raise Unsafe(
            "the destination is beside the source's files and would be read as a part of the source",
            path=dst,
            hint=_HINT,
        )


def entry_at(root: Path, dst: Path) -> Path | None:
    """Return `dst` as it is called in directory `root`, None if it lies elsewhere."""
    target = dst.resolve()
    there = next((place for place in resolved(root) if place in target.parents), None)
    return None if there is None else root / target.relative_to(there)


def files_beside(root: Path, taken: frozenset[Path]) -> tuple[dict[str, Path], list[str]]:
    """Return the regular files anywhere in a checkpoint directory, by their names in it, and the names of all others.

    What is in `taken`, files and directories, is not among them. Manifests and the marks that a save has ended are
    not either: they are true of what they describe only. Hidden files are only if a trainer's checkpoint needs them, or
    in a directory that goes along as it is.
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


def walk(folder: Path, taken: frozenset[Path], *, hidden: bool = False) -> Iterator[Path]:
    """Yield all that is anywhere in a directory, but for directories and what is in `taken`; the deeper the later.

    With `hidden` no hidden file is left out.
    """
    there = children(folder)
    names = {path.name for path in there}
    inside = [path for path in there if path not in taken and (hidden or not is_left(path.name, names))]
    below = [path for path in inside if path.is_dir() and not path.is_symlink()]
    yield from (path for path in inside if path not in below and not is_save_marker(path.name))
    for path in below:
        yield from walk(path, taken, hidden=hidden or is_kept(path.name, names))


def own_files(layout: Layout) -> list[Path]:
    """Return the files that a part consists of, and others of its format, which an earlier save has left there."""
    used, reader = {Path(name).parts[0] for name in layout.files}, get_format(layout.format)
    return [file for file in layout.root.iterdir() if file.name in used or reader.owns(file.name)]


def files_taken(checkpoint: Checkpoint, made: Iterable[str], dst: Path) -> Iterator[Path]:
    """Yield further files that a conversion uses: companions of the names `made`, and the output at `dst`."""
    places = [*places_of(checkpoint.path), *(part.path for part in checkpoint.components)]
    yield from (place / name for name in made for place in places)
    result = entry_at(checkpoint.path, dst)
    yield from [result] if result else []

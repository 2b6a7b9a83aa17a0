"""Check the directories of source and destination: collisions, and files to copy or to leave."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.checkpoints.find_components import is_hidden_file_not_copied, is_manifest_or_marker
from ckptkit.checkpoints.replaceable import checkpoint_and_manifest_files, training_state_at
from ckptkit.errors import NotACheckpoint, Occupied, Unsafe, Usage, translate_os_errors
from ckptkit.formats import FORMATS, FormatWriter, find_format_of_file_name, get_format
from ckptkit.io.destination import allows_other_files, require_absent
from ckptkit.io.file import destination_exists_error, list_children
from ckptkit.io.joined_path import local_paths_of
from ckptkit.io.local_file import is_link_outside_cache
from ckptkit.io.path import drop_cached_listing, is_remote
from ckptkit.io.staging import require_free_destination
from ckptkit.layout import Layout
from ckptkit.trainers import is_copied_unchanged
from ckptkit.trainers.ckptkit import TRAINING

_HINT = "choose another destination"


def require_free_or_replaceable(dst: Path, *, overwrite: bool, is_file: bool) -> None:
    """Raise `Occupied` if the destination exists and may not be replaced."""
    if not is_remote(dst):
        try:
            require_free_destination(dst, overwrite, is_file=is_file)
        except Occupied as error:
            if not overwrite and training_state_at(dst):
                error.hint = _HINT  # do not suggest --overwrite: a mistake would delete training state
            raise
    elif not overwrite:
        if not allows_other_files(dst):
            require_absent(dst, is_file=is_file)
            return
        drop_cached_listing(dst)
        with suppress(NotACheckpoint):  # the repository does not exist yet
            if checkpoint_and_manifest_files(dst):
                raise destination_exists_error(dst)


def require_directory_name(dst: Path, writer: FormatWriter) -> None:
    """Raise `Usage` if the format writes a directory, and the destination is named like a file, such as `model.pt`."""
    if dst.suffix not in writer.suffixes and find_format_of_file_name(dst.name) is not None:
        hint = f"name a directory, such as `{dst.name.removesuffix(dst.suffix)}`"
        raise Usage(f"`{writer.name}` writes a directory, but this is the name of a file", path=dst, hint=hint)


def require_separate_destination(source: Checkpoint, dst: Path, writer: FormatWriter) -> None:
    """Raise `Unsafe` if writing `dst` would replace files that are read, or change which files belong to the source.

    A destination inside the source is allowed if neither happens.
    """
    for path in (source.path, *(part.path for part in source.components)):
        require_outside_destination(path, dst)
    target = dst.resolve()
    # in the source's own directory, the result would be read as a component of it
    if target.parent in resolve_joined_path(source.path) and (not source.is_at_own_path or dst.name == TRAINING):
        raise Unsafe("the destination is inside the source", path=dst, hint=_HINT)
    order = list(FORMATS)
    for part in source.components:
        if target.parent not in resolve_joined_path(part.path):
            continue
        if part.reader.owns_file(dst.name) or target in (file.resolve() for file in files_of_format_in(part.layout)):
            raise Unsafe("the destination is a file of the source", path=dst, hint=_HINT)
        if dst.suffix in writer.suffixes and order.index(writer.name) <= order.index(part.reader.name):
            message = "the destination is beside the source's files and would be read as a part of the source"
            raise Unsafe(message, path=dst, hint=_HINT)


def require_outside_destination(source: Path, dst: Path) -> None:
    """Raise `Unsafe` if the source is the destination, or inside it: `--overwrite` would delete what is read.

    A store's destination may not be inside the source either, because its claim would be among the objects to read.
    """
    if any(is_same_or_inside(dst.resolve(), place) for place in resolve_joined_path(source)):
        raise Unsafe("the source is the destination, or inside it", path=dst, hint=_HINT)
    if is_remote(dst) and is_same_or_inside(source, dst):
        raise Unsafe("the destination is inside the source", path=dst, hint=_HINT)


def resolve_joined_path(path: Path) -> list[Path]:
    """Return the real path without links; for a joined path, the real path of each directory."""
    return [place.resolve() for place in local_paths_of(path)]


def is_same_or_inside(outer: Path, inner: Path) -> bool:
    return outer == inner or outer in inner.parents


def path_below(root: Path, dst: Path) -> Path | None:
    """Return `dst` as a path below `root`, as `root` is spelled; None if it is outside."""
    target = dst.resolve()
    ancestor = next((place for place in resolve_joined_path(root) if place in target.parents), None)
    return None if ancestor is None else root / target.relative_to(ancestor)


def files_to_copy_and_others(root: Path, taken: frozenset[Path]) -> tuple[dict[str, Path], list[str]]:
    """Return two results for a checkpoint directory: the regular files to copy, and the paths of all other entries.

    Both are relative paths. Skips files and directories in `taken`. Skips manifests and the markers of a finished save:
    they are valid only for the save that they describe. Hidden files are included only if a trainer needs them, or if
    their directory is copied whole.
    """
    regular: dict[str, Path] = {}
    skipped: list[str] = []
    with translate_os_errors(root):
        for path in other_files_below(root, taken):
            name = str(path.relative_to(root))
            if is_link_outside_cache(path) or not path.is_file():
                skipped.append(name)
            else:
                regular[name] = path
    return regular, skipped


def other_files_below(directory: Path, taken: frozenset[Path], *, hidden: bool = False) -> Iterator[Path]:
    """Yield all entries below a directory except directories and those `taken`; deeper ones last, `hidden` if asked."""
    entries = list_children(directory)
    names = {path.name for path in entries}
    included = [
        path for path in entries if path not in taken and (hidden or not is_hidden_file_not_copied(path.name, names))
    ]
    subdirectories = [path for path in included if path.is_dir() and not path.is_symlink()]
    yield from (path for path in included if path not in subdirectories and not is_manifest_or_marker(path.name))
    for path in subdirectories:
        yield from other_files_below(path, taken, hidden=hidden or is_copied_unchanged(path.name, names))


def files_of_format_in(layout: Layout) -> list[Path]:
    """Return the files of a component, and other files of its format that an earlier save left in its directory."""
    used, reader = {Path(name).parts[0] for name in layout.files}, get_format(layout.format)
    return [file for file in layout.root.iterdir() if file.name in used or reader.owns_file(file.name)]

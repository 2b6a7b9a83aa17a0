"""Decide whether a directory or file may be replaced: only if it is one checkpoint, and ckptkit knows its entries.

A training checkpoint that was not converted from another checkpoint cannot be made again. Only a later save of the
training, or a copy of another such checkpoint, may replace it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

from ckptkit import trainers
from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.checkpoints.component import Component
from ckptkit.checkpoints.manifest import NAME as MANIFEST
from ckptkit.checkpoints.manifest import read_manifest
from ckptkit.checkpoints.other_kinds import find_kind_by_files, find_non_checkpoint_kind
from ckptkit.checkpoints.salvage_account import NAME as ACCOUNT
from ckptkit.errors import (
    Corrupt,
    Mismatch,
    NotACheckpoint,
    Occupied,
    Unsupported,
    and_more,
    names_and_more,
    translate_os_errors,
)
from ckptkit.formats import is_main_file_name
from ckptkit.io.file import list_children, names_in
from ckptkit.io.path import drop_cached_listing
from ckptkit.models.adapter_config_differences import ADAPTER_CONFIG
from ckptkit.models.companions import FILES, TEMPLATES
from ckptkit.models.names.weights import training_state_names

_BESIDE_MANIFEST = frozenset((MANIFEST, ACCOUNT, ".gitattributes"))
_OWN = _BESIDE_MANIFEST.union((*FILES, TEMPLATES))
_UNREADABLE = (Corrupt, Mismatch, NotACheckpoint, Unsupported)
_MOST_NAMED = 5


def check_replaceable(dst: Path, output_files: Iterable[str] = (), *, output_is_training: bool = False) -> None:
    """Raise `Occupied` if `dst` is not a checkpoint, or a directory with entries that ckptkit does not know.

    The files `output_files` are about to be written under the same names, so they may always be replaced. A training
    checkpoint that ckptkit did not make from another one may only be replaced if the output is one, too.
    """
    if dst.is_symlink() or not dst.exists():
        return
    if not dst.is_dir():
        if not is_checkpoint_file(dst):
            hint = "choose another destination: --overwrite replaces a checkpoint only"
            raise Occupied("the destination is a file without tensors", path=dst, hint=hint)
        require_no_training_at(dst, output_is_training=output_is_training)
        return
    output_files = list(output_files)
    if find_non_checkpoint_kind(dst) and not find_kind_by_files(output_files):
        hint = "choose another destination, or delete this one first: --overwrite replaces a checkpoint only"
        raise Occupied("the destination is no checkpoint, such as a delta", path=dst, hint=hint)
    with translate_os_errors(dst):
        known = {dst / name for name in output_files}
        unknown = [
            str(path.relative_to(dst)) for path in unknown_entries(dst, known, output_is_training=output_is_training)
        ]
    if unknown:
        named = names_and_more(unknown, _MOST_NAMED)
        message = f"the destination contains entries that ckptkit does not know: {named}"
        hint = "choose another destination, or move these entries first: --overwrite replaces one checkpoint only"
        raise Occupied(message, path=dst, hint=hint)
    require_no_training_at(dst, output_is_training=output_is_training)


def require_no_training_at(dst: Path, *, output_is_training: bool) -> None:
    """Raise `Occupied` for a training checkpoint that cannot be made again; see `check_replaceable`."""
    if not output_is_training and (entries := training_state_at(dst)):
        message = f"the destination is a checkpoint of a training, which cannot be made again: it has `{entries[0]}`"
        hint = "choose another destination, or delete this checkpoint first: --overwrite replaces exports"
        raise Occupied(f"{message}{and_more(len(entries) - 1)}", path=dst, hint=hint)


def training_state_at(dst: Path) -> list[str]:
    """Return the components or tensors at `dst` that are training state.

    Those in files that ckptkit made from another checkpoint are left out. Returns [] for a checkpoint that cannot be
    read.
    """
    checkpoint = Checkpoint.at(dst)
    folders = {dst, *(one.path for one in checkpoint.components)}
    made = {path for folder in folders for path in files_in_manifest(folder, only_if_converted=True)}
    components = [
        one.place
        for one in checkpoint.components
        if one.place and not one.is_model and not files_of_component(one) <= made
    ]
    try:
        layout = checkpoint.layout
        states = training_state_names(layout)
        paths = {name: layout.root / item.path for name, item in layout.chunks_and_blobs if name in states}
        return components or sorted(name for name in states if paths.get(name) not in made)
    except _UNREADABLE:
        return components


def files_of_component(component: Component) -> set[Path]:
    """Return the files of a component; if it cannot be read, those that its format owns by their names."""
    try:
        layout = component.layout
        return {layout.root / name for name in layout.files}
    except _UNREADABLE:
        folder = component.path if component.path.is_dir() else component.path.parent
        return {folder / name for name in names_in(folder) if component.reader.owns_file(name)}


def is_checkpoint_file(path: Path) -> bool:
    """Return whether a file has tensors. A damaged checkpoint counts, because it may be replaced, too."""
    components = Checkpoint.at(path).components
    try:
        return bool(components) and bool(components[0].layout.tensors)
    except Corrupt:
        return True
    except _UNREADABLE:
        return False


def check_replaceable_and_find_markers(
    dst: Path, output_files: Iterable[str], *, output_is_training: bool = False
) -> tuple[str, ...]:
    """Return the marker files in a store: without them, nobody takes `dst` for a checkpoint.

    If other files stay, as in a repository, these are all files of the checkpoint. Raises `Occupied` if `dst` may not
    be replaced; see `check_replaceable`.
    """
    from ckptkit.io.destination import allows_other_files

    drop_cached_listing(dst)
    if allows_other_files(dst):
        return checkpoint_and_manifest_files(dst)
    check_replaceable(dst, output_files, output_is_training=output_is_training)
    markers = []
    for part in Checkpoint.at(dst).components if dst.is_dir() else ():
        with suppress(*_UNREADABLE):  # unreadable, so it has no marker files
            markers += [str((part.layout.root / name).relative_to(dst)) for name in part.layout.descriptions]
    return tuple(markers)


def checkpoint_and_manifest_files(dst: Path) -> tuple[str, ...]:
    """Return the files of the checkpoint in a directory, and of its manifests. Raises `Occupied` for several models."""
    checkpoint = Checkpoint.at(dst) if dst.is_dir() else None
    if checkpoint is None or not checkpoint.components:
        return ()
    if len(checkpoint.models) > 1:
        names = ", ".join(sorted({component.reader.name for component in checkpoint.components}))
        message = f"the destination contains several models ({names}), but --overwrite replaces only one"
        raise Occupied(message, path=dst, hint="choose another destination, or remove the models first")
    folders, files = component_paths_and_files(checkpoint)
    manifests = {folder / MANIFEST for folder in (dst, *folders) if MANIFEST in names_in(folder)}
    recorded = {path for manifest in manifests for path in files_in_manifest(manifest.parent)}
    return tuple(sorted(str(path.relative_to(dst)) for path in files | manifests | recorded))


def unknown_entries(root: Path, output_files: set[Path], *, output_is_training: bool) -> Iterator[Path]:
    """Yield the entries of directory `root`, except those of its checkpoint and the files `output_files`.

    A file with tensors belongs to it if its components read it or its manifest lists it, not by its name: it may be
    another model. The same is true of every file beside the manifest of an export. An output that is a training
    checkpoint, such as a later save, replaces them, too.
    """
    parts, files = component_paths_and_files(Checkpoint.at(root))
    is_checkpoint = bool(parts) or MANIFEST in names_in(root)
    known = output_files | files
    above = {folder for path in known for folder in path.parents} | parts
    is_export = cache(partial(files_in_manifest, only_if_converted=True))

    def is_known(path: Path, beside: Iterable[str]) -> bool:
        if not output_is_training and is_export(path.parent):  # the manifest lists what ckptkit wrote
            return path.name in _BESIDE_MANIFEST
        name = path.name
        is_ours = name in _OWN or is_main_file_name(name)
        is_named = is_ours or trainers.is_checkpoint_file_name(name) or trainers.is_copied_unchanged(name, beside)
        return is_named and (output_is_training or path.is_dir() or not is_checkpoint_file(path))

    yield from unknown_paths_in(root, known, above, is_known if is_checkpoint else lambda *_: False)


def component_paths_and_files(checkpoint: Checkpoint) -> tuple[set[Path], set[Path]]:
    """Return the paths of the components of the only checkpoint in a directory, and their files.

    These are the files that they read, and the config of an adapter: without the adapter, loaders fail on it.
    """
    components = checkpoint.components
    if len(checkpoint.models) > 1:  # several models side by side: not one checkpoint
        return set(), set()
    files = {file for one in components for file in files_of_component(one)}
    configs = {file.with_name(ADAPTER_CONFIG) for file in files if file.name.startswith("adapter_model.")}
    return {one.path for one in components}, files | {file for file in configs if file.exists()}


def unknown_paths_in(
    directory: Path,
    known_files: set[Path],
    parents_of_known: set[Path],
    is_known: Callable[[Path, Iterable[str]], bool],
) -> Iterator[Path]:
    """Yield the unknown paths in a directory: `parents_of_known` are the directories that contain `known_files`.

    `is_known(path, names_beside)` returns whether another path belongs to a checkpoint.
    """
    recorded = files_in_manifest(directory)
    known_files, parents_of_known = (
        known_files | recorded,
        parents_of_known | {parent for path in recorded for parent in path.parents},
    )
    names = names_in(directory)
    for path in list_children(directory):
        name = path.name
        if path in known_files or is_known(path, names):
            continue
        is_of_trainer = (
            trainers.is_non_model_component_name(name)
            or trainers.is_whole(name)
            or name in trainers.companion_directories()
        )
        if path.is_symlink() or not path.is_dir():
            yield path
        elif path in parents_of_known or is_of_trainer:
            yield from unknown_paths_in(path, known_files, parents_of_known, is_known)
        elif names_in(path):
            yield path


def files_in_manifest(directory: Path, *, only_if_converted: bool = False) -> set[Path]:
    """Return the files that the manifest in a directory lists; none if the manifest is missing or damaged.

    With `only_if_converted`, returns them only if ckptkit made them from another checkpoint.
    """
    try:
        manifest = read_manifest(directory) if directory.is_dir() else None
    except Corrupt:
        return set()
    if manifest is None or (only_if_converted and manifest.source is None):
        return set()
    return {directory / name for name in manifest.files}

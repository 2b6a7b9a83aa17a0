"""Find the files of a checkpoint that hold none of its tensors and go along: schedulers, configs, tokenizers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from ckptkit.checkpoints.manifest import NAME as MANIFEST
from ckptkit.errors import translate_os_errors
from ckptkit.files.file import children
from ckptkit.files.local import is_strange_link
from ckptkit.formats import get_format
from ckptkit.layout import Layout
from ckptkit.trainers import is_kept


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

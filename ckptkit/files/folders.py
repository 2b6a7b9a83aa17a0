"""List what lies in a directory, by name."""

from __future__ import annotations

import os
from pathlib import Path

from ckptkit.errors import translate_os_errors
from ckptkit.files.file import names_in
from ckptkit.files.joined import roots_of


def children(path: Path) -> list[Path]:
    """Return everything that lies in a directory, by name."""
    with translate_os_errors(path):
        return sorted(path / name for name in names_in(path))


def folders(path: Path) -> list[Path]:
    """Return the directories in a directory, and links to some, by name."""
    with translate_os_errors(path):
        return [child for child in children(path) if child.is_dir()]


def entry_of(root: Path, target: str) -> str | None:
    """Return the entry of directory `root` that a link in it leads to or into, None if it leads elsewhere."""
    there = next(iter(roots_of(root)), root).absolute()
    place = Path(os.path.normpath(there / target))
    return place.relative_to(there).parts[0] if there in place.parents else None

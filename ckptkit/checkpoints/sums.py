"""Sum the files of a checkpoint, and write the manifest that they make."""

from __future__ import annotations

import stat
from collections.abc import Iterable
from pathlib import Path

from ckptkit.checkpoints.manifest import NAME, FileSum, Manifest
from ckptkit.destinations.staging import publish
from ckptkit.engine.scan import sum_file
from ckptkit.files.file import file_size, names_in
from ckptkit.files.joined import roots_of
from ckptkit.layout import Extent


def sum_files(root: Path, names: Iterable[str], extents: Iterable[Extent]) -> dict[str, FileSum]:
    """Return sizes and sums of files in `root`; only bytes that are in none of the `extents` are read."""
    known: dict[str, list[Extent]] = {}
    for extent in extents:
        known.setdefault(extent.path, []).append(extent)
    sums = {}
    for name in sorted(names):
        size = file_size(root / name)
        sums[name] = FileSum(size, sum_file(root, name, size, known.get(name, ())))
    return sums


def replace_manifest(root: Path, manifest: Manifest) -> None:
    """Write the manifest of a checkpoint that others may be reading, in one step; of several in the first."""
    for there in roots_of(root / NAME) or [next(iter(roots_of(root)), root) / NAME]:
        publish(there, manifest.to_bytes(), overwrite=True)


def files_in(root: Path) -> set[str]:
    """Return the names of all files directly in `root`, but for a manifest and for links."""
    return {name for name in names_in(root) if stat.S_ISREG((root / name).lstat().st_mode)} - {NAME}

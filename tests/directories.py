"""The content of directories, to compare two."""

from __future__ import annotations

from pathlib import Path


def files_in(root: Path) -> dict[str, bytes]:
    """Return the content of each file below a directory, by its path there."""
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}

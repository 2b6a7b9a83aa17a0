"""Make directories, remove them with their contents, and sync them to the disk."""

from __future__ import annotations

import os
from pathlib import Path

from ckptkit.errors import IOFailure, translate_os_errors
from ckptkit.io.path import is_remote
from ckptkit.io.system import NOT_HERE, again, close, warn_of_loss


def make_directories(path: Path, *, sync: bool) -> None:
    """Make a directory, and the one that it is to be in; they outlive a power cut if `sync`. A store needs none."""
    if not is_remote(path) and not path.exists():
        make_directories(path.parent, sync=sync)
        again(path.mkdir, exist_ok=True)
        if sync:
            sync_path(path.parent)


def remove(path: Path) -> None:
    """Remove a file or a directory with all it holds, if there is one; a link is removed, not followed."""
    if path.is_dir() and not path.is_symlink():
        for inside in list(path.iterdir()):
            remove(inside)
        again(path.rmdir)
    else:
        again(path.unlink, missing_ok=True)


def sync_tree(root: Path) -> None:
    """Force every file and directory below `root`, and `root` itself, to the disk."""
    for directory, _, files in os.walk(root, topdown=False, onerror=fail):
        for name in files:
            sync_path(Path(directory, name))
        sync_path(Path(directory))


def fail(error: OSError) -> None:
    """Raise the error of a directory that cannot be listed, which `os.walk` by itself leaves out."""
    raise error


def sync_path(path: Path) -> None:
    """Force one file or directory to the disk; file systems that cannot sync a directory are let off."""
    with translate_os_errors(path):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        except OSError as error:
            if not (path.is_dir() and error.errno in NOT_HERE):
                raise IOFailure(f"fsync failed: {(error.strerror or '').lower()}", path=path) from error
            warn_of_loss(path, "this file system cannot sync directories: a power cut may undo the change")
        finally:
            close(fd)

"""Name the hidden siblings of a destination, and move the finished output into its place.

The move is one step where the system can do that.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
from pathlib import Path

from ckptkit.errors import Occupied
from ckptkit.io.disk import NOT_HERE, again, warn_of_loss

HIDDEN = re.compile(r"\.(.+)\.ckptkit\.(?:tmp|old|lock)", re.DOTALL)
_RENAME_EXCHANGE = 2  # <linux/fs.h>
_AT_FDCWD = -100


def staging_path(dst: Path) -> Path:
    """Return the hidden sibling in which `dst` is made; one name, so that a later run finds what a dead one left."""
    return dst.parent / f".{dst.name}.ckptkit.tmp"


def aside_path(dst: Path) -> Path:
    """Return the hidden sibling that the old `dst` is for a moment, where directories cannot be swapped in one step."""
    return dst.parent / f".{dst.name}.ckptkit.old"


def lock_path(dst: Path) -> Path:
    """Return the hidden sibling that the maker of `dst` holds a lock on."""
    return dst.parent / f".{dst.name}.ckptkit.lock"


def move_file_into_place(path: Path, dst: Path, overwrite: bool) -> None:
    """Rename file `path` to `dst`."""
    if overwrite:
        again(os.replace, path, dst)
        return
    try:
        again(os.link, path, dst)
    except FileExistsError as error:
        raise Occupied("another process created the destination meanwhile", path=dst) from error


def move_into_place(path: Path, dst: Path, overwrite: bool) -> None:
    """Rename directory `path` to `dst`. If something was there before, it is at `path` now."""
    if not overwrite or not dst.exists() or not any(dst.iterdir()):
        try:
            again(os.rename, path, dst)  # replaces nothing but an empty directory
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise
            raise Occupied("another process created the destination meanwhile", path=dst) from error
    elif not swap(path, dst):
        swap_in_steps(path, dst)


def swap(a: Path, b: Path) -> bool:
    """Swap two directories in one step. Returns False where the system cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    while libc.renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE):
        code = ctypes.get_errno()
        if code in NOT_HERE:
            return False
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code), str(b))
    return True


def swap_in_steps(path: Path, dst: Path) -> None:
    """Swap directory `path` and the destination in three steps, between which there is no destination.

    After an error it is there again; where the process dies, the next run puts it back.
    """
    warn_of_loss(dst, "this file system cannot swap directories in one step: for a moment the destination is absent")
    aside = aside_path(dst)
    again(os.rename, dst, aside)
    try:
        again(os.rename, path, dst)
    except OSError:
        again(os.rename, aside, dst)
        raise
    again(os.rename, aside, path)

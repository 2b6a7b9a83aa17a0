"""Pins: files that protect checkpoints from deletion.

A pin is an empty file `.pins/NAME` in the run, for the checkpoint NAME. Pins move with the run, but a copy of a
checkpoint elsewhere is not pinned. Setting a pin rewrites no file.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from ckptkit.errors import Unsafe, translate_os_errors
from ckptkit.io.disk import close_descriptor, retry_interrupted, sync_path
from ckptkit.io.file import list_children

FOLDER = ".pins"


def pinned_names_in(root: Path) -> frozenset[str]:
    folder = root / FOLDER
    with translate_os_errors(folder):
        return frozenset(pin.name for pin in list_children(folder)) if folder.is_dir() else frozenset()


def is_pinned(checkpoint: Path) -> bool:
    return checkpoint.name in pinned_names_in(checkpoint.parent)


def set_pin(checkpoint: Path) -> None:
    """Pin a checkpoint and flush the pin to the disk. Does nothing if it is pinned."""
    folder = checkpoint.parent / FOLDER
    with translate_os_errors(folder):
        if folder.is_symlink():
            raise Unsafe("refusing to follow a symbolic link in place of the pins", path=folder, hint="remove it")
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        while True:
            retry_interrupted(folder.mkdir, exist_ok=True)
            with suppress(FileNotFoundError):  # an unpin has just removed the empty folder
                close_descriptor(retry_interrupted(os.open, folder / checkpoint.name, flags, 0o644))
                break
        sync_path(folder)
        sync_path(folder.parent)


def clear_pin(checkpoint: Path) -> None:
    """Unpin a checkpoint, which may be deleted already. Does nothing if it is not pinned."""
    folder = checkpoint.parent / FOLDER
    with translate_os_errors(folder):
        if folder.is_dir():
            retry_interrupted((folder / checkpoint.name).unlink, missing_ok=True)
            sync_path(folder)
            with suppress(OSError):  # there are other pins
                folder.rmdir()

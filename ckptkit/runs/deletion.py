"""Delete checkpoints: rename each to a hidden name first, then remove its files.

An interrupted deletion therefore never leaves a partial checkpoint under its name. The next deletion finishes it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ckptkit.errors import Occupied, translate_os_errors
from ckptkit.io.disk import lock_path, remove_path, retry_interrupted, sync_path
from ckptkit.io.file import list_children
from ckptkit.io.joined import local_paths_of
from ckptkit.io.locks import acquire_lock, release_lock
from ckptkit.trainers import is_like_checkpoint_name

_LEAVING = ".leaving"  # suffix of the hidden name of a checkpoint that is being deleted


@contextmanager
def deleting(root: Path, *, patience: float = 0) -> Iterator[None]:
    """Lock directory `root` for deleting inside the block. First finishes interrupted deletions of dead processes.

    Locks all directories of a run that is spread over several. Raises `Occupied` if another process still has a lock
    after `patience` seconds.
    """
    with ExitStack() as locks:
        for directory in local_paths_of(root):
            path = lock_path(directory / "prune")
            with translate_os_errors(directory):
                try:
                    lock = acquire_lock(path, patience=patience)
                except Occupied as error:
                    message = "another process is deleting checkpoints here"
                    raise Occupied(message, path=directory, hint="wait for it to end") from error
            locks.callback(release_lock, lock, path)
        with translate_os_errors(root):
            for path in (path for directory in local_paths_of(root) for path in list_children(directory)):
                name = path.name.removeprefix(".").removesuffix(_LEAVING)
                if path.name == f".{name}{_LEAVING}" and is_like_checkpoint_name(name):
                    remove_path(path)
        yield


def delete_checkpoint(checkpoint: Path) -> None:
    """Delete a checkpoint, from all disks if it is spread over several. Call it inside `with deleting(...)`.

    Raises `IOFailure` if a file cannot be removed. The checkpoint is hidden then, and the next deletion finishes it.
    """
    hidden = {path: path.with_name(f".{path.name}{_LEAVING}") for path in local_paths_of(checkpoint)}
    with translate_os_errors(checkpoint):
        for path, name in hidden.items():
            retry_interrupted(os.rename, path, name)
            # Before the first file is removed: after a power failure the checkpoint is complete or hidden.
            sync_path(path.parent)
        for name in hidden.values():
            remove_path(name)

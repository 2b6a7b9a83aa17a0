"""Stage output in a hidden directory beside its destination, and rename it into place when complete.

At every moment the destination is absent, old and complete, or new and complete.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from ckptkit.errors import CkptError, Occupied, Unsafe, translate_os_errors
from ckptkit.io.allocation import write_new_file
from ckptkit.io.disk import (
    HIDDEN_SIBLING,
    lock_path,
    make_directories,
    move_directory_into_place,
    move_file_into_place,
    old_destination_path,
    remove_path,
    retry_interrupted,
    staging_path,
    sync_directory_tree,
    sync_path,
)
from ckptkit.io.file import destination_exists_error, opening, read_at, require_kind_if_exists
from ckptkit.io.locks import acquire_lock, close_if_open, is_same_file, release_lock, try_lock

WORK = ".ckptkit-work"
_KEY = "key"
_PATIENCE = 60.0  # seconds that a `part` waits for the lock of a process with another key


@contextmanager
def errors_naming_destination(path: Path, *, inside: str = "", is_file: bool = False) -> Iterator[None]:
    """Make errors name the destination, as it was typed, instead of the hidden directory beside it.

    The output is written to the directory `inside` of the hidden directory that is renamed to the destination. With
    `is_file`, the destination is the only file of that directory.
    """
    try:
        with translate_os_errors(path):
            yield
    except CkptError as error:
        staging = staging_path(path.absolute())
        for place in (staging / inside, staging, path.absolute()):
            if error.path is not None and error.path.is_relative_to(place):
                name = error.path.relative_to(place)
                error.path = path if is_file or name.parts[:1] == (WORK,) else path / name
                break
        raise


class Stage:
    """An unfinished output directory: `open` it, write into `path`, then `commit` or `discard`.

    Locks the destination from `open` to the end: a second process with the same destination gets `Occupied` while the
    first is alive, and removes its files if it has died.

    `key` identifies the output. `open` resumes an unfinished directory with the same key, and `unlock_for_resume` keeps
    the directory for a later call. Several processes that each write a `part` share the directory: each of them calls
    `unlock_for_other_parts`.

    If an unfinished output has another key, `open` calls `check_other` with its key and notes before it removes the
    output. `check_other` may raise an error to keep that output.

    With `is_file`, the destination becomes the only file in the directory.
    """

    def __init__(
        self,
        dst: Path,
        *,
        overwrite: bool = False,
        sync: bool = True,
        key: bytes | None = None,
        is_part: bool = False,
        is_file: bool = False,
        check_other: Callable[[bytes, Path], None] | None = None,
    ) -> None:
        self.typed = dst
        self.dst = dst.absolute()
        self.path = staging_path(self.dst)
        self.overwrite = overwrite
        self.sync = sync
        self.key = key
        self.is_part = is_part
        self.is_file = is_file
        self.check_other = check_other
        self._lock: int | None = None
        self._claim: int | None = None  # lock on the output with this key; shared among parts
        self._is_ours = False  # whether the files in `path` are this process's

    @property
    def notes_directory(self) -> Path:
        """Return the directory in `path` for notes on finished work; it is not part of the output."""
        return self.path / WORK

    def open(self) -> Self:
        """Lock the destination and create `path`, empty unless there is something to resume.

        Separate from `__init__`, so that the caller can `discard` whenever a signal arrives. The writer of a part waits
        until the others have let it in, and has the directory to itself until it lets them in.
        """
        require_free_destination(self.dst, self.overwrite, is_file=self.is_file)
        with translate_os_errors(self.dst):
            make_directories(self.dst.parent, sync=self.sync)
            self._lock = self._acquire()
            # a process that died during a swap may have left the old destination aside
            recover_interrupted_swap(self.dst)
            # another process may have finished it while we waited for the lock
            require_free_destination(self.dst, self.overwrite, is_file=self.is_file)
            begun = find_resume_key(self.path)
            if self.key is None or begun != self.key:
                if begun is not None and self.check_other is not None:
                    self.check_other(begun, self.notes_directory)
                close_if_open(
                    lock_resumable_output(self.path)
                )  # raises `Occupied` while other processes still write parts here
                self._is_ours = True
                create_staging_directory(self.path, self.key)
            if self.key is not None:
                self._claim = lock_resumable_output(self.path, shared=self.is_part)
            self._is_ours = True
        return self

    @contextmanager
    def opened(self, may_resume: Callable[[BaseException], bool] = lambda _: False) -> Iterator[Self]:
        """Open the stage. An error in the block discards it, or keeps it for the next call if `may_resume` is True."""
        with errors_naming_destination(self.typed, is_file=self.is_file):
            try:
                yield self.open()
            except BaseException as error:
                if may_resume(error):
                    self.unlock_for_resume()
                    error.add_note(f"the same command continues with the files in {self.path}")
                else:
                    self.discard()
                raise

    def _acquire(self) -> int:
        while True:
            try:
                return acquire_lock(lock_path(self.dst), timeout=_PATIENCE if self.is_part else 0)
            except Occupied:
                if not self.is_part or find_resume_key(self.path) != self.key:
                    raise
            except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
                error.filename = os.fspath(self.dst.parent)  # the user does not know our lock
                raise
            except OSError as error:
                if error.errno == errno.ENAMETOOLONG:
                    error.filename = os.fspath(self.dst)
                raise

    def unlock_for_other_parts(self) -> None:
        """Unlock the destination: other processes may open the directory, too, to write parts of the same output."""
        lock, self._lock = self._lock, None
        if lock is not None:
            release_lock(lock, lock_path(self.dst))

    def commit(self) -> None:
        """Move the content of `path` to the destination, durably. Never retries a failed fsync."""
        with translate_os_errors(self.path):
            remove_path(self.notes_directory)
            if self.sync:
                sync_directory_tree(self.path)
            self._is_ours = False  # from here on `path` may be the old destination, which `discard` must not remove
            try:
                if self.is_file:
                    (only_entry,) = self.path.iterdir()
                    move_file_into_place(only_entry, self.dst, self.overwrite)
                else:
                    move_directory_into_place(self.path, self.dst, self.overwrite)
            except Exception:
                self._is_ours = True
                raise
            if self.sync:
                sync_path(self.dst.parent)
        # `path` is now the old destination; if removing it fails, the next run does it
        with suppress(OSError):
            remove_path(self.path)
        self.unlock_for_resume()

    def discard(self) -> None:
        """Remove the unfinished output, if there is any. The destination stays unchanged."""
        if self._is_ours and self._lock is not None:
            with suppress(OSError):
                # Without its lock file, the directory was deleted, and another stage may have made it again.
                if is_same_file(self._lock, lock_path(self.dst)) and not self.path.is_symlink():
                    remove_path(self.path)
        self.unlock_for_resume()

    def unlock_for_resume(self) -> None:
        """Unlock the unfinished output, so that another process can resume it."""
        claimed, self._claim = self._claim, None
        close_if_open(claimed)
        self.unlock_for_other_parts()


def require_free_destination(dst: Path, overwrite: bool, *, is_file: bool = False) -> None:
    """Raise `Occupied` if `dst` exists and may not be replaced; a directory may replace an empty directory."""
    with translate_os_errors(dst):
        if dst.is_symlink():
            raise Unsafe("the destination is a symbolic link", path=dst, hint="pass the directory that it points to")
        require_kind_if_exists(dst, is_file=is_file)
        if dst.is_dir() and dst.samefile(os.curdir):  # a rename would take it from the processes that are in it
            hint = "change to another directory, and pass this one by its name"
            raise Occupied("the destination is the current directory", path=dst, hint=hint)
        if dst.exists() and not overwrite and (is_file or any(dst.iterdir())):
            raise destination_exists_error(dst)


def lock_resumable_output(path: Path, *, shared: bool = False) -> int | None:
    """Lock the unfinished output in directory `path`. Returns None if it has no key, so that nobody can resume it."""
    try:
        fd = os.open(path / WORK / _KEY, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        if not try_lock(fd, path, shared=shared):
            hint = "wait for them to end"
            raise Occupied("parts of this destination, or of another one, are still being made", path=path, hint=hint)
    except BaseException:
        close_if_open(fd)
        raise
    return fd


def find_resume_key(path: Path) -> bytes | None:
    """Return the key of the unfinished output in directory `path`; None without a directory or a key."""
    file = path / WORK / _KEY
    with translate_os_errors(file):
        if path.is_symlink() or not file.is_file():
            return None
        with opening(file) as opened:
            return read_at(opened, opened.size, 0)


def create_staging_directory(path: Path, resume_key: bytes | None) -> None:
    """Create directory `path` with only its key, if it has one, replacing the leftovers of a process that died."""
    with translate_os_errors(path):
        if path.is_symlink():
            raise Unsafe("refusing to follow a symbolic link in place of the output", path=path, hint="remove it")
        if path.exists():
            # else a power failure may undo the rename that moved the old destination to this path
            sync_path(path.parent)
            remove_path(path)
        retry_interrupted(path.mkdir)
        if resume_key is not None:
            written = path / WORK / f"{_KEY}.new"
            retry_interrupted((path / WORK).mkdir)
            write_new_file(written, resume_key)
            retry_interrupted(written.rename, path / WORK / _KEY)


def remove_orphaned_staging(root: Path) -> None:
    """Remove the hidden leftovers of dead processes in directory `root`, except outputs that can be resumed."""
    with translate_os_errors(root):
        names = {match[1] for path in root.iterdir() if (match := HIDDEN_SIBLING.fullmatch(path.name))}
        for dst in (root / name for name in sorted(names)):
            lock = lock_path(dst)
            with suppress(Occupied):
                owned = acquire_lock(lock)
                try:
                    recover_interrupted_swap(dst)
                    if find_resume_key(staging_path(dst)) is None:
                        remove_path(staging_path(dst))
                finally:
                    release_lock(owned, lock)


def recover_interrupted_swap(dst: Path) -> None:
    """Restore, or remove, an old `dst` that a process put aside before it died in the middle of a swap."""
    aside = old_destination_path(dst)
    if dst.exists():
        remove_path(aside)
    elif aside.exists():
        retry_interrupted(os.rename, aside, dst)


def publish_file(dst: Path, content: bytes, *, overwrite: bool = False) -> None:
    """Write `content` to the file `dst` atomically.

    Raises `Occupied` if the file exists, unless `overwrite`.
    """
    with Stage(dst, overwrite=overwrite, is_file=True).opened() as stage:
        write_new_file(stage.path / dst.name, content)
        stage.commit()

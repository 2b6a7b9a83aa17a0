"""See several directories as one: each node of a job had a disk of its own, with the files of its own ranks.

A path in them is like any other as long as it is looked at, listed and put together. What lies in several of them must
be the same in all, which shows when it is opened.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from pathlib import Path, PosixPath
from threading import Lock
from typing import NoReturn, Self

from ckptkit.errors import Unsupported

_MARK = "\0"  # the first part of a path that is one of ours begins so, as no file's name can
_JOINED: list[tuple[Path, ...]] = []
_LOCK = Lock()


class JoinedPath(PosixPath):
    """A directory that is several, or what lies in it; its first part says which these are."""

    __slots__ = ()

    def __str__(self) -> str:
        return str(self.place) if self._is_whole else super().__str__()

    def __fspath__(self) -> str:
        if len(self.places) > 1 and self.is_dir():
            raise Unsupported("these are several directories, but only one is accepted here", path=self)
        return os.fspath(self.place)

    def __reduce__(self) -> tuple[object, ...]:  # another process knows nothing of these directories
        return self.place.__reduce__()  # type: ignore[return-value]

    @property
    def roots(self) -> tuple[Path, ...]:
        """Return the directories that are one."""
        return _JOINED[int(self.parts[0].removeprefix(_MARK))]

    @property
    def places(self) -> list[Path]:
        """Return where it lies: in each directory in which something is called so, of whatever kind."""
        found = (root.joinpath(*self.parts[1:]) for root in self.roots)
        return [path for path in found if path.exists() or path.is_symlink()]

    @property
    def place(self) -> Path:
        """Return where it lies first; in the first directory, if it is nowhere."""
        return next(iter(self.places), self.roots[0].joinpath(*self.parts[1:]))

    @property
    def name(self) -> str:
        """Return its name: that of the first directory, if it is all of them."""
        return self.roots[0].name if self._is_whole and len(self.parts) == 1 else super().name

    @property
    def parent(self) -> Path:  # type: ignore[override]
        """Return what it lies in: of all directories, what the first lies in."""
        return self.roots[0].parent if self._is_whole and len(self.parts) == 1 else super().parent

    def __truediv__(self, key: str | os.PathLike[str]) -> Self:
        """Return what lies in it; a path from the root of the file system is that, as it is of any other."""
        if isinstance(key, str) and key.startswith("/"):
            return Path(key)  # type: ignore[return-value]
        return super().__truediv__(key)

    def with_name(self, name: str) -> Path:  # type: ignore[override]
        """Return what lies beside it under another name."""
        return self.parent / name

    def absolute(self) -> Path:  # type: ignore[override]
        """Return the same as seen from the root of the file system."""
        return joined([root.absolute() for root in self.roots]).joinpath(*self.parts[1:])

    def resolve(self, strict: bool = False) -> Path:  # type: ignore[override]
        """Return where it lies first, without links."""
        return self.place.resolve(strict)

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:  # noqa: ARG002
        """Return True for a directory in any of them."""
        return self.place.is_dir()

    def is_file(self, *, follow_symlinks: bool = True) -> bool:  # noqa: ARG002
        return self.place.is_file()

    def exists(self, *, follow_symlinks: bool = True) -> bool:  # noqa: ARG002
        """Return True if anything is there."""
        return self.place.exists()

    def is_symlink(self) -> bool:
        """Return True for a link."""
        return self.place.is_symlink()

    def readlink(self) -> Path:  # type: ignore[override]
        """Return where a link leads."""
        return self.place.readlink()

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Return kind, size and times of where it lies first."""
        return self.place.stat() if follow_symlinks else self.place.lstat()

    def lstat(self) -> os.stat_result:
        """Return the same of a link itself."""
        return self.place.lstat()

    def iterdir(self) -> Generator[Self, None, None]:
        """Yield what lies in any of the directories."""
        names = {child.name: None for place in self.places for child in place.iterdir()}
        yield from (self / name for name in names)

    def open(self, *_args: object, **_kwargs: object) -> NoReturn:
        """Raise `Unsupported`: files are opened where it is seen that all of one name are the same."""
        raise Unsupported("this checkpoint is spread over several directories", path=self)

    @property
    def _is_whole(self) -> bool:
        """Whether it begins with the directories; what is relative to these does not."""
        return bool(self.parts) and self.parts[0].startswith(_MARK)


def joined(roots: Sequence[Path]) -> Path:
    """Return several directories as one, in this order; a single one as it is."""
    if len(roots) == 1:
        return roots[0]
    key = tuple(roots)
    with _LOCK:
        if key not in _JOINED:
            _JOINED.append(key)
        return JoinedPath(f"{_MARK}{_JOINED.index(key)}")


def roots_of(path: Path) -> tuple[Path, ...]:
    """Return the directories or files that a path means: one, or where it lies in each of several directories."""
    return tuple(path.places) if isinstance(path, JoinedPath) else (path,)

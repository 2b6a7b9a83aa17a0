"""Treat several directories as one: each node of a job had its own disk, with the files of its own ranks.

A path in them can be examined, listed and joined like any other. A file that is in several of them must be equal in
all; opening it checks this.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from pathlib import Path, PosixPath
from threading import Lock
from typing import NoReturn, Self

from ckptkit.errors import Unsupported

_MARK = "\0"  # prefix of a joined path's first component: no file name can contain a NUL
_JOINED: list[tuple[Path, ...]] = []
_LOCK = Lock()


class JoinedPath(PosixPath):
    """Several directories as one path, or an entry in them; the first component encodes which directories."""

    __slots__ = ()

    def __str__(self) -> str:
        return str(self.first_existing_path) if self._has_joined_root else super().__str__()

    def __fspath__(self) -> str:
        if len(self.existing_paths) > 1 and self.is_dir():
            raise Unsupported("these are several directories, but only one is accepted here", path=self)
        return os.fspath(self.first_existing_path)

    def __reduce__(self) -> tuple[object, ...]:  # `_JOINED` exists in this process only
        return self.first_existing_path.__reduce__()  # type: ignore[return-value]

    @property
    def roots(self) -> tuple[Path, ...]:
        return _JOINED[int(self.parts[0].removeprefix(_MARK))]

    @property
    def existing_paths(self) -> list[Path]:
        paths = (root.joinpath(*self.parts[1:]) for root in self.roots)
        return [path for path in paths if path.exists() or path.is_symlink()]

    @property
    def first_existing_path(self) -> Path:
        """Return the first existing path of the entry; its path in the first directory if it does not exist."""
        return next(iter(self.existing_paths), self.roots[0].joinpath(*self.parts[1:]))

    @property
    def name(self) -> str:
        """Return the name of the entry; the name of the first directory for the root itself."""
        return self.roots[0].name if self._has_joined_root and len(self.parts) == 1 else super().name

    @property
    def parent(self) -> Path:  # type: ignore[override]
        """Return the parent; for the root itself, the parent of the first directory."""
        return self.roots[0].parent if self._has_joined_root and len(self.parts) == 1 else super().parent

    def __truediv__(self, key: str | os.PathLike[str]) -> Self:
        """Return the path of an entry in it. An absolute `key` replaces the path, as in `pathlib`."""
        if isinstance(key, str) and key.startswith("/"):
            return Path(key)  # type: ignore[return-value]
        return super().__truediv__(key)

    def with_name(self, name: str) -> Path:  # type: ignore[override]
        return self.parent / name

    def absolute(self) -> Path:  # type: ignore[override]
        return join_paths([root.absolute() for root in self.roots]).joinpath(*self.parts[1:])

    def resolve(self, strict: bool = False) -> Path:  # type: ignore[override]
        return self.first_existing_path.resolve(strict)

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:  # noqa: ARG002
        return self.first_existing_path.is_dir()

    def is_file(self, *, follow_symlinks: bool = True) -> bool:  # noqa: ARG002
        return self.first_existing_path.is_file()

    def exists(self, *, follow_symlinks: bool = True) -> bool:  # noqa: ARG002
        return self.first_existing_path.exists()

    def is_symlink(self) -> bool:
        return self.first_existing_path.is_symlink()

    def readlink(self) -> Path:  # type: ignore[override]
        return self.first_existing_path.readlink()

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return self.first_existing_path.stat() if follow_symlinks else self.first_existing_path.lstat()

    def lstat(self) -> os.stat_result:
        return self.first_existing_path.lstat()

    def iterdir(self) -> Generator[Self, None, None]:
        """Yield the entries of all directories, each name once."""
        names = {child.name: None for directory in self.existing_paths for child in directory.iterdir()}
        yield from (self / name for name in names)

    def open(self, *_args: object, **_kwargs: object) -> NoReturn:
        """Raise `Unsupported`: use `open_file`, which checks that copies of a file are equal."""
        raise Unsupported("this checkpoint is spread over several directories", path=self)

    @property
    def _has_joined_root(self) -> bool:
        """Whether the path begins with the joined directories, unlike a path relative to them."""
        return bool(self.parts) and self.parts[0].startswith(_MARK)


def join_paths(roots: Sequence[Path]) -> Path:
    """Return several directories as one, in this order; a single one unchanged."""
    if len(roots) == 1:
        return roots[0]
    key = tuple(roots)
    with _LOCK:
        if key not in _JOINED:
            _JOINED.append(key)
        return JoinedPath(f"{_MARK}{_JOINED.index(key)}")


def local_paths_of(path: Path) -> tuple[Path, ...]:
    """Return the local paths behind a path: the path itself, or each existing path in joined directories."""
    return tuple(path.existing_paths) if isinstance(path, JoinedPath) else (path,)

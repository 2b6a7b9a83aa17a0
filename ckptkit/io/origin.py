"""Tell whether a checkpoint still is the one that it was when reading began."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ckptkit.errors import IOFailure, translate_os_errors
from ckptkit.io.joined import roots_of
from ckptkit.io.path import is_remote


@dataclass(frozen=True, slots=True)
class Origin:
    """A checkpoint that is being read, as it was known at the beginning: its path, device and inode.

    `others` are the other directories that it lies in, if these are several.
    """

    path: Path
    device: int
    inode: int
    others: tuple[Origin, ...] = ()

    @classmethod
    def of(cls, path: Path) -> Self:
        """Return what is at `path` now; perhaps nothing."""
        _, *others = roots_of(path) or (path,)
        apart = tuple(map(Origin.of, others))
        with translate_os_errors(path):
            try:
                found = path.stat()
            except FileNotFoundError:
                return cls(path, 0, 0)
        return cls(path, found.st_dev, found.st_ino, apart)

    def check(self) -> None:
        """Raise `IOFailure` if something else is there by now: what was read may be a mixture of the two."""
        hint = "run the same command again"
        if is_remote(self.path):
            if changed := self.path.find_change():
                raise IOFailure("this was replaced while the checkpoint was being read", path=changed, hint=hint)
        elif Origin.of(self.path) != self:
            raise IOFailure("the checkpoint was replaced while it was being read", path=self.path, hint=hint)

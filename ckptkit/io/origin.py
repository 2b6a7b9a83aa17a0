"""Detect whether a checkpoint was replaced while it was being read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ckptkit.errors import IOFailure, translate_os_errors
from ckptkit.io.joined_path import local_paths_of
from ckptkit.io.path import is_remote


@dataclass(frozen=True, slots=True)
class Origin:
    """The identity of a checkpoint when reading began: its path, device and inode.

    `others` are the other directories of a checkpoint in several directories.
    """

    path: Path
    device: int
    inode: int
    others: tuple[Origin, ...] = ()

    @classmethod
    def of(cls, path: Path) -> Self:
        """Return the identity of the current file or directory at `path`; 0 and 0 if it does not exist."""
        _, *others = local_paths_of(path) or (path,)
        others_now = tuple(map(Origin.of, others))
        with translate_os_errors(path):
            try:
                status = path.stat()
            except FileNotFoundError:
                return cls(path, 0, 0)
        return cls(path, status.st_dev, status.st_ino, others_now)

    def require_unchanged(self) -> None:
        """Raise `IOFailure` if the checkpoint was replaced: the bytes that were read may mix two checkpoints."""
        hint = "run the same command again"
        if is_remote(self.path):
            if changed := self.path.find_change():
                raise IOFailure("the file was replaced while the checkpoint was being read", path=changed, hint=hint)
        elif (now := Origin.of(self.path)) != self:
            what, hint = ("replaced", hint) if now.inode else ("deleted", "pass another checkpoint")
            raise IOFailure(f"the checkpoint was {what} while it was being read", path=self.path, hint=hint)

"""Dry-run a command that fixes a checkpoint, so that no command is suggested that would be refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.diagnosis.fix import Fix
from ckptkit.errors import CkptError, Corrupt, IOFailure, Mismatch, NotACheckpoint, Occupied, Unsafe, Unsupported, Usage
from ckptkit.files.path import RemotePath
from ckptkit.ops.consolidate import consolidate
from ckptkit.ops.convert import convert
from ckptkit.ops.reshard import reshard

_MAKERS: dict[str, Callable[..., Any]] = {"consolidate": consolidate, "convert": convert, "reshard": reshard}


def dry_run_fix(fix: Fix, checkpoint: Checkpoint) -> CkptError | None:
    """Return the error that a command for this checkpoint would end with, as far as metadata tell; else None.

    Returns None as well for a command that has to read the data, such as a salvage, and for a remote checkpoint.
    """
    options = {name: list(value) if isinstance(value, tuple) else value for name, value in fix.options}
    maker = _MAKERS.get(fix.verb)
    if maker is None or "salvage" in options or isinstance(checkpoint.path, RemotePath):
        return None
    options.pop("also", None)  # the checkpoint has these directories already
    try:
        maker(checkpoint, fix.paths[1], **options, dry_run=True, overwrite=True)
    except (Corrupt, Mismatch, NotACheckpoint, Unsafe, Unsupported, Usage) as error:
        return error
    except (IOFailure, Occupied):  # another disk or another destination helps
        pass
    return None

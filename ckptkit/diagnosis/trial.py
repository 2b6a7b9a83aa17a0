"""Try a command that mends a checkpoint as far as one can without writing: nothing is named that would be refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.diagnosis.one_command import REPEATED, Command
from ckptkit.errors import CkptError, Corrupt, IOFailure, Mismatch, NotACheckpoint, Occupied, Unsafe, Unsupported, Usage
from ckptkit.files.path import RemotePath
from ckptkit.ops.consolidate import consolidate
from ckptkit.ops.convert import convert
from ckptkit.ops.reshard import reshard

_MAKERS: dict[str, Callable[..., Any]] = {"consolidate": consolidate, "convert": convert, "reshard": reshard}
_NUMBERS = frozenset(["--vocab-size", "--world-size"])


def refusal(one: Command, checkpoint: Checkpoint) -> CkptError | None:
    """Return the error that a command would end with, as far as metadata tell; None if it would not.

    None as well for what takes reading the data, as salvaging does, and a store that is not a disk.
    """
    maker = _MAKERS.get(one.verb)
    if maker is None or "--salvage" in one.flags or isinstance(checkpoint.path, RemotePath):
        return None
    work = partial(maker, checkpoint, one.paths[1], **keywords(one), dry_run=True, overwrite=True)
    try:
        work()
    except (Corrupt, Mismatch, NotACheckpoint, Unsafe, Unsupported, Usage) as error:
        return error
    except (IOFailure, Occupied):  # which another disk or another destination mends
        pass
    return None


def keywords(one: Command) -> dict[str, Any]:
    """Return the options of a command as its function takes them."""
    found: dict[str, Any] = {}
    for flag, *value in one.options:
        name = flag.removeprefix("--").replace("-", "_")
        if flag == "--also":  # the checkpoint has these already
            continue
        if not value:
            found[name] = True
        elif flag in REPEATED:
            found.setdefault(name, []).append(value[0])
        else:
            is_number = flag in _NUMBERS or (one.verb == "reshard" and flag == "--to")
            found[name] = int(value[0]) if is_number else value[0]
    return found

"""Finalizes: what several processes have made in parts is checked and becomes visible."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckptkit.errors import Corrupt, NotACheckpoint
from ckptkit.files.hidden import staging_path
from ckptkit.files.path import to_local
from ckptkit.files.staging import read_key
from ckptkit.ops.consolidate import consolidate
from ckptkit.ops.conversion.output import Workers
from ckptkit.ops.conversion.result import Converted
from ckptkit.ops.convert import convert
from ckptkit.ops.reshard import reshard
from ckptkit.progress import Progress

COMMANDS: dict[str, Callable[..., Converted]] = {"consolidate": consolidate, "convert": convert, "reshard": reshard}


def finalize(
    dst: str | Path, *, jobs: int | None = None, sync: bool = True, progress: Progress | None = None
) -> Converted:
    """Finish directory `dst`, of which every part has been made by a call with `workers`.

    Raises `NotACheckpoint` if no parts are there, `Occupied` if some are missing or still at work, and `Corrupt` if a
    checksum of the source differs.
    """
    hidden = staging_path(to_local(dst).absolute())
    text = read_key(hidden)
    if text is None:
        raise NotACheckpoint("no parts of it have been made", path=dst, hint="make them with --part 1/N to --part N/N")
    command, arguments, count = parse_key(text, hidden)
    workers = Workers(count, number=None)
    return command(**arguments, jobs=jobs, sync=sync, progress=progress, workers=workers)


def parse_key(text: bytes, path: Path) -> tuple[Callable[..., Converted], dict[str, Any], int]:
    """The command, its arguments and the number of parts that a key names."""
    try:
        words = json.loads(text)
        return COMMANDS[words["command"]], dict(words["arguments"]), int(words["parts"])
    except (KeyError, TypeError, ValueError) as error:
        raise Corrupt("what is being made there cannot be told", path=path, hint="remove it, and begin anew") from error

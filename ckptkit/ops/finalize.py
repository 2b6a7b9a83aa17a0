"""Finalize an output: check what several processes have made in parts, and let it appear."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

from ckptkit.checkpoints.several_disks import join_places
from ckptkit.conversion.options import ConvertOptions
from ckptkit.conversion.pipeline import finish_shares
from ckptkit.conversion.report import Converted
from ckptkit.destinations.exchange import staging_path
from ckptkit.destinations.staging import read_key
from ckptkit.errors import Corrupt, NotACheckpoint
from ckptkit.files.path import to_local, to_path
from ckptkit.ops.convert import report_on
from ckptkit.progress import Progress


def finalize(
    dst: str | Path, *, jobs: int | None = None, sync: bool = True, progress: Progress | None = None
) -> Converted:
    """Finish directory `dst`, of which every part has been made by a call with `part`.

    Raises `NotACheckpoint` if no parts are there, `Occupied` if some are missing or still at work, and `Corrupt` if a
    checksum of the source differs.
    """
    hidden = staging_path(to_local(dst).absolute())
    text = read_key(hidden)
    if text is None:
        raise NotACheckpoint("no parts of it have been made", path=dst, hint="make them with --part 1/N to --part N/N")
    sources, options, count = parse_key(text, hidden)
    asked = replace(options, jobs=jobs, sync=sync, progress=progress)
    return report_on(sources, dst, asked, partial(finish_shares, count=count))


def parse_key(text: bytes, path: Path) -> tuple[list[Path], ConvertOptions, int]:
    """Return the sources, the options and the number of parts that a key has, which lies in `path`.

    Raises `Corrupt` for a key that no version like this one has written.
    """
    try:
        words = json.loads(text)
        sources = [join_places(to_path(first), others) for first, *others in words["sources"]]
        return sources, ConvertOptions.of({}, **words["options"]), int(words["parts"])
    except (KeyError, TypeError, ValueError) as error:
        raise Corrupt("what is being made there cannot be told", path=path, hint="remove it, and begin anew") from error

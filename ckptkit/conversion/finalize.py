"""Finalize an output: check the parts that several processes have written, and make the output appear."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

from ckptkit.checkpoints.several_disks import join_places
from ckptkit.conversion.convert import report_on
from ckptkit.errors import Corrupt, NotACheckpoint
from ckptkit.io.destination import NOTES, require_shared, to_destination
from ckptkit.io.disk import staging_path
from ckptkit.io.file import is_there, read_small
from ckptkit.io.path import is_remote, refresh, to_path
from ckptkit.io.progress import Progress
from ckptkit.io.staging import read_key
from ckptkit.state.options import ConvertOptions
from ckptkit.state.pipeline import write_rest
from ckptkit.state.report import Converted
from ckptkit.state.to_store import KEY

_LIMIT = 1 << 20  # bytes: a key is small; bounds the memory for a wrong file


def finalize(
    dst: str | Path, *, jobs: int | None = None, sync: bool = True, progress: Progress | None = None
) -> Converted:
    """Finish `dst`, a directory or a URL in a store, after calls with `part` have written every part.

    Raises `NotACheckpoint` if no parts are there, `Occupied` if some are missing or still running, and `Corrupt` if a
    checksum of the source differs.
    """
    output = to_destination(dst)
    begun, text = find_staging_key(output)
    if text is None:
        hint = "run `ckptkit consolidate SRC OUT --part 1/N` to `--part N/N` first"
        raise NotACheckpoint("expected the parts of an output, found none", path=output, hint=hint)
    sources, options, count = parse_key(text, begun)
    asked = replace(options, jobs=jobs, sync=sync, progress=progress)
    return report_on(sources, output, asked, partial(write_rest, count=count))


def find_staging_key(place: Path) -> tuple[Path, bytes | None]:
    """Return the staging directory, or the note in a store, of an unfinished output, and its key or None."""
    if not is_remote(place):
        staging = staging_path(place.absolute())
        return staging, read_key(staging)
    require_shared(place)
    refresh(place)
    inside = place / NOTES / KEY
    note = inside if is_there(inside) else place.parent / f"{place.name}{NOTES}" / KEY
    return note, read_small(note, _LIMIT) if is_there(note) else None


def parse_key(text: bytes, path: Path) -> tuple[list[Path], ConvertOptions, int]:
    """Return sources, options and number of parts from the key at `path`. Raises `Corrupt` for an unreadable one."""
    try:
        words = json.loads(text)
        sources = [join_places(to_path(first), others) for first, *others in words["sources"]]
        return sources, ConvertOptions.of({}, **words["options"]), int(words["parts"])
    except (KeyError, TypeError, ValueError) as error:
        hint = "delete it, and run all parts again"
        message = "expected the sources and options of a conversion, found other data"
        raise Corrupt(message, path=path, hint=hint) from error

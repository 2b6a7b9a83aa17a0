"""Finalize an output: check the parts that several processes have written, and make the output appear."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

from ckptkit.checkpoints.several_disks import join_directories
from ckptkit.conversion.convert import plan_and_convert
from ckptkit.errors import Corrupt, NotACheckpoint
from ckptkit.io.destination import NOTES, require_multi_process_store, to_destination
from ckptkit.io.disk import staging_path
from ckptkit.io.file import is_existing_path, read_small
from ckptkit.io.path import drop_cached_listing, is_remote, to_path
from ckptkit.io.progress import Progress
from ckptkit.io.staging import find_resume_key
from ckptkit.state.options import ConvertOptions
from ckptkit.state.report import Converted
from ckptkit.state.to_store import KEY
from ckptkit.state.write_output import finish_output

_LIMIT = 1 << 20  # bytes: a key is small; bounds the memory for a wrong file


def finalize(
    dst: str | Path, *, jobs: int | None = None, sync: bool = True, progress: Progress | None = None
) -> Converted:
    """Finish `dst`, a directory or a URL in a store, after calls with `part` have written every part.

    Raises `NotACheckpoint` if no parts are there, `Occupied` if some are missing or still running, and `Corrupt` if a
    checksum of the source differs.
    """
    output = to_destination(dst)
    if is_remote(output):
        require_multi_process_store(output)
        drop_cached_listing(output)
        inside = output / NOTES / KEY
        begun: Path = inside if is_existing_path(inside) else output.parent / f"{output.name}{NOTES}" / KEY
        text = read_small(begun, _LIMIT) if is_existing_path(begun) else None
    else:
        begun = staging_path(output.absolute())
        text = find_resume_key(begun)
    if text is None:
        hint = "run `ckptkit consolidate SRC OUT --part 1/N` to `--part N/N` first"
        raise NotACheckpoint("expected the parts of an output, found none", path=output, hint=hint)
    try:
        words = json.loads(text)
        sources = [join_directories(to_path(first), others) for first, *others in words["sources"]]
        options, count = ConvertOptions.of({}, **words["options"]), int(words["parts"])
    except (KeyError, TypeError, ValueError) as error:
        hint = "delete it, and run all parts again"
        message = "expected the sources and options of a conversion, found other data"
        raise Corrupt(message, path=begun, hint=hint) from error
    asked = replace(options, jobs=jobs, sync=sync, progress=progress)
    return plan_and_convert(sources, output, asked, partial(finish_output, share_count=count))

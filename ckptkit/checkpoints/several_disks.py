"""Join the directories of a checkpoint whose files are on the disks of several nodes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ckptkit.errors import Corrupt, Usage
from ckptkit.io.joined_path import join_paths, local_paths_of
from ckptkit.io.path import to_path
from ckptkit.trainers import find_step_of_path_or_parent

Others = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def join_directories(path: Path, also: Others = ()) -> Path:
    """Return a path, or the directories `path` and `also` joined as one.

    Raises `Usage` for a path that is not a directory, `Corrupt` if names belong to different steps.
    """
    others = [also] if isinstance(also, str | os.PathLike) else also
    if not others:
        return path
    places = list(dict.fromkeys([*local_paths_of(path), *map(to_path, others)]))
    for directory in places:
        if not directory.is_dir():
            found = "a file" if directory.exists() else "nothing at this path"
            raise Usage(f"--also: expected directories, found {found}", path=directory)
        steps = [
            step for earlier in (places[0], directory) if (step := find_step_of_path_or_parent(earlier)) is not None
        ]
        if len(set(steps)) > 1:
            message = f"expected step {steps[0]} as in {places[0]}, found step {steps[1]}"
            raise Corrupt(message, path=directory, hint="pass directories of one checkpoint")
    return join_paths(places)

"""The option `--also` of commands that read a checkpoint: its files may be spread over several directories."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ckptkit.cli.output import note
from ckptkit.io.path import to_path

Also = Annotated[
    list[Path] | None,
    typer.Option(
        "--also",
        parser=to_path,
        metavar="DIR",
        help="Another directory with files of the same checkpoint, such as another node's; repeatable.",
    ),
]


def with_others(src: Path, also: Sequence[Path] | None) -> Path:
    """Return `src`, joined with the directories of --also, and print a note about them."""
    if not also:
        return src
    from ckptkit.checkpoints.several_disks import join_places

    note(f"together with the files in {', '.join(map(str, also))}")
    return join_places(src, also)

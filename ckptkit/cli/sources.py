"""Arguments of commands that read a checkpoint, and `--also`, if its files are spread over several directories."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ckptkit.cli.output import print_note
from ckptkit.errors import Usage
from ckptkit.io.path import to_path


def checkpoint_argument(metavar: str) -> Any:
    help_text = "A checkpoint, or a run (its latest complete checkpoint)."
    return typer.Argument(parser=to_path, metavar=metavar, help=help_text)


Also = Annotated[
    list[Path] | None,
    typer.Option(
        parser=to_path,
        metavar="DIR",
        help="Another directory with files of the same checkpoint, such as another node's; repeatable.",
    ),
]


def join_also_directories(src: Path, also: Sequence[Path] | None) -> Path:
    """Return `src`, joined with the directories of --also, and print a note about them."""
    if not also:
        return src
    from ckptkit.checkpoints.several_disks import join_directories

    print_note(f"together with the files in {', '.join(map(str, also))}")
    return join_directories(src, also)


def each_with_others(sources: Sequence[Path], also: Sequence[Path] | None, hint: str) -> list[Path]:
    """Return the sources of a command that takes several. Raises `Usage` for --also with more than one of them."""
    if also and len(sources) > 1:
        raise Usage("--also: expected one checkpoint, found several", hint=hint)
    return [join_also_directories(source, also) for source in sources]

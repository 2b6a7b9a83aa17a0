"""Publish a file that others may be looking at, in one step."""

from __future__ import annotations

from pathlib import Path

from ckptkit.destinations.allocation import write_file
from ckptkit.destinations.staging import Stage


def publish(dst: Path, content: bytes, *, overwrite: bool = False) -> None:
    """Write `content` to the file `dst`, which is absent or whole at every moment.

    Raises `Occupied` if there is one, unless it is to be replaced.
    """
    stage = Stage(dst, overwrite=overwrite, is_file=True)
    try:
        write_file(stage.open().path / dst.name, content)
        stage.commit()
    except BaseException:
        stage.discard()
        raise

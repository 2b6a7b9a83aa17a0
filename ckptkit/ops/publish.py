"""Publishing: a file that others may be looking at, written in one step."""

from __future__ import annotations

from pathlib import Path

from ckptkit.allocation import create_file
from ckptkit.staging import Stage


def publish(dst: Path, content: str, *, overwrite: bool = False) -> int:
    """Write `content` to the file `dst`, which is absent or whole at every moment; gives its size in bytes.

    Raises `Occupied` if there is one, unless it is to be replaced.
    """
    data = content.encode()
    stage = Stage(dst, overwrite=overwrite, is_file=True)
    try:
        create_file(stage.open().path / dst.name, len(data), [(0, data)])
        stage.commit()
    except BaseException:
        stage.discard()
        raise
    return len(data)

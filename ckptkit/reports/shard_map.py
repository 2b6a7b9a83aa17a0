"""Draw who holds which part of a checkpoint into a file. Reads its metadata only."""

from __future__ import annotations

from pathlib import Path

from ckptkit.destinations.staging import publish
from ckptkit.errors import Occupied
from ckptkit.files.file import is_there
from ckptkit.layout import Layout
from ckptkit.pictures.shard_svg import draw_shards, standalone
from ckptkit.pictures.shards import map_shards


def write_shard_map(layout: Layout, dst: str | Path) -> int:
    """Draw the layout of a checkpoint into the SVG file `dst`; returns its bytes. Raises `Occupied` if there is one."""
    if is_there(Path(dst)):
        raise Occupied("there is a file of this name", path=dst, hint="choose another")
    picture = standalone(draw_shards(map_shards(layout))).encode()
    publish(Path(dst), picture)
    return len(picture)

"""Reshard a checkpoint: write it, including the optimizer, for another number of ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Unpack

from ckptkit.checkpoints.checkpoint import Checkpoint, Source
from ckptkit.conversion.convert import run_conversion
from ckptkit.formats import writable_formats
from ckptkit.io.path import path_beside
from ckptkit.state.options import ConvertOptions, Keywords, with_spelled_options
from ckptkit.state.report import Converted

RUN = "run"  # default output directory of `ckptkit train`


@with_spelled_options
def reshard(
    src: Source | None = None,
    dst: str | Path | None = None,
    *,
    to: int,
    optimizer_order: str | Path | None = None,
    complete_optimizer: bool = False,
    **options: Unpack[Keywords],
) -> Converted:
    """Write the checkpoint at `src` to directory or URL `dst` for `to` ranks.

    Files by rank keep their format; every other format becomes DCP. `src` may be a run, by default `run/` or else the
    current directory; ckptkit reads its latest complete checkpoint. `dst` is by default `SRC-toN` next to it.
    Components that do not depend on the number of ranks, such as safetensors beside a sharded optimizer, are copied
    unchanged. With `complete_optimizer`, parameters without an optimizer state get zeros. For `optimizer_order`, the
    other options and the errors, see `convert`.
    """
    own = {"world_size": to, "only_sharded": True, "complete_optimizer": complete_optimizer}
    asked = ConvertOptions.of(options, to="dcp", optimizer_order=optimizer_order, **own)
    source = Checkpoint.open(src if src is not None else default_source())
    formats = {part.reader.name for part in source.components if part.reader.is_sharded}
    if len(formats) == 1 and formats <= set(writable_formats()):
        asked = replace(asked, to=formats.pop())
    if dst is None:  # in the current directory if the source is remote
        path = source.path if source.path.name not in ("", "..") else source.path.resolve()
        dst = path_beside(path, f"{path.name}-to{to}")
    return run_conversion([source], dst, asked)


def default_source() -> Path:
    return Path(RUN) if Path(RUN).is_dir() else Path()

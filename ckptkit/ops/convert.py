"""Convert any checkpoint that can be read into any format that can be written."""

from __future__ import annotations

from pathlib import Path
from typing import Unpack

from ckptkit.checkpoints.checkpoint import Source
from ckptkit.conversion.options import ConvertOptions, Keywords, spell_out
from ckptkit.conversion.pipeline import carry_out
from ckptkit.conversion.report import Converted


@spell_out
def convert(
    src: Source,
    dst: str | Path,
    *,
    to: str,
    world_size: int | None = None,
    under: str = "",
    optimizer_keys: str | None = None,
    complete_optimizer: bool = False,
    **options: Unpack[Keywords],
) -> Converted:
    """Write the checkpoint at `src`, or the latest of a run, to directory `dst` in the format `to`.

    "dcp" and "pt" keep everything, optimizer and all, and the files beside it; a `dst` like `model.pt` is made a file,
    with nothing beside it. "hf" is the model alone, as `consolidate` writes it. `under` puts all under a key, such as
    `model`; "dcp" is written for `world_size` ranks, by default as many as before. `optimizer_keys` are "names" or
    "ids" of its parameters; by default an optimizer in one file gets names, where these are certain, as it becomes
    shards. With `complete_optimizer` zeros are written for parameters that it has no state of, as they never had a
    gradient. For the other options see `ConvertOptions`. Raises a `CkptError`, and leaves `dst` as it was, if anything
    does not fit or a checksum differs.
    """
    own = {"to": to, "world_size": world_size, "under": under, "optimizer_keys": optimizer_keys}
    own["complete_optimizer"] = complete_optimizer
    return carry_out([src], dst, ConvertOptions.of(options, **own))

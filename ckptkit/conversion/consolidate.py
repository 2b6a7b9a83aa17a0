"""Consolidate the model of a training checkpoint into a Hugging Face model that every loader opens."""

from __future__ import annotations

from pathlib import Path
from typing import Unpack

from ckptkit.checkpoints.checkpoint import Source
from ckptkit.conversion.convert import convert
from ckptkit.state.options import Keywords, with_spelled_options
from ckptkit.state.report import Converted


@with_spelled_options
def consolidate(src: Source, dst: str | Path, **options: Unpack[Keywords]) -> Converted:
    """Write the model weights of the checkpoint at `src` to directory or URL `dst`, with config and tokenizer.

    `dtype` converts floats of 16 bits and more; `GLOB=DTYPE` converts matching ones. `max_shard_size` is in bytes.
    `base` is a directory or Hub id with config and tokenizer. `include` and `exclude` are globs of the names in the
    checkpoint; `rename` has rules `REGEX=>TEXT` for the model's own names. `strict` refuses tensors that config.json
    does not describe. Without `sync`, a power failure may lose the result. `part`, such as "1/8", does one share of the
    work; call `finalize` after the last. Raises a `CkptError`, and leaves `dst` unchanged, if anything does not fit or
    a checksum differs.
    """
    return convert(src, dst, to="hf", **options)

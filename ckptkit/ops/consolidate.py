"""Consolidate the model of a training checkpoint into a Hugging Face model that every loader opens."""

from __future__ import annotations

from pathlib import Path
from typing import Unpack

from ckptkit.checkpoints.checkpoint import Source
from ckptkit.conversion.options import Keywords, spell_out
from ckptkit.conversion.report import Converted
from ckptkit.ops.convert import convert


@spell_out
def consolidate(src: Source, dst: str | Path, **options: Unpack[Keywords]) -> Converted:
    """Write the model weights of the checkpoint at `src` to directory `dst` as safetensors, with config and tokenizer.

    `dtype` converts floats of 16 bits and more, `GLOB=DTYPE` some of them; `max_shard_size` is in bytes; `base` is a
    directory or Hub id to take config and tokenizer from; `include` and `exclude` are globs of names as the checkpoint
    has them, `rename` rules `REGEX=>TEXT` on the model's own names; `strict` refuses tensors that config.json does not
    call for; without `sync` the result may not outlive a power cut; `part`, such as "1/8", does only a share of the
    work, for `finalize` to end. Raises a `CkptError`, and leaves `dst` as it was, if anything does not fit or a
    checksum differs.
    """
    return convert(src, dst, to="hf", **options)

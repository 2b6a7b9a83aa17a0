"""Spell out the commands that mend a checkpoint, so that they can be pasted and run."""

from __future__ import annotations

import shlex
from pathlib import Path

from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.files.path import RemotePath
from ckptkit.formats import get_writer, writable_formats

SHARDS = "dcp"  # what a checkpoint becomes whose own format is only read


def command(*words: object) -> str:
    """Return a command line of ckptkit, quoted for a shell."""
    return shlex.join(["ckptkit", *map(str, words)])


def beside(path: Path, word: str, suffix: str = "") -> Path:
    """Return where what is made of the checkpoint at `path` goes: beside it, called like it; here, if that is remote.

    `suffix` is that of a file, "" for a directory.
    """
    there = path if path.name not in ("", "..") else path.resolve()
    stem = there.stem if there.is_file() else there.name
    name = f"{stem}-{word}{suffix}"
    return Path(name) if isinstance(path, RemotePath) else there.with_name(name)


def rewrite(checkpoint: Checkpoint, *options: object, base: str | None = None) -> str:
    """Return the command that writes a checkpoint anew in its own format, optimizer and all.

    A model alone is written with its config, that of `base` if given.
    """
    if checkpoint.model_part.reader.is_model_only:
        return export(checkpoint, *options, base=base)
    source, to = checkpoint.path, own_format(checkpoint)
    suffix = source.suffix if source.suffix in get_writer(to).suffixes and source.is_file() else ""
    return command("convert", source, beside(source, "mended", suffix), "--to", to, *options)


def export(checkpoint: Checkpoint, *options: object, base: str | None = None) -> str:
    """Return the command that makes a model to load of a checkpoint, with the config of `base` if given."""
    with_base = ("--base", base) if base else ()
    return command("consolidate", checkpoint.path, beside(checkpoint.path, "model"), *options, *with_base)


def reshard(checkpoint: Checkpoint, world_size: int, *options: object) -> str:
    """Return the command that writes a checkpoint for so many ranks."""
    return command("reshard", checkpoint.path, beside(checkpoint.path, "mended"), "--to", world_size, *options)


def own_format(checkpoint: Checkpoint) -> str:
    """Return the format that a checkpoint can be written anew in: its own, or shards where that is only read."""
    name = checkpoint.model_part.reader.name
    return name if name in writable_formats() and not get_writer(name).needs_names else SHARDS

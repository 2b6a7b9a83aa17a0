"""Spell out the commands that mend a checkpoint, so that they can be pasted and run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.files.file import names_in
from ckptkit.files.joined import roots_of
from ckptkit.files.path import RemotePath
from ckptkit.formats import get_writer, writable_formats

_MODEL_FILE = re.compile(r"pytorch_model(-[0-9]{5}-of-[0-9]{5})?\.bin")  # what `from_pretrained` reads beside others
SHARDS = "dcp"  # what a checkpoint becomes whose own format is only read


def command(*words: object) -> str:
    """Return a command line of ckptkit, quoted for a shell."""
    return shlex.join(["ckptkit", *map(spell, words)])


def spell(word: object) -> str:
    """Return a word of a command; a path that begins like an option as one that does not."""
    return f"./{word}" if isinstance(word, Path) and str(word).startswith("-") else str(word)


def make(verb: str, checkpoint: Checkpoint, target: Path, *options: object) -> str:
    """Return the command that makes another checkpoint of one, whose files may lie in several directories."""
    source, *others = roots_of(checkpoint.path)
    also = [word for place in others for word in ("--also", place)]
    return command(verb, source, target, *also, *options)


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
    if is_model(checkpoint):
        return export(checkpoint, *options, base=base)
    source, to = checkpoint.path, own_format(checkpoint)
    suffix = source.suffix if source.suffix in get_writer(to).suffixes and source.is_file() else ""
    return make("convert", checkpoint, beside(source, "mended", suffix), "--to", to, *options)


def export(checkpoint: Checkpoint, *options: object, base: str | None = None) -> str:
    """Return the command that makes a model to load of a checkpoint, with the config of `base` if given."""
    with_base = ("--base", base) if base else ()
    return make("consolidate", checkpoint, beside(checkpoint.path, "model"), *options, *with_base)


def reshard(checkpoint: Checkpoint, world_size: int, *options: object) -> str:
    """Return the command that writes a checkpoint for so many ranks."""
    return make("reshard", checkpoint, beside(checkpoint.path, "mended"), "--to", world_size, *options)


def is_model(checkpoint: Checkpoint) -> bool:
    """Return whether the weights lie in files of a model, by whose names `from_pretrained` finds them."""
    part = checkpoint.model_part
    if part.reader.is_model_only or part.reader.is_sharded or not part.path.is_dir():
        return part.reader.is_model_only
    return any(map(_MODEL_FILE.fullmatch, names_in(part.path)))


def own_format(checkpoint: Checkpoint) -> str:
    """Return the format that a checkpoint can be written anew in: its own, or shards where that is only read."""
    name = checkpoint.model_part.reader.name
    return name if name in writable_formats() and not get_writer(name).needs_names else SHARDS

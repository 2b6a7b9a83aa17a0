"""A finding: what will break when a checkpoint is loaded, and the command that fixes it, as data."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.formats import get_writer, writable_formats
from ckptkit.io.file import names_in
from ckptkit.io.joined import roots_of
from ckptkit.io.path import path_beside
from ckptkit.layout.renames import fold

_MODEL_FILE = re.compile(r"pytorch_model(-[0-9]{5}-of-[0-9]{5})?\.bin")  # what `from_pretrained` reads beside others
_FIRST = ("to", "world_size", "also")  # options that come before all others
SHARDS = "dcp"  # what a checkpoint becomes whose own format is only read
Value = int | str | Path | tuple[str | Path, ...]


@dataclass(frozen=True, slots=True)
class Fix:
    """A command of ckptkit: its verb, the paths and models that it takes, and its options.

    Options have the names and values that the Python function of the verb takes; a tuple for an option that can be
    given several times, True for one without a value.
    """

    verb: str
    paths: tuple[str | Path, ...]
    options: tuple[tuple[str, Value], ...] = ()

    @classmethod
    def of(cls, verb: str, *paths: str | Path, **options: Value | None) -> Fix:
        """Return the command with its options in order: the target first, `base` last. Drops those without a value."""
        given = [(name, value) for name, value in options.items() if value is not None and value != ()]
        places = {name: number for number, name in enumerate(_FIRST)}
        given.sort(key=lambda option: (places.get(option[0], len(places)), option[0] == "base"))
        return cls(verb, paths, tuple(given))

    @property
    def words(self) -> list[str]:
        """Return the words of the command, `ckptkit` first, as a process takes them: nothing is quoted."""
        options = [word for name, value in self.options for word in spell_option(name, value)]
        return ["ckptkit", self.verb, *map(spell, self.paths), *options]

    def __str__(self) -> str:
        """Return the command as a line for a shell."""
        return shlex.join(self.words)


def spell_option(name: str, value: Value) -> Iterator[str]:
    """Yield the words of an option, the flag once for each of its values."""
    flag = f"--{name.replace('_', '-')}"
    if value is True:
        yield flag
    else:
        for one in value if isinstance(value, tuple) else (value,):
            yield from (flag, spell(one))


def spell(word: object) -> str:
    """Return a word of a command; a path that begins like an option as one that does not."""
    return f"./{word}" if isinstance(word, Path) and str(word).startswith("-") else str(word)


def make(verb: str, checkpoint: Checkpoint, target: Path, **options: Value | None) -> Fix:
    """Return the command that makes another checkpoint of one, whose files may lie in several directories."""
    source, *others = roots_of(checkpoint.path)
    return Fix.of(verb, source, target, also=tuple(others), **options)


def rewrite(checkpoint: Checkpoint, *, base: str | None = None, **options: Value | None) -> Fix:
    """Return the command that writes a checkpoint anew in its own format, optimizer and all.

    A model alone is written with its config, that of `base` if given.
    """
    return export(checkpoint, base=base, **options) if is_model(checkpoint) else convert(checkpoint, **options)


def convert(checkpoint: Checkpoint, **options: Value | None) -> Fix:
    """Return the command that writes a training checkpoint anew in its own format."""
    source, to = checkpoint.path, own_format(checkpoint)
    suffix = source.suffix if source.suffix in get_writer(to).suffixes and source.is_file() else ""
    return make("convert", checkpoint, beside(source, "fixed", suffix), to=to, **options)


def export(checkpoint: Checkpoint, **options: Value | None) -> Fix:
    """Return the command that makes a model to load of a checkpoint, with the config of `base` if given."""
    return make("consolidate", checkpoint, beside(checkpoint.path, "model"), **options)


def reshard(checkpoint: Checkpoint, world_size: int, **options: Value | None) -> Fix:
    """Return the command that writes a checkpoint for so many ranks."""
    return make("reshard", checkpoint, beside(checkpoint.path, "fixed"), to=world_size, **options)


def resize(checkpoint: Checkpoint, world_size: int) -> Fix:
    """Return the command that makes a checkpoint load with so many ranks, or with any where its format has such."""
    target = checkpoint.model_component.reader.resized_as
    if not target:
        return reshard(checkpoint, world_size)
    return Fix.of("convert", checkpoint.path, beside(checkpoint.path, target), to=target)


def beside(path: Path, word: str, suffix: str = "") -> Path:
    """Return where what is made of the checkpoint at `path` goes: beside it, called like it; here, if that is remote.

    `suffix` is that of a file, "" for a directory.
    """
    there = path if path.name not in ("", "..") else path.resolve()
    stem = there.stem if there.is_file() else there.name
    name = f"{stem}-{word}{suffix}"
    return path_beside(there, name)


def is_model(checkpoint: Checkpoint) -> bool:
    """Return whether the weights lie in files of a model, by whose names `from_pretrained` finds them."""
    part = checkpoint.model_component
    if part.reader.is_model_only or part.reader.is_sharded or not part.path.is_dir():
        return part.reader.is_model_only
    return any(map(_MODEL_FILE.fullmatch, names_in(part.path)))


def own_format(checkpoint: Checkpoint) -> str:
    """Return the format that a checkpoint can be written anew in: its own, or shards where that is only read."""
    name = checkpoint.model_component.reader.name
    return name if name in writable_formats() and not get_writer(name).needs_names else SHARDS


# the kinds whose fix loses nothing and guesses nothing
_CERTAIN = frozenset(
    ["index", "empty_entry", "config_dtype", "empty_adapter", "experts", "wrapper", "torch_version", "world_size"]
)


@dataclass(frozen=True, slots=True)
class Finding:
    """A thing that will break, or go wrong without a word, when a checkpoint is loaded.

    `code` says what kind of thing, `tensor` what it is about, with `*` in place of numbers where that is several:
    `names` has each. It is None for a finding on the checkpoint as a whole. `fixed_by` is the command that fixes it as
    data, None if no command does.
    """

    code: str
    tensor: str | None
    message: str
    fixed_by: Fix | None = None
    names: tuple[str, ...] = ()

    @property
    def fix(self) -> str | None:
        """Return the command that fixes it as a line for a shell, None if no command does."""
        return None if self.fixed_by is None else str(self.fixed_by)

    @property
    def is_certain(self) -> bool:
        """Return whether its fix is certain to help: it loses nothing, guesses nothing, and the model's names fit."""
        return self.fixed_by is not None and self.code in _CERTAIN and ("names", "keep") not in self.fixed_by.options

    @property
    def line(self) -> str:
        """Return what the finding is about, how many tensors that are, and the message."""
        if self.tensor is None:
            return self.message
        return f"{self.tensor}{f' ({self.count:,})' if self.count > 1 else ''}: {self.message}"

    @property
    def count(self) -> int:
        """Return how many tensors and other entries it is about; 0 for the checkpoint as a whole."""
        return len(self.names) or int(self.tensor is not None)


def group(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return findings with those as one that say the same of every layer: `layers.*.q_proj.weight`."""
    found: dict[tuple[object, ...], list[Finding]] = {}
    for one in findings:
        name = None if one.tensor is None else fold(one.tensor)
        found.setdefault((one.code, name, one.message, one.fixed_by), []).append(one)
    return tuple(merge(alike) for alike in found.values())


def merge(alike: list[Finding]) -> Finding:
    """Return findings that say the same of tensors called alike as one."""
    first, *others = alike
    names = tuple(dict.fromkeys(name for one in alike for name in one.names or ((one.tensor,) if one.tensor else ())))
    if not others and not (first.names and first.tensor):
        return replace(first, names=names)
    return replace(first, tensor=fold(first.tensor) if first.tensor and len(names) > 1 else first.tensor, names=names)

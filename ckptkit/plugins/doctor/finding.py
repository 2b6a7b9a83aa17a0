"""`Finding`: something that will break when a checkpoint is loaded. `Fix`: the command that fixes it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.formats import get_writer, writable_formats
from ckptkit.io.file import names_in
from ckptkit.io.joined_path import local_paths_of
from ckptkit.io.path import local_path_beside
from ckptkit.layout.renames import numbers_to_wildcards
from ckptkit.settings import option_name

_MODEL_FILE = re.compile(r"pytorch_model(-[0-9]{5}-of-[0-9]{5})?\.bin")  # one of the names that `from_pretrained` reads
_FIRST = ("to", "world_size", "also")  # options that a command shows first
SHARDS = "dcp"  # output format for checkpoints whose own format ckptkit only reads
Value = int | str | Path | tuple[str | Path, ...]


@dataclass(frozen=True, slots=True)
class Fix:
    """A command of ckptkit: its verb, its positional arguments (paths and models), and its options.

    Options have the names and values of the parameters of the Python function. The value is a tuple for an option that
    can be given several times, and True for a flag.
    """

    verb: str
    paths: tuple[str | Path, ...]
    options: tuple[tuple[str, Value], ...] = ()

    @classmethod
    def of(cls, verb: str, *paths: str | Path, **options: Value | None) -> Fix:
        """Return a command with its options in order: the target first, `base` last. Drops None and ()."""
        given = [(name, value) for name, value in options.items() if value is not None and value != ()]
        rank_of = {name: number for number, name in enumerate(_FIRST)}
        given.sort(key=lambda option: (rank_of.get(option[0], len(rank_of)), option[0] == "base"))
        return cls(verb, paths, tuple(given))

    @property
    def process_arguments(self) -> list[str]:
        """Return the unquoted arguments of the process, `ckptkit` first."""
        words = ["ckptkit", self.verb, *map(to_argv_text, self.paths)]
        for name, value in self.options:
            for item in value if isinstance(value, tuple) else (value,):
                words += [option_name(name)] if item is True else [option_name(name), to_argv_text(item)]
        return words

    def __str__(self) -> str:
        """Return the command as one line, quoted for a shell."""
        return shlex.join(self.process_arguments)


def to_argv_text(word: object) -> str:
    """Return an argument as text. A path that starts with `-` gets the prefix `./`."""
    return f"./{word}" if isinstance(word, Path) and str(word).startswith("-") else str(word)


def make_fix(verb: str, checkpoint: Checkpoint, target: Path, **options: Value | None) -> Fix:
    """Return a command that writes another checkpoint. `--also` names the other directories of the source."""
    source, *more_roots = local_paths_of(checkpoint.path)
    return Fix.of(verb, source, target, also=tuple(more_roots), **options)


def rewrite_fix(checkpoint: Checkpoint, *, base: str | None = None, **options: Value | None) -> Fix:
    """Return the command that writes a checkpoint again in its own format, with its optimizer.

    A model without training state is exported, with the config of `base` if given.
    """
    return (
        consolidate_fix(checkpoint, base=base, **options)
        if has_loadable_weight_files(checkpoint)
        else same_format_fix(checkpoint, **options)
    )


def same_format_fix(checkpoint: Checkpoint, **options: Value | None) -> Fix:
    """Return the command that writes a training checkpoint again: in its own format, or as DCP if that is read-only."""
    source, own = checkpoint.path, checkpoint.model_component.reader.name
    to = own if own in writable_formats() and not get_writer(own).drafted_by else SHARDS
    suffix = source.suffix if source.suffix in get_writer(to).suffixes and source.is_file() else ""
    return make_fix("convert", checkpoint, output_path_for(source, "fixed", suffix), to=to, **options)


def consolidate_fix(checkpoint: Checkpoint, **options: Value | None) -> Fix:
    """Return the command that exports the model of a checkpoint, with the config of `base` if given."""
    return make_fix("consolidate", checkpoint, output_path_for(checkpoint.path, "model"), **options)


def reshard_fix(checkpoint: Checkpoint, world_size: int, **options: Value | None) -> Fix:
    """Return the command that writes a checkpoint for `world_size` ranks."""
    return make_fix("reshard", checkpoint, output_path_for(checkpoint.path, "fixed"), to=world_size, **options)


def world_size_fix(checkpoint: Checkpoint, world_size: int) -> Fix:
    """Return the command that makes a checkpoint load on `world_size` ranks, or if possible on any number."""
    target = checkpoint.model_component.reader.resized_as
    if not target:
        return reshard_fix(checkpoint, world_size)
    return Fix.of("convert", checkpoint.path, output_path_for(checkpoint.path, target), to=target)


def output_path_for(path: Path, word: str, suffix: str = "") -> Path:
    """Return the path of an output beside `path`, or in the current directory if `path` is remote."""
    local = path if path.name not in ("", "..") else path.resolve()
    return local_path_beside(local, f"{local.stem if local.is_file() else local.name}-{word}{suffix}")


def has_loadable_weight_files(checkpoint: Checkpoint) -> bool:
    """Return whether the weights are in files that `from_pretrained` finds by their names."""
    part = checkpoint.model_component
    if part.reader.is_model_only or part.reader.is_sharded or not part.path.is_dir():
        return part.reader.is_model_only
    return any(map(_MODEL_FILE.fullmatch, names_in(part.path)))


# kinds of findings whose fix loses nothing and guesses nothing
_CERTAIN = frozenset(
    [
        "index",
        "empty_entry",
        "config_dtype",
        "adapter_config",
        "empty_adapter",
        "expert_names",
        "wrapper",
        "torch_version",
        "world_size",
    ]
)


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that will break, or silently go wrong, when a checkpoint is loaded.

    `code` is the kind of finding. `tensor` is the entry that it concerns, with `*` in place of numbers if it concerns
    several (`names` lists all), and None if it concerns the whole checkpoint. `fixed_by` is the command that fixes it,
    None if no command does.
    """

    code: str
    tensor: str | None
    message: str
    fixed_by: Fix | None = None
    names: tuple[str, ...] = ()

    @property
    def fix(self) -> str | None:
        """Return the command that fixes the finding as a line for a shell; None if no command does."""
        return None if self.fixed_by is None else str(self.fixed_by)

    @property
    def is_certain(self) -> bool:
        """Return whether the fix is certain to help: it loses nothing, guesses nothing, and keeps no unknown names."""
        return self.fixed_by is not None and self.code in _CERTAIN and ("names", "keep") not in self.fixed_by.options

    @property
    def line(self) -> str:
        """Return the tensor, the number of tensors, and the message in one line."""
        if self.tensor is None:
            return self.message
        return f"{self.tensor}{f' ({self.count:,} entries)' if self.count > 1 else ''}: {self.message}"

    @property
    def count(self) -> int:
        """Return the number of entries that the finding concerns; 0 for the whole checkpoint."""
        return len(self.names) or int(self.tensor is not None)


def group_findings(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Merge findings that differ only in numbers, such as the layer: `layers.*.q_proj.weight`."""
    grouped: dict[tuple[object, ...], list[Finding]] = {}
    for finding in findings:
        name = None if finding.tensor is None else numbers_to_wildcards(finding.tensor)
        grouped.setdefault((finding.code, name, finding.message, finding.fixed_by), []).append(finding)
    merged = []
    for alike in grouped.values():
        every = (name for finding in alike for name in finding.names or filter(None, (finding.tensor,)))
        first = replace(alike[0], names=tuple(dict.fromkeys(every)))
        if first.tensor and len(first.names) > 1:
            first = replace(first, tensor=numbers_to_wildcards(first.tensor))
        merged.append(first)
    return tuple(merged)

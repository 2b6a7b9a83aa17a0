"""Describe a trainer by what it leaves on disk: tables of names. Opens nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ckptkit.layout import KeyPath


@dataclass(frozen=True, slots=True)
class Evidence:
    """The names that a checkpoint shows: of its place and files, and, once that was read, its format and keys.

    `keys` are the first steps of the key paths, `below` the second steps under each. `read_json` gives a small file of
    the checkpoint, {} where it has none that can be read, `read_source` what its manifest says that it was made of.
    """

    place: Path
    files: frozenset[str]
    format: str | None = None
    world_size: int | None = None
    keys: frozenset[str] = frozenset()
    below: Mapping[str, frozenset[str]] = field(default_factory=dict)
    read_json: Callable[[str], Mapping[str, Any]] = lambda _: {}
    read_source: Callable[[], Mapping[str, str] | None] = lambda: None

    def has_file(self, pattern: str) -> bool:
        """Return whether the whole name of a file or directory matches a pattern."""
        return any(re.fullmatch(pattern, name) for name in self.files)


class MetricsFile(NamedTuple):
    """A file of metrics: the most bytes that it may have, and how the numbers in its JSON are found."""

    limit: int
    understand: Callable[[Mapping[str, Any]], dict[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """A program that saves checkpoints, and the names that it gives. Patterns are of whole names.

    `steps` and `epochs` are of a checkpoint's directory or file, the group is the number; `trackers` are files in a run
    that say which checkpoint is meant. Inside a checkpoint `others` are directories with all but the model, `beside`
    files of torch.save that are a part of it, each with the keys that its contents belong under, "" for none (a pattern
    with a group `step` is of files beside a model that is a file, a group `rank` may be named in the keys);
    `kept` are directories and hidden files that go along as they are, each known by what it lies beside;
    `companions` are directories with config and tokenizer, `ranks` files of which each rank has one (the group is the
    rank), `own_state` files with the state of single ranks. `rank_of_key` gives the rank whose own state lies at a key
    path. Where a name says no step, `step_keys` lead to it, in a small file of JSON or, for the file "", in the
    checkpoint's own entries.
    `own_names` says, by pattern, whose own the names of tensors are that no inference engine knows; `opaque` what
    tensors are that can only be carried as they are. `unread` says, by pattern, what files and directories are that
    ckptkit does not read, `hints` what to do about some of these. `metrics` gives, by file, what
    was measured. `wrote` says the name to show, or None, by what only this trainer leaves: be it a name, in a listing,
    or a key, once the metadata was read.
    """

    name: str
    wrote: Callable[[Evidence], str | None] = lambda _: None
    steps: tuple[str, ...] = ()
    epochs: tuple[str, ...] = ()
    trackers: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    beside: Mapping[str, str] = field(default_factory=dict)
    kept: Mapping[str, str] = field(default_factory=dict)
    step_keys: tuple[tuple[str, KeyPath], ...] = ()
    companions: tuple[str, ...] = ()
    ranks: tuple[str, ...] = ()
    own_state: tuple[str, ...] = ()
    rank_of_key: Callable[[KeyPath], int | None] = lambda _: None
    own_names: Mapping[str, str] = field(default_factory=dict)
    opaque: Mapping[str, str] = field(default_factory=dict)
    unread: Mapping[str, str] = field(default_factory=dict)
    hints: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, MetricsFile] = field(default_factory=dict)

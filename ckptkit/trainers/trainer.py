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
        return any(re.fullmatch(pattern, name) for name in self.files)


class MetricsFile(NamedTuple):
    """A file of metrics: the most bytes that it may have, and how the numbers in its JSON are found."""

    limit: int
    understand: Callable[[Mapping[str, Any]], dict[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """A program that saves checkpoints, as tables of the names that it gives. Patterns are of whole names."""

    name: str
    # says the name to show, or None, by what only this trainer leaves: a name in a listing, or a key in the metadata
    wrote: Callable[[Evidence], str | None] = lambda _: None

    # of a run: the directories or files of checkpoints, with a group that is the step or epoch; and the files that say
    # which of these is meant
    steps: tuple[str, ...] = ()
    epochs: tuple[str, ...] = ()
    trackers: tuple[str, ...] = ()
    # where a name says no step: a small file of JSON, or "" for the checkpoint's own entries, and the keys to it
    step_keys: tuple[tuple[str, KeyPath], ...] = ()

    # of a checkpoint, directories: with all of it, but for a config or a copy of its weights beside them; with all but
    # the model; with config and tokenizer; and those that go along as they are, each known by what it lies beside
    wholes: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    companions: tuple[str, ...] = ()
    kept: Mapping[str, str] = field(default_factory=dict)

    # of a checkpoint, files: of torch.save beside the model that are a part of it, each with the keys that its contents
    # belong under, "" for none (a group `step` is that of a model that is a file, a group `rank` may be in the keys);
    # of which each rank has one, or which have its own state, with a group that is the rank; with the weights as they
    # are to be used, beside a directory with all states; and of metrics
    beside: Mapping[str, str] = field(default_factory=dict)
    ranks: tuple[str, ...] = ()
    own_state: tuple[str, ...] = ()
    exported: tuple[str, ...] = ()
    metrics: Mapping[str, MetricsFile] = field(default_factory=dict)
    # what files and directories are that ckptkit does not read, and by the same patterns what to do about it
    unread: Mapping[str, str] = field(default_factory=dict)
    hints: Mapping[str, str] = field(default_factory=dict)

    # of entries: the rank whose own state lies at a key path; by pattern of names, what tensors are that can only be
    # carried as they are
    rank_of_key: Callable[[KeyPath], int | None] = lambda _: None
    opaque: Mapping[str, str] = field(default_factory=dict)

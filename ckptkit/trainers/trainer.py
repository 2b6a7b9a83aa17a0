"""What is known of a trainer: the names that it leaves on disk, as one record."""

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
        return any(map(re.compile(pattern).fullmatch, self.files))

    def has_key(self, key: str) -> bool:
        """Return whether there is an entry `a`, or `a/b` for an entry below another."""
        first, _, second = key.partition("/")
        return first in self.keys and (not second or second in self.below[first])


class Mark(NamedTuple):
    """What only one trainer leaves, and the `title` of the trainer to show for it.

    A checkpoint has the mark if it has everything that is given here: for each pattern in `files` a file, all of the
    entries `keys`, the format, files of several ranks, a small file of JSON with a key, a place whose name matches the
    pattern `place`, and something beside that, whose name may refer to groups of the pattern.
    """

    title: str
    files: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    format: str | None = None
    by_ranks: bool = False
    json: tuple[str, str] | None = None
    place: str = ".*"
    beside: str = ""

    def is_on(self, seen: Evidence) -> bool:
        place = re.fullmatch(self.place, seen.place.name, re.DOTALL)
        return (
            place is not None
            and self.format in (None, seen.format)
            and not (self.by_ranks and seen.world_size is None)
            and all(map(seen.has_key, self.keys))
            and all(map(seen.has_file, self.files))
            and (not self.beside or (seen.place.parent / place.expand(self.beside)).exists())
            and (self.json is None or self.json[1] in seen.read_json(self.json[0]))
        )


class Unread(NamedTuple):
    """Files that ckptkit does not read: what they are, and what to do about it."""

    what: str
    hint: str


class MetricsFile(NamedTuple):
    """A file of metrics: the most bytes that it may have, and how the numbers in its JSON are found."""

    limit: int
    understand: Callable[[Mapping[str, Any]], dict[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerFacts:
    """A program that saves checkpoints, by the names that it gives. Patterns are of whole names."""

    name: str

    # who wrote a checkpoint: what only this trainer leaves, the first that is there decides; and a function for what no
    # mark can say
    marks: tuple[Mark, ...] = ()
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
    # are to be used, beside a directory with all states; of metrics; and those that ckptkit does not read, by pattern
    beside: Mapping[str, str] = field(default_factory=dict)
    ranks: tuple[str, ...] = ()
    own_state: tuple[str, ...] = ()
    exported: tuple[str, ...] = ()
    metrics: Mapping[str, MetricsFile] = field(default_factory=dict)
    unread: Mapping[str, Unread] = field(default_factory=dict)

    # of entries: where a rank's own state lies, as a pattern for each of the first steps of its key path, with a group
    # that is the rank (a position N in a list is "[N]"); and, by pattern of names, what tensors are that can only be
    # carried as they are
    own_keys: tuple[tuple[str, ...], ...] = ()
    opaque: Mapping[str, str] = field(default_factory=dict)

    def title_on(self, seen: Evidence) -> str | None:
        """Return the name to show if this trainer wrote a checkpoint, None if nothing tells."""
        return self.wrote(seen) or next((mark.title for mark in self.marks if mark.is_on(seen)), None)

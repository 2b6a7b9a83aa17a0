"""The facts about a trainer: the names that it gives to directories, files and keys."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ckptkit.layout import KeyPath


@dataclass(frozen=True, slots=True)
class Evidence:
    """The names in a checkpoint: of its place and files, and, once its metadata was read, its format and keys.

    `keys` are the first steps of the key paths, `below` the second steps under each. `read_json` returns a small JSON
    file of the checkpoint, {} if it cannot be read. `read_source` returns the source that its manifest names.
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

    A checkpoint has the mark if it has everything that is given: for each pattern in `files` a file, all entries in
    `keys`, the `format`, the world size (`by_ranks`), a small JSON file and a key in it, a place whose name matches the
    pattern `place`, and a file or directory called `beside` next to that. `beside` may refer to groups of `place`.
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
    """Files that ckptkit does not read: what they are, and what to do about it.

    With `json`, a small JSON file and a key in it, they are so only beside that.
    """

    what: str
    hint: str
    json: tuple[str, str] | None = None


class ConfigOf(NamedTuple):
    """A config.json that is another library's than transformers': its name, and the keys that tell it.

    `stem` begins the names of the files that the library loads, `needs` is a file that it loads in their place.
    """

    title: str
    keys: tuple[str, ...]
    stem: str = "model"
    needs: str = ""


class MetricsFile(NamedTuple):
    """A JSON file of metrics: its largest size in bytes, and the function that finds the numbers in it."""

    limit: int
    understand: Callable[[Mapping[str, Any]], dict[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerFacts:
    """A program that saves checkpoints: the names that it gives. Patterns match whole names."""

    name: str

    # Who wrote a checkpoint: marks that only this trainer leaves, of which the first that is there decides, and a
    # function where no mark can say it.
    marks: tuple[Mark, ...] = ()
    wrote: Callable[[Evidence], str | None] = lambda _: None

    # Of a run: names of the directories or files of checkpoints, with a group that is the step or the epoch; of
    # trackers, the files that say which checkpoint to resume from; and of files that say which is the best.
    steps: tuple[str, ...] = ()
    epochs: tuple[str, ...] = ()
    trackers: tuple[str, ...] = ()
    best_trackers: tuple[str, ...] = ()
    # Files that are in a run before its first checkpoint.
    of_runs: tuple[str, ...] = ()
    # Checkpoints that are the last one by their own names, beside those with a step in theirs.
    last: tuple[str, ...] = ()
    # Where a checkpoint names the best one of its run: a small file of JSON, or "" for the checkpoint's own entries,
    # and the keys in it; "*" is any key.
    best_keys: tuple[tuple[str, KeyPath], ...] = ()
    # Trackers in JSON, each with the keys that lead to the name of the checkpoint.
    json_trackers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # Where to read the step if no name says it: a small file of JSON, or "" for the checkpoint's own entries, and the
    # keys in it.
    step_keys: tuple[tuple[str, KeyPath], ...] = ()

    # Directories of a checkpoint: those with all of it, except for a config or a copy of its weights beside them; those
    # with all but the model; those with config and tokenizer; and those that are copied unchanged, each with the name
    # that it has to lie beside.
    complete_folders: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    companions: tuple[str, ...] = ()
    kept: Mapping[str, str] = field(default_factory=dict)
    # Of the directories that are copied unchanged, those that say how the modules of the model were changed.
    changes: tuple[str, ...] = ()

    # Directories that are complete only with a marker: a pattern of `PARENT/NAME`, and the name of the marker's file.
    markers: Mapping[str, str] = field(default_factory=dict)

    # Further files that say that a save has ended, or when: true of that save only.
    commits: tuple[str, ...] = ()

    # Files that are in the directory of a checkpoint only as long as it is being written.
    unfinished: tuple[str, ...] = ()

    # Files of torch.save that belong to the model beside them, each with the key that its contents get, "" for none.
    # A group `step` is that of a model that is a file; a group `rank` may be in the key.
    beside: Mapping[str, str] = field(default_factory=dict)
    # Of these, by their patterns, those that are what they are called only next to a file of another name.
    beside_of: Mapping[str, str] = field(default_factory=dict)
    # Files of which each rank has one, and files with a rank's own state; a group is the rank.
    ranks: tuple[str, ...] = ()
    own_state: tuple[str, ...] = ()
    # Of these, those that their trainer does without, as if it had just begun, on a rank that has none.
    optional_state: tuple[str, ...] = ()
    states: tuple[str, ...] = ()  # further files of a training, which no model needs
    descriptions: tuple[str, ...] = ()  # files that describe the weights beside them, and no others
    # Files with the weights for use, beside a directory with all states; files of metrics; and files that ckptkit does
    # not read.
    exported: tuple[str, ...] = ()
    metrics: Mapping[str, MetricsFile] = field(default_factory=dict)
    unread: Mapping[str, Unread] = field(default_factory=dict)
    # Whose config.json it is, of a library that has its own.
    config: ConfigOf | None = None

    # Entries with a rank's own state: a pattern for each of the first steps of their key paths, with a group that is
    # the rank. A position N in a list is "[N]".
    own_keys: tuple[tuple[str, ...], ...] = ()
    # Tensors that can only be copied unchanged: patterns of their names, and why.
    opaque: Mapping[str, str] = field(default_factory=dict)

    def title_on(self, seen: Evidence) -> str | None:
        """Return the name to show if this trainer wrote a checkpoint, None if nothing tells."""
        return self.wrote(seen) or next((mark.title for mark in self.marks if mark.is_on(seen)), None)

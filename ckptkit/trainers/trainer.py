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
    """The names in a checkpoint: its place and files, and, once its metadata was read, its format and keys.

    `keys` are the first steps of the key paths, `below` has the second steps under each. `read_json` returns a small
    JSON file of the checkpoint, {} if it cannot be read. `read_class` returns the class of the object in a file of
    torch.save, in the checkpoint or beside it, "" if it cannot be read. `read_source` returns the source in the
    checkpoint's manifest.
    """

    place: Path
    files: frozenset[str]
    format: str | None = None
    world_size: int | None = None
    keys: frozenset[str] = frozenset()
    below: Mapping[str, frozenset[str]] = field(default_factory=dict)
    read_json: Callable[[str], Mapping[str, Any]] = lambda _: {}
    read_class: Callable[[str], str] = lambda _: ""
    read_source: Callable[[], Mapping[str, str] | None] = lambda: None

    def has_key(self, key: str) -> bool:
        """Return whether there is an entry `a`, or `a/b` for a nested entry."""
        first, _, second = key.partition("/")
        return first in self.keys and (not second or second in self.below[first])


class Mark(NamedTuple):
    """Names that only one trainer writes, and the `title` to show for it.

    A checkpoint has the mark if all of this is true, as far as it is given:
    - it has a file for each pattern in `files`, all entries in `keys`, the `format`, and a world size (`by_ranks`)
    - `json`: it has a small JSON file with this key; `../NAME` is a file above the checkpoint
    - `pickled`: it has a file of torch.save, and the class of its object matches the pattern
    - `place`: the name of its directory matches the pattern
    - `beside`: next to this directory is a file or directory of this name, which may refer to groups of `place`
    """

    title: str
    files: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    format: str | None = None
    by_ranks: bool = False
    json: tuple[str, str] | None = None
    pickled: tuple[str, str] | None = None
    place: str = ".*"
    beside: str = ""

    def is_in_evidence(self, evidence: Evidence) -> bool:
        place = re.fullmatch(self.place, evidence.place.name, re.DOTALL)
        return (
            place is not None
            and self.format in (None, evidence.format)
            and not (self.by_ranks and evidence.world_size is None)
            and all(map(evidence.has_key, self.keys))
            and all(any(map(re.compile(pattern).fullmatch, evidence.files)) for pattern in self.files)
            and (not self.beside or (evidence.place.parent / place.expand(self.beside)).exists())
            and (self.json is None or self.json[1] in evidence.read_json(self.json[0]))
            and (
                self.pickled is None or re.fullmatch(self.pickled[1], evidence.read_class(self.pickled[0])) is not None
            )
        )


class Unread(NamedTuple):
    """Files that ckptkit does not read: a description, and a hint what to do.

    With `json`, a small JSON file and a key in it, the description applies only next to such a file.
    """

    what: str
    hint: str
    json: tuple[str, str] | None = None


class ConfigOf(NamedTuple):
    """A config.json of another library than transformers: the library's name, and the keys that identify it.

    `stem` is the beginning of the file names that the library loads, `needs` is a file that it loads instead of
    these. `beside` are patterns of further files that it loads with the model.
    """

    title: str
    keys: tuple[str, ...]
    stem: str = "model"
    needs: str = ""
    beside: tuple[str, ...] = ()

    def loads_file(self, name: str) -> bool:
        """Return whether the library loads a file of this name with the model."""
        return any(re.fullmatch(pattern, name) for pattern in self.beside)


class MetricsFile(NamedTuple):
    """A JSON file of metrics: its largest size in bytes, and the function that extracts the numbers."""

    limit: int
    understand: Callable[[Mapping[str, Any]], dict[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerFacts:
    """A program that saves checkpoints: the names that it gives. Patterns match full names."""

    name: str

    # Who wrote a checkpoint: marks that only this trainer leaves, of which the first match decides, and a function for
    # cases that no mark can express.
    marks: tuple[Mark, ...] = ()
    wrote: Callable[[Evidence], str | None] = lambda _: None

    # Names in a run: the directories or files of checkpoints, with a group for the step or the epoch; trackers, the
    # files that name the checkpoint to resume from; and files that name the best one.
    steps: tuple[str, ...] = ()
    epochs: tuple[str, ...] = ()
    trackers: tuple[str, ...] = ()
    best_trackers: tuple[str, ...] = ()
    # Files that a run may have before its first checkpoint.
    of_runs: tuple[str, ...] = ()
    # Names of checkpoints with a version: the trainer counts it up if a checkpoint of the same name exists.
    versions: tuple[str, ...] = ()
    # Checkpoints whose names say that they are the last one, beside those with a step in the name.
    last: tuple[str, ...] = ()
    # Where a checkpoint names the best one of its run: a small file of JSON, or "" for the checkpoint's own entries,
    # and the keys in it; "*" is any key.
    best_keys: tuple[tuple[str, KeyPath], ...] = ()
    # Trackers in JSON, each with the keys that lead to the name of the checkpoint.
    json_trackers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # Where to read the step if no name has it: a small file of JSON, or "" for the checkpoint's own entries, and the
    # keys in it.
    step_keys: tuple[tuple[str, KeyPath], ...] = ()

    # Directories of a checkpoint: those with the complete checkpoint, except for a config or a copy of the weights
    # beside them; those with everything except the model; those with config and tokenizer; and those that are copied
    # unchanged, each with a name that must be beside it.
    complete_folders: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    companions: tuple[str, ...] = ()
    kept: Mapping[str, str] = field(default_factory=dict)
    # The directories that are copied unchanged and describe changes of the model's modules.
    changes: tuple[str, ...] = ()

    # Directories that are complete only with a marker: a pattern of `PARENT/NAME`, and the name of the marker's file.
    markers: Mapping[str, str] = field(default_factory=dict)

    # Further files that say that a save has ended, or when. They apply to that save only.
    commits: tuple[str, ...] = ()

    # Files that are in the directory of a checkpoint only while it is written.
    unfinished: tuple[str, ...] = ()

    # Files of torch.save that belong to the model beside them, each with the key for its contents, "" for none. A group
    # `step` must equal the step of a model that is one file; the key may contain a group `rank`.
    beside: Mapping[str, str] = field(default_factory=dict)
    # Patterns of `beside` that count only next to a file of another name, with that name.
    beside_of: Mapping[str, str] = field(default_factory=dict)
    # Files that each rank writes, and files with per-rank state; a group is the rank.
    ranks: tuple[str, ...] = ()
    own_state: tuple[str, ...] = ()
    # Files with per-rank state that the trainer can do without: a rank without the file starts fresh.
    optional_state: tuple[str, ...] = ()
    states: tuple[str, ...] = ()  # further files of training state, which inference does not need
    descriptions: tuple[str, ...] = ()  # files that describe only the weights beside them
    # Files with weights for inference, beside a directory with the full training state; metrics files; and files that
    # ckptkit does not read.
    exported: tuple[str, ...] = ()
    metrics: Mapping[str, MetricsFile] = field(default_factory=dict)
    unread: Mapping[str, Unread] = field(default_factory=dict)
    # How to recognize the library's own config.json.
    config: ConfigOf | None = None

    # Entries with per-rank state: a pattern for each of the first steps of their key paths, with a group for the rank.
    # An index N of a list is "[N]".
    own_keys: tuple[tuple[str, ...], ...] = ()
    # Tensors that can only be copied unchanged: patterns of their names, and the reason.
    opaque: Mapping[str, str] = field(default_factory=dict)

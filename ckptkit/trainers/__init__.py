"""What a name means and who wrote a checkpoint, by the table of trainers; the step in the name of a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TypeVar

from ckptkit.layout import KeyPath
from ckptkit.trainers.foreign import FOREIGN
from ckptkit.trainers.table import TRAINERS
from ckptkit.trainers.trainer import ConfigOf, Evidence, MetricsFile, Unread

Found = TypeVar("Found")
NUMBER = re.compile(r"[0-9]{1,18}")
ONE_FILE = (
    ".bin",
    ".ckpt",
    ".pt",
    ".pth",
    ".safetensors",
    ".tar",
)  # how the name of a checkpoint that is a file may end


def number_in(name: str, table: str) -> int | None:
    """Return the number that a name says by the patterns of a table such as "steps"; None if it says none."""
    match = next(matches(table, name), None)
    return int(match[1]) if match else None


def rank_in(name: str) -> int | None:
    return number_in(name, "ranks")


def owner_of_file(name: str) -> int | None:
    """Return the rank whose own state a file holds by its name, in any directory; None for other files."""
    return number_in(Path(name).name, "own_state")


def is_optional_state(name: str) -> bool:
    """Return whether a file with a rank's own state is one that its trainer does without."""
    return any(matches("optional_state", Path(name).name))


def owner_of_key(key: KeyPath) -> int | None:
    """Return the rank whose own state lies at a key path, None for what all ranks share."""
    ranks = (rank_at(key, patterns) for patterns in own_keys())
    return next((rank for rank in ranks if rank is not None), None)


def rank_at(key: KeyPath, patterns: Sequence[re.Pattern[str]]) -> int | None:
    """Return the rank that the first steps of a key path say if all match, each a pattern; None otherwise."""
    if len(key) < len(patterns):
        return None
    rank = None
    for pattern, step in zip(patterns, key, strict=False):
        match = pattern.fullmatch(f"[{step}]" if isinstance(step, int) else step)
        if match is None:
            return None
        rank = int(match[1]) if match.groups() else rank
    return rank


@cache
def own_keys() -> tuple[tuple[re.Pattern[str], ...], ...]:
    return tuple(tuple(map(re.compile, patterns)) for trainer in TRAINERS.values() for patterns in trainer.own_keys)


def is_whole(name: str) -> bool:
    return any(matches("complete_folders", name))


def is_exported(name: str) -> bool:
    """Return whether a file of this name has weights as they are to be used, beside a directory with all states."""
    return any(matches("exported", name))


def is_other_part(name: str) -> bool:
    """Return whether a directory of this name in a checkpoint holds anything but the model."""
    return name.startswith("optim") or is_beside_model(name)


def is_beside_model(name: str) -> bool:
    return any(matches("others", name))


def key_beside(name: str, step: int | None, names: Collection[str]) -> str | None:
    """Return the keys that the contents of a file of this name belong under beside a model; None for other files.

    The model is a directory, in which are these `names`, or else a file of this `step`.
    """
    for pattern, key in files_beside():
        match = pattern.fullmatch(name)
        if match and companion_of(pattern.pattern) in (None, *names):
            said = match.groupdict()
            if step == (int(said["step"]) if "step" in said else None):
                return key.format(**said)
    return None


def companion_of(pattern: str) -> str | None:
    """Return the name that must be there for files that match a pattern to belong to a model; None if none must."""
    return next((trainer.beside_of[pattern] for trainer in TRAINERS.values() if pattern in trainer.beside_of), None)


def is_beside_file(name: str) -> bool:
    return any("step" in pattern.groupindex and pattern.fullmatch(name) for pattern, _ in files_beside())


@cache
def files_beside() -> tuple[tuple[re.Pattern[str], str], ...]:
    return tuple((re.compile(pattern), key) for trainer in TRAINERS.values() for pattern, key in trainer.beside.items())


def is_training_state(name: str) -> bool:
    """Return whether a file of this name holds state of a training, which a model for use does without."""
    is_beside = any(pattern.fullmatch(name) and not key.startswith("model") for pattern, key in files_beside())
    return (
        is_beside
        or any(matches("states", name))
        or is_tracker(name)
        or name in metrics_files()
        or owner_of_file(name) is not None
    )


def is_description(name: str) -> bool:
    """Return whether a file of this name describes the weights beside it, and no others."""
    return any(matches("descriptions", name))


def is_of_checkpoint(name: str) -> bool:
    """Return whether a trainer gives this name to a file of one of its checkpoints."""
    beside = any(pattern.fullmatch(name) for pattern, _ in files_beside())
    return (
        beside
        or is_tracker(name)
        or name in metrics_files()
        or rank_in(name) is not None
        or owner_of_file(name) is not None
    )


def is_kept(name: str, beside: Iterable[str]) -> bool:
    """Return whether a directory or hidden file goes along as it is, by its name and those that it lies beside."""
    return any(trainer.kept[name] in beside for trainer in TRAINERS.values() if name in trainer.kept)


def is_change(name: str) -> bool:
    """Return whether a directory of this name says how the modules of the model were changed."""
    return any(name in trainer.changes for trainer in TRAINERS.values())


def step_keys() -> tuple[tuple[str, KeyPath], ...]:
    """Return where a checkpoint says its step: the file, "" for its own entries, and the way to it."""
    return tuple(found for trainer in TRAINERS.values() for found in trainer.step_keys)


def is_tracker(name: str) -> bool:
    return name in plain_trackers() or name in json_trackers()


@cache
def plain_trackers() -> frozenset[str]:
    """Return the names of trackers that contain the name of the checkpoint and nothing else."""
    return frozenset(name for trainer in TRAINERS.values() for name in (*trainer.trackers, *trainer.best_trackers))


def names_best(name: str) -> bool:
    """Return whether a tracker of this name says which checkpoint is the best, and not which is the latest."""
    return any(name in trainer.best_trackers for trainer in TRAINERS.values())


def is_last(name: str) -> bool:
    """Return whether a checkpoint of this name is the last one of its run, whatever its step."""
    return any(matches("last", name))


def best_keys() -> tuple[tuple[str, KeyPath], ...]:
    """Return where a checkpoint names the best one of its run: the file, "" for its own entries, and the way to it."""
    return tuple(found for trainer in TRAINERS.values() for found in trainer.best_keys)


def is_of_run(name: str) -> bool:
    """Return whether trainers put a file of this name into a run, before its first checkpoint too."""
    return any(name in trainer.of_runs for trainer in TRAINERS.values()) or is_tracker(name) or may_note(name)


def may_note(name: str) -> bool:
    """Return whether a trainer's file of this name has steps, metrics or the best checkpoint in keys that are known."""
    return name in metrics_files() or name in {file for file, _ in (*step_keys(), *best_keys())}


@cache
def json_trackers() -> dict[str, tuple[str, ...]]:
    """Return the trackers in JSON, each with the keys that lead to the name of the checkpoint."""
    return {name: keys for trainer in TRAINERS.values() for name, keys in trainer.json_trackers.items()}


def marker_of(path: Path) -> str | None:
    """Return the name of the file without which the directory at `path` is unfinished; None if it needs no marker."""
    path = path.absolute()
    return look_up([trainer.markers for trainer in TRAINERS.values()], [f"{path.parent.name}/{path.name}"])


def is_commit(name: str) -> bool:
    """Return whether a file of this name says that the save which it is in has ended."""
    return any(matches("commits", name)) or any(name in trainer.markers.values() for trainer in TRAINERS.values())


@cache
def unfinished_names() -> frozenset[str]:
    """Return the names of files that are in a checkpoint only as long as its trainer writes it."""
    return frozenset(name for trainer in TRAINERS.values() for name in trainer.unfinished)


def companion_folders() -> tuple[str, ...]:
    """Return the names of directories in a checkpoint in which some trainer puts config and tokenizer."""
    return tuple(folder for trainer in TRAINERS.values() for folder in trainer.companions)


def metrics_files() -> dict[str, MetricsFile]:
    """Return the files of metrics that trainers leave, by name; ours comes first."""
    return {name: file for trainer in TRAINERS.values() for name, file in trainer.metrics.items()}


def config_of(config: Mapping[str, object]) -> ConfigOf:
    """Return whose config.json it is that does not name a model of transformers."""
    known = (trainer.config for trainer in TRAINERS.values() if trainer.config is not None)
    return next((one for one in known if config.keys() >= set(one.keys)), ConfigOf("an unknown library", ()))


def find_unread(names: Iterable[str]) -> Unread | None:
    """Return what files of these names are, if some trainer's that ckptkit does not read is among them."""
    return look_up([trainer.unread for trainer in TRAINERS.values()], sorted(names))


def find_foreign(names: Iterable[str]) -> Unread | None:
    """Return what the first file of these names is that another program keeps a model in, None if none is."""
    return look_up([FOREIGN], sorted(names))


def say_opaque(names: Iterable[str]) -> str | None:
    """Return what tensors among these names are that can only be copied unchanged, None if there are none."""
    return look_up([trainer.opaque for trainer in TRAINERS.values()], names)


def look_up(tables: Iterable[Mapping[str, Found]], names: Iterable[str]) -> Found | None:
    """Return what the tables have for the first name that matches one of their patterns."""
    known = [(re.compile(pattern), found) for table in tables for pattern, found in table.items()]
    return next((found for name in names for pattern, found in known if pattern.fullmatch(name)), None)


def who_wrote(seen: Evidence) -> str | None:
    """Return the name of who wrote a checkpoint, None if nothing tells. Nothing is guessed.

    Trainers of other packages are asked first, because the marks of torch are on almost every checkpoint.
    """
    trainers = (*TRAINERS.added.values(), *TRAINERS.own.values())
    return next((title for trainer in trainers if (title := trainer.title_on(seen))), None)


def matches(table: str, name: str) -> Iterator[re.Match[str]]:
    """Match a whole name with all patterns of a table, those of every trainer in turn."""
    return (match for pattern in patterns(table) if (match := pattern.fullmatch(name)))


@cache
def patterns(table: str) -> tuple[re.Pattern[str], ...]:
    return tuple(re.compile(pattern) for trainer in TRAINERS.values() for pattern in getattr(trainer, table))


def stem_of(name: str) -> str:
    """Return the name of a checkpoint that is a file without its suffixes: `ckpt-5` of `ckpt-5.pth.tar`."""
    for _ in range(2 if name.endswith(".tar") else 1):
        stem, dot, suffix = name.rpartition(".")
        name = stem if f"{dot}{suffix}" in ONE_FILE else name
    return name


def step_of(path: Path) -> int | None:
    """Return the step in the name of a checkpoint's directory, or the epoch if that is all it says; None otherwise."""
    step = number_in(path.name, "steps")
    return number_in(path.name, "epochs") if step is None else step


def is_epoch(path: Path) -> bool:
    """Return whether a checkpoint's name says an epoch only, which cannot be compared with steps."""
    return number_in(path.name, "steps") is None and number_in(path.name, "epochs") is not None


def step_of_place(path: Path) -> int | None:
    """Return the step in the name of a directory, or of the one that it lies in; None if neither has one."""
    path = path.absolute()
    own = step_of(path)
    return step_of(path.parent) if own is None else own


def may_be_step_name(name: str) -> bool:
    """Return whether a directory's name is like a checkpoint's, or a mere number, as some trainers have it."""
    return step_of(Path(name)) is not None or bool(NUMBER.fullmatch(name))


def has_name_of_training(name: str) -> bool:
    """Return whether an entry of a directory has the name of a checkpoint, or of the state of a training or run."""
    is_step = may_be_step_name(name) or step_of(Path(stem_of(name))) is not None
    return is_step or is_other_part(name) or is_training_state(name) or is_of_run(name)


def may_be_step(path: Path) -> bool:
    """Return whether an entry of a run is named like a checkpoint."""
    if path.is_dir():
        return may_be_step_name(path.name)
    return path.suffix in ONE_FILE and step_of(Path(stem_of(path.name))) is not None

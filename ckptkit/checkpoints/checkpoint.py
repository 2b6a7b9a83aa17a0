"""Open the checkpoint that a path means: the only answer to that question, for every command and every call.

A path means what lies there, or the latest complete checkpoint of the run that lies there. A checkpoint may have
several parts: model and optimizer in directories of their own, or the rest of a training beside a model.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Self

from ckptkit.checkpoints import trainers
from ckptkit.checkpoints.companions import Companions, find_companions
from ckptkit.checkpoints.evidence import gather, gather_names
from ckptkit.checkpoints.part import Part, join
from ckptkit.checkpoints.trainers.ckptkit import TRAINING
from ckptkit.checkpoints.weights import Weights, find_weights
from ckptkit.errors import CkptError, Corrupt, IOFailure, NotACheckpoint, Unsafe, Unsupported
from ckptkit.files.file import names_in
from ckptkit.files.folders import children, entry_of, folders
from ckptkit.files.path import list_ahead, to_local, to_path
from ckptkit.formats import Reader, describe_formats, detect_format
from ckptkit.layout import Layout

_NUMBER = re.compile(r"[0-9]{1,18}")
_ONE_FILE = (".ckpt", ".pt", ".pth", ".safetensors")
_OF_TRAINING = (".pt", ".pth", ".bin")  # optimizers, schedulers and random states


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint: the directory or file at `path`, and its parts, of which the one with the model comes first.

    Nothing but names is looked at before it is asked for. `strange` are directories in which a part should be, and is
    none that can be read.
    """

    path: Path
    parts: tuple[Part, ...]
    strange: tuple[Path, ...] = ()

    @classmethod
    def open(cls, source: Source) -> Checkpoint:
        """Open the checkpoint at a path or URL, or the latest complete one of the run that lies there.

        Raises `NotACheckpoint` if there is none, `Unsupported` for files of a trainer that are not read yet.
        """
        if isinstance(source, Checkpoint):
            return source
        path = to_path(source)
        here = cls.at(path)
        if here.is_direct:
            return here
        latest = latest_in(path)
        if latest is not None:
            return latest
        if here.parts:
            return here
        raise here.unreadable or no_checkpoint(path)

    @classmethod
    def at(cls, path: Path) -> Self:
        """Return what lies at `path` itself, be it complete or a checkpoint at all."""
        reader = detect_format(path)
        if words_for_unread(path, reader) is not None:
            return cls(path, ())
        if reader is None:
            inside = ((folder, detect_format(folder)) for folder in inner_folders(path))
            found = [Part(folder.name, folder, part) for folder, part in inside if part]
            return cls(path, tuple(sorted(found, key=lambda part: not part.is_model)))
        rest = path / TRAINING
        if not (path.is_dir() and rest.is_dir()):
            return cls(path, (Part("", path, reader), *(parts_in(path) if reader.is_sharded else ())))
        beside = detect_format(rest)
        more = (Part(TRAINING, rest, beside),) if beside else ()
        return cls(path, (Part("", path, reader), *more), () if beside else (rest,))

    @property
    def is_direct(self) -> bool:
        """Return whether files of a checkpoint lie at the path itself, and not only in directories below it."""
        return any(not part.place for part in self.parts)

    @property
    def places(self) -> list[Path]:
        """Return where its parts lie, also those that no format claims."""
        return [*(part.path for part in self.parts), *self.strange]

    @property
    def name(self) -> str:
        """Return the name of its directory or file."""
        return self.path.name or self.path.absolute().name

    @cached_property
    def own_step(self) -> int | None:
        """Return the step in its name, or the epoch if that is all it says; None otherwise.

        A mere number is the step of a directory with a checkpoint in it.
        """
        name = self.path.stem if self.path.suffix in _ONE_FILE and not self.path.is_dir() else self.name
        step = step_of(Path(name))
        return int(name) if step is None and self.parts and _NUMBER.fullmatch(name) else step

    @property
    def step(self) -> int | None:
        """Return its step, or that of the checkpoint that it is a part of; None where no name says one."""
        return step_of(self.path.absolute().parent) if self.own_step is None else self.own_step

    @cached_property
    def trainer(self) -> str | None:
        """Return who wrote it, told by what only they leave; None if nothing tells."""
        model = self.model_part
        others = [part.layout for part in self.parts if part is not model]
        return trainers.who_wrote(gather(model.path, (model.layout, *others)))

    @cached_property
    def named_trainer(self) -> str | None:
        """Return who wrote it if names and small files tell, without its metadata; None where only keys would."""
        places = [part.path for part in self.parts] or [self.path, *inner_folders(self.path)]
        names = (trainers.who_wrote(gather_names(place)) for place in places)
        return next(filter(None, names), None)

    @cached_property
    def world_size(self) -> int | None:
        """Return how many ranks have files of their own in it, by the names of files; None if none has."""
        places = [part.path for part in self.parts] or [self.path, *inner_folders(self.path)]
        ranks = {rank for place in places if place.is_dir() for rank in ranks_in(place)}
        return len(ranks) or None

    @cached_property
    def model_part(self) -> Part:
        """Return the part with the model, or the only one.

        Raises `Unsupported` if several may have it, `NotACheckpoint` if there are only others.
        """
        models = [part for part in self.parts if part.is_model or not part.place]
        if len(models) == 1 or (models and not models[0].place):
            return models[0]
        if not models:
            raise self.unreadable or no_checkpoint(self.path)
        names = ", ".join(part.place for part in models)
        message = f"several checkpoints are in this directory: {names}"
        raise Unsupported(message, path=self.path, hint="name one of them")

    @cached_property
    def layout(self) -> Layout:
        """Return all parts as one layout, in the format of the model.

        An entry has the name that it has in its part, with the part's in front where an earlier part has that too.
        """
        model = self.model_part
        return join(self.path, [model, *(part for part in self.parts if part is not model)])

    @cached_property
    def weights(self) -> Weights:
        """Return the model's tensors, under the model's own names. Raises `Mismatch` if there are none."""
        return find_weights(self.model_part.layout)

    @cached_property
    def companions(self) -> Companions:
        """Return config, tokenizer and the like, from the checkpoint or the run above it."""
        return find_companions(self.model_part.path, None)

    def readable(self) -> tuple[Checkpoint, tuple[str, ...]]:
        """Return the checkpoint with the parts that can be read, and words on those beside the model that cannot."""
        model = self.model_part
        kept: list[Part] = []
        unread: list[str] = []
        for part in self.parts:
            try:
                _ = part.layout
                kept.append(part)
            except (Corrupt, IOFailure, Unsafe, Unsupported) as error:
                if part is model:
                    raise
                unread.append(f"{part.path.name}: {error.message}")
        return replace(self, parts=tuple(kept)), tuple(unread)

    def problems(self) -> list[CkptError]:
        """Return what keeps it from being read, as far as names and sizes tell; [] for a complete checkpoint."""
        if not self.parts:
            return [self.unreadable or unknown(self.path)]
        strange = [Corrupt("no known format", path=path) for path in self.strange]
        return [*(problem for part in self.parts if (problem := part.problem)), *strange]

    @property
    def is_complete(self) -> bool:
        """Return whether every part of it has been written to its end; False if it is deleted meanwhile."""
        try:
            return not self.problems()
        except IOFailure:
            if self.path.exists():
                raise
            return False

    @property
    def is_weights_only(self) -> bool:
        """Return whether it is a model and, by its files' names, nothing else of a training, such as an optimizer."""
        if not (self.path.is_dir() and self.is_direct and self.parts[0].reader.is_model_only):
            return False
        return not any(child.is_dir() or child.suffix in _OF_TRAINING for child in children(self.path))

    def require_resumable(self) -> None:
        """Raise `NotACheckpoint` for a checkpoint of which nothing is left but the weights."""
        if self.is_weights_only:
            hint = "name a whole checkpoint, or begin a new run with `--model` and this directory"
            message = "only the weights are here: no training can go on from them"
            raise NotACheckpoint(message, path=self.path, hint=hint)

    @cached_property
    def unreadable(self) -> Unsupported | None:
        """Return the error for files of a trainer that ckptkit does not read yet; None where it has none of these."""
        words = None if self.parts else words_for_unread(self.path, None)
        return Unsupported(f"{words}: ckptkit cannot read that yet", path=self.path) if words else None


Source = str | os.PathLike[str] | Checkpoint  # whatever a checkpoint is asked for by


def path_of(source: Source) -> Path:
    """Return the path or URL that was named, be there a checkpoint or not."""
    return source.path if isinstance(source, Checkpoint) else to_path(source)


def local_path_of(source: Source) -> Path:
    """Return the local path that was named, be there a checkpoint or not. Raises `Usage` for a remote one."""
    is_file_url = isinstance(source, str) and source.startswith("file:")
    return to_local(path_of(source) if is_file_url or isinstance(source, Checkpoint) else source)


def open_layout(source: Source) -> Layout:
    """Return where every chunk of a checkpoint lies, of all its parts; for what may be named see `Checkpoint.open`."""
    return Checkpoint.open(source).layout


def step_of(path: Path) -> int | None:
    """Return the step in the name of a checkpoint's directory, or the epoch if that is all it says; None otherwise."""
    return trainers.step_or_epoch_in(path.name)


def is_epoch(path: Path) -> bool:
    """Return whether a checkpoint's name says an epoch only, which cannot be compared with steps."""
    return trainers.step_in(path.name) is None and trainers.epoch_in(path.name) is not None


def named_in(root: Path) -> list[Checkpoint]:
    """Return what is named like a checkpoint in the run at `root`, complete or not, oldest first; [] for no run."""
    there = [path for path in entries_in(root) if may_be_step(path)]
    list_ahead(there)
    found = [one for one in map(Checkpoint.at, there) if one.own_step is not None]
    return sorted(found, key=lambda one: (one.own_step or 0, one.name))


def checkpoints_in(root: Path) -> list[Checkpoint]:
    """Return what is named like a checkpoint in the run at `root`, and then other directories with checkpoints."""
    named = named_in(root)
    known = {one.path for one in named}
    others = [path for path in entries_in(root) if path not in known and path.is_dir()] if named else []
    return [*named, *(one for one in map(Checkpoint.at, others) if one.parts)]


def latest_in(root: Path) -> Checkpoint | None:
    """Return the complete checkpoint with the highest step in the run at `root`, None if it has none."""
    return next((one for one in reversed(named_in(root)) if one.is_complete), None)


def entries_in(root: Path) -> Iterator[Path]:
    """Return what lies in a directory, but for hidden entries, and for links to other entries of it."""
    for path in children(root) if root.is_dir() else []:
        if not (path.name.startswith(".") or (path.is_symlink() and entry_of(root, os.readlink(path)))):
            yield path


def may_be_step_name(name: str) -> bool:
    """Return whether a directory's name is like a checkpoint's, or a mere number, as some trainers have it."""
    return step_of(Path(name)) is not None or bool(_NUMBER.fullmatch(name))


def may_be_step(path: Path) -> bool:
    """Return whether an entry of a run is named like a checkpoint."""
    if path.is_dir():
        return may_be_step_name(path.name)
    return path.suffix in _ONE_FILE and step_of(Path(path.stem)) is not None


def inner_folders(path: Path) -> list[Path]:
    """Return the directories in a directory that are no checkpoints of their own by their names; [] for a file."""
    return [folder for folder in folders(path) if step_of(folder) is None] if path.is_dir() else []


def words_for_unread(path: Path, reader: Reader | None) -> str | None:
    """Return what lies in a directory if that is a trainer's files that no format here puts together, else None.

    `reader` is the format that would claim it: if it knows a file there by its name, it reads that, whatever else lies
    there.
    """
    if not path.is_dir() or (reader is not None and any(map(reader.owns, names_in(path)))):
        return None
    return trainers.say_unread(name for place in (path, *inner_folders(path)) for name in names_in(place))


def parts_in(path: Path) -> Iterator[Part]:
    """Yield the parts of a checkpoint that lie in directories called like an optimizer's, beside files of the model."""
    for folder in inner_folders(path):
        reader = detect_format(folder) if trainers.is_other_part(folder.name) else None
        if reader is not None:
            yield Part(folder.name, folder, reader)


def ranks_in(place: Path) -> Iterator[int]:
    """Return the ranks that have files of their own in a directory, by the names of these."""
    reader = detect_format(place)
    for name in names_in(place):
        rank = reader.rank_of(name) if reader else None
        if (rank := trainers.rank_in(name) if rank is None else rank) is not None:
            yield rank


def unknown(path: Path) -> NotACheckpoint:
    """Return the error for a path at which no format finds a checkpoint, in few words."""
    if path.is_dir():
        return NotACheckpoint("no known format" if children(path) else "empty", path=path)
    return NotACheckpoint("no known format" if path.exists() else "no such file or directory", path=path)


def no_checkpoint(path: Path) -> NotACheckpoint | Unsupported:
    """Return the error for a path that is neither a checkpoint nor a run with one that can be read."""
    hint = f"looked for: {describe_formats()}, and directories like ckpt-500"
    if not path.is_dir():
        what = "no checkpoint in any known format" if path.exists() else "no such file or directory"
        return NotACheckpoint(what, path=path, hint=hint)
    unfinished = named_in(path)
    if unfinished:
        unread = next((one.unreadable for one in reversed(unfinished) if one.unreadable), None)
        names = ", ".join(one.name for one in unfinished)
        message = f"a run without a complete checkpoint; unfinished: {names}"
        return unread or NotACheckpoint(message, path=path)
    return NotACheckpoint("no checkpoint in any known format, and no run with one", path=path, hint=hint)

"""Open the checkpoint at a path. Every command and API call finds its checkpoint here.

A path means the checkpoint at the path, or the latest complete checkpoint of the run at the path. A checkpoint may have
several components: model and optimizer in separate directories, or a model with training state beside it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

from ckptkit import trainers
from ckptkit.argument_types import with_checked_arguments
from ckptkit.checkpoints.component import Component, join_layouts
from ckptkit.checkpoints.find_components import (
    COMPANION,
    EXPORTED,
    PERHAPS_WEIGHTS,
    TRAINING_SUFFIXES,
    LeftBehind,
    directories_without_step,
    find_components,
    find_only_step_directory,
    find_rank_files_error,
    find_unsupported_files,
    ranks_with_files_at,
    unused_files,
)
from ckptkit.checkpoints.salvage_account import read_account
from ckptkit.checkpoints.several_disks import Others, join_directories
from ckptkit.checkpoints.trainer_evidence import gather_evidence_from_names, gather_trainer_evidence, read_value_at_key
from ckptkit.errors import (
    CheckpointWarning,
    CkptError,
    Corrupt,
    IOFailure,
    Mismatch,
    NotACheckpoint,
    Unsafe,
    Unsupported,
    translate_os_errors,
    warn,
)
from ckptkit.formats import (
    describe_common_formats,
    detect_format,
    find_single_dcp_file_error,
    lacks_main_file,
    no_format_error,
)
from ckptkit.formats.archives.flatten import find_dict_items
from ckptkit.formats.archives.non_tensor_entries import load_value
from ckptkit.formats.archives.torch_save import find_foreign_file_error
from ckptkit.formats.rank_names import names_differing_in_rank, not_joined_error
from ckptkit.io.file import find_link_target_entry, list_children, missing_path_error, names_in
from ckptkit.io.joined_path import JoinedPath, join_paths, local_paths_of
from ckptkit.io.path import prefetch_listings, to_local_path, to_path
from ckptkit.layout import KeyPath, Layout
from ckptkit.models.companions import Companions, find_companions
from ckptkit.models.names import find_family_of
from ckptkit.models.names.copies import find_copies_in
from ckptkit.models.names.weights import COPY, TRAINING, Weights, find_weights_beside_state
from ckptkit.trainers import (
    NUMBER,
    ONE_FILE,
    find_step_of_path,
    has_only_epoch_in_name,
    is_like_checkpoint,
    name_without_suffixes,
)
from ckptkit.trainers.trackers import trackers_in
from ckptkit.words import command_line

if TYPE_CHECKING:
    from ckptkit.models.names.family import Family


# errors of a checkpoint that cannot be read
UNREADABLE = (Corrupt, IOFailure, Mismatch, NotACheckpoint, Unsafe, Unsupported)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint: the directory or file at `path`, and its components, the model first.

    Opening a checkpoint only looks at file names. `strange` lists directories that should contain a component but have
    no known format. `unreadable` is the error if the permissions do not allow to list a directory of the checkpoint,
    which then has no components.
    """

    path: Path
    components: tuple[Component, ...]
    strange: tuple[Path, ...] = ()
    unreadable: IOFailure | None = None

    def __repr__(self) -> str:
        formats = dict.fromkeys(component.reader.name for component in self.components)
        return f"<{' and '.join(formats) or 'no'} checkpoint: {self.path}>"

    @classmethod
    @with_checked_arguments
    def open(cls, source: Source, also: Others = ()) -> Checkpoint:
        """Open the checkpoint at a path or URL, or the latest complete checkpoint of the run there.

        `also` are other directories with files of the same checkpoint, as when each node wrote to a disk of its own.
        Raises `NotACheckpoint` if there is none, `Unsupported` for files of a trainer that ckptkit cannot read yet,
        `Corrupt` for directories of different checkpoints.
        """
        if isinstance(source, Checkpoint) and not also:
            return source
        path = join_directories(path_of_source(source), also)
        checkpoint = cls.in_run(path)
        if checkpoint.is_at_own_path:
            return find_latest_beside_stray(checkpoint) or checkpoint
        latest = find_latest_checkpoint(path)
        if latest is not None:
            return latest
        if checkpoint.components:
            return checkpoint
        raise checkpoint.unreadable or checkpoint.unsupported_files_error or no_checkpoint_error(path)

    @classmethod
    def at(cls, path: Path) -> Self:
        """Return the checkpoint at `path` itself, without choosing one of a run.

        It may be incomplete, or have no components.
        """
        return cls(path, *find_components(path))

    @classmethod
    def in_run(cls, path: Path) -> Self:
        """Return the checkpoint at `path` as `at` does; `unreadable` if permissions forbid to list a directory."""
        try:
            with translate_os_errors(path):
                return cls.at(path)
        except IOFailure as error:
            if not isinstance(error.__cause__, PermissionError):
                raise
            return cls(path, (), unreadable=error)

    @property
    def is_at_own_path(self) -> bool:
        """Return whether the checkpoint is at the path itself, or in one directory there that contains all of it.

        Other directories at a path are components of a checkpoint, or checkpoints of their own.
        """
        return any(not component.place or component.has_all for component in self.components)

    @cached_property
    def is_run_with_strays(self) -> bool:
        """Return whether the path is a run, which looks like a checkpoint because of a stray file in it."""
        if not self.is_at_own_path or not self.path.is_dir() or find_step_of_path(self.path) is not None:
            return False
        first = self.components[0]
        is_odd = first.path == self.path and lacks_main_file(self.path, first.reader)
        return is_odd and any(checkpoint.components for checkpoint in step_checkpoints_in_run(self.path))

    @property
    def component_paths(self) -> list[Path]:
        return [*(component.path for component in self.components), *self.strange]

    @property
    def name(self) -> str:
        return nonempty_path_name(self.path)

    @cached_property
    def step_in_name(self) -> int | None:
        """Return the step in its name, or the epoch if the name has no step; None without either.

        A bare number is the step of a directory that contains a checkpoint.
        """
        name = self.name if self.path.is_dir() else name_without_suffixes(self.name)
        step = find_step_of_path(Path(name))
        return int(name) if step is None and self.components and NUMBER.fullmatch(name) else step

    @cached_property
    def step(self) -> int | None:
        """Return its step, or the step of the checkpoint that it is a component of; None if nothing records one.

        The name takes precedence over the trainer's own record. An epoch counts only if there is no step.
        """
        own = self.step_in_name
        if own is None:
            own = find_step_of_path(self.path.absolute().parent)
        noted = self.recorded_step if own is None or has_only_epoch_in_name(self.path) else None
        return own if noted is None else noted

    @property
    def recorded_step(self) -> int | None:
        """Return the step that its trainer recorded in a small file or an entry; None without a readable record."""
        folder = self.path if self.path.is_dir() else self.path.parent
        notes = (
            read_value_at_key(folder / file, key) if file else self.read_plain_value(key)
            for file, key in trainers.step_keys()
        )
        step = next((note for note in notes if type(note) is int and note >= 0), None)
        return self.salvaged_step if step is None else step

    @property
    def salvaged_step(self) -> int | None:
        """Return the step in the name of the damaged checkpoint that it was salvaged from; None for any other."""
        source = (read_account(self.path) or {}).get("source") if self.path.is_dir() else None
        return find_step_of_path(Path(source)) if isinstance(source, str) else None

    def read_plain_value(self, key: KeyPath) -> object:
        """Return the number or text in a non-tensor entry; None if no entry at the key path can be read.

        The last keys of the path may lead into an entry that is a dict or a list.
        """
        for layout in (component.layout for component in self.components):
            for length in range(len(key), 0, -1):
                name = ".".join(map(str, key[:length]))
                if name not in layout.blobs or layout.key(name) != key[:length]:
                    continue
                try:
                    value = load_value(layout.root, layout.blobs[name])
                except (Corrupt, IOFailure, Unsafe, Unsupported):
                    return None
                for step in key[length:]:
                    children = dict(enumerate(value)) if isinstance(value, list) else dict(find_dict_items(value) or ())
                    value = children.get(step)
                return value
        return None

    @cached_property
    def trainer(self) -> str | None:
        """Return the trainer that wrote the checkpoint; None if nothing identifies it."""
        model = self.model_component
        others = [component.layout for component in self.components if component is not model]
        return trainers.who_wrote(gather_trainer_evidence(model.path, (model.layout, *others)))

    @cached_property
    def trainer_by_file_names(self) -> str | None:
        """Return the trainer by file names and small files alone, without reading metadata; None if unclear."""
        places = [component.path for component in self.components] or [self.path, *directories_without_step(self.path)]
        names = (trainers.who_wrote(gather_evidence_from_names(path)) for path in places)
        return next(filter(None, names), None)

    @cached_property
    def world_size(self) -> int | None:
        """Return how many ranks have files of their own, by file names; None if no rank has."""
        places = [component.path for component in self.components] or [self.path, *directories_without_step(self.path)]
        return len({rank for path in places for rank in ranks_with_files_at(path)}) or None

    @cached_property
    def models(self) -> list[Component]:
        """Return the components that may be the model, by name; by tensors if several names qualify.

        A component at the path itself is the model under any name.
        """
        if at_path := [component for component in self.components if not component.place]:
            return at_path
        named = [component for component in self.components if component.is_model]
        return [one for one in named if len(named) == 1 or one.may_have_weights] or named

    @cached_property
    def model_component(self) -> Component:
        """Return the component with the model, or the only component.

        Raises `Unsupported` if several may be the model, `NotACheckpoint` if none may.
        """
        models = self.models
        if len(models) == 1 or (models and not models[0].place):
            return models[0]
        if not models:
            raise self.unsupported_files_error or no_checkpoint_error(self.path)
        places = [component.place for component in models]
        if names_differing_in_rank(places[0], places):
            raise not_joined_error(places, self.path)
        trackers = trackers_in(self.path)
        named = ((model, tracker) for model in models for tracker in trackers if tracker.is_naming(model.path))
        tracked = next(named, None)
        hint = f"pass `{tracked[0].path}`, which `{tracked[1].name}` names" if tracked else "pass one of them"
        raise Unsupported(f"several checkpoints are in this directory: {', '.join(places)}", path=self.path, hint=hint)

    @property
    def exported_weights(self) -> Component | None:
        """Return the exported weights, such as an adapter, beside the directory with the full training state.

        Returns None if there are none.
        """
        has_all = bool(self.components) and all(component.has_all for component in self.components)
        names = sorted(filter(trainers.is_exported, names_in(self.path))) if has_all else []
        reader = detect_format(self.path / names[0]) if names else None
        return Component("", self.path / names[0], reader) if reader else None

    @cached_property
    def layout(self) -> Layout:
        """Return all components as one layout, in the format of the model.

        An entry keeps the name that it has in its component. If an earlier component has the same name, the component's
        name is put in front.
        """
        model = self.model_component
        if len(self.components) == 1 and not model.place:
            return model.layout
        root = self.path if self.path.is_dir() else self.path.parent
        components = [model, *(component for component in self.components if component is not model)]
        return join_layouts(root, components, [component.layout_relative_to_checkpoint for component in components])

    @property
    def weights(self) -> Weights:
        """Return the model's tensors, under the model's own names. Raises `Mismatch` if there are none."""
        return self.model_component.weights

    @cached_property
    def family(self) -> Family | None:
        """Return the model family that the tensor names belong to; None for the Hub's names, and for unknown names."""
        try:
            return find_family_of(self.weights.layout.shapes, self.trainer)
        except (Mismatch, Unsupported):  # no model, or several
            return None

    @cached_property
    def companions(self) -> Companions:
        """Return the model files (config.json, tokenizer) from the checkpoint or its run."""
        return find_companions(self.model_component.path, None)

    def with_readable_components(self) -> tuple[Checkpoint, tuple[str, ...]]:
        """Return the checkpoint with its readable components only, and a remark on each unreadable one.

        Raises the error of the model component if that is unreadable.
        """
        model = self.model_component
        kept: list[Component] = []
        unread: list[str] = []
        for component in self.components:
            try:
                _ = component.layout
                kept.append(component)
            except (Corrupt, IOFailure, Unsafe, Unsupported) as error:
                if component is model:
                    raise
                unread.append(f"{component.path.name}: {error.message}")
        return replace(self, components=tuple(kept)), tuple(unread)

    def with_low_precision_as_weights(self) -> Checkpoint:
        """Return the checkpoint with the low-precision copies in place of the tensors that have one.

        Raises `Mismatch` if there are none.
        """
        if not any(component.layout.twins for component in self.components):
            hint = "drop --weights-from: only some formats have a second copy, such as ZeRO 1 and 2, not 3"
            raise Mismatch("the checkpoint does not have a second copy of the weights", path=self.path, hint=hint)
        return replace(self, components=tuple(replace(component, takes_twins=True) for component in self.components))

    def with_base(self, base: str | None) -> Checkpoint:
        """Return the checkpoint with `base` as the place of the model's config.json; unchanged for None."""
        if not base:
            return self
        return replace(self, components=tuple(replace(component, base=base) for component in self.components))

    def problems(self) -> list[CkptError]:
        """Return the reasons why it cannot be read, by names and sizes alone; [] for a complete checkpoint."""
        if self.unreadable:
            raise self.unreadable
        if not self.components:
            return [self.unsupported_files_error or unknown_format_error(self.path)]
        strange = [Corrupt("no known format", path=path) for path in self.strange]
        return [*(problem for component in self.components if (problem := component.problem)), *strange]

    @property
    def is_complete(self) -> bool:
        """Return whether every component was written to its end; False if the checkpoint is deleted meanwhile."""
        try:
            return not self.problems()
        except IOFailure:
            if self.path.exists():
                raise
            return False

    @property
    def is_weights_only(self) -> bool:
        """Return whether, by file names, it is a model without any training state such as an optimizer."""
        if not (self.path.is_dir() and self.is_at_own_path and self.components[0].reader.is_model_only):
            return False
        return not any(
            child.suffix in TRAINING_SUFFIXES or (child.is_dir() and not Checkpoint.at(child).is_weights_only)
            for child in list_children(self.path)
        )

    def require_resumable(self) -> None:
        """Raise `NotACheckpoint` for a checkpoint that contains only weights."""
        if self.is_weights_only:
            hint = "pass a checkpoint with training state, or start a new run with --model and this directory"
            message = "the directory contains only weights: training cannot continue from them"
            raise NotACheckpoint(message, path=self.path, hint=hint)

    def list_not_copied_files(self, copied: Iterable[Path]) -> list[LeftBehind]:
        """Return the files of its directory that are not in `copied`, each with the reason."""
        if not self.path.is_dir():
            return []
        components = {component.path for component in self.components} - {self.path}
        with translate_os_errors(self.path):
            files = list(unused_files(self.path, frozenset(copied), components))
        exported = self.exported_weights
        beside = components - {self.components[0].path}
        reasons: dict[Path, str] = {}  # by file, or by component beside the model's
        for i, left in enumerate(files):
            if exported and left.path == exported.path:
                files[i] = left._replace(why=EXPORTED)
            elif left.why == TRAINING:
                path = left.path.parent if left.path.parent in beside else left.path
                if path not in reasons:
                    reasons[path] = self.reason_not_copied(path)
                files[i] = left._replace(why=reasons[path])
        return files

    def reason_not_copied(self, path: Path) -> str:
        """Return whether a file or component of training state contains weights: `COPY` or `PERHAPS_WEIGHTS`.

        Returns `TRAINING` if it contains none, if it cannot be read, and for files of another training checkpoint,
        which has its own weights.
        """
        around = detect_format(path.parent) if path.parent != self.path else None
        if around is not None and not around.is_model_only:
            return TRAINING
        try:
            layout = self.find_layout_of_file(path)
            if layout is not None and find_copies_in(layout, layout.tensors, self.weights.layout.shapes):
                return COPY
            has_weights = layout is not None and path.is_dir() and find_weights_beside_state(layout)
        except UNREADABLE:
            return TRAINING
        return PERHAPS_WEIGHTS if has_weights else TRAINING

    def find_layout_of_file(self, path: Path) -> Layout | None:
        """Return the layout of a file or component in its directory; None if it has no known format or is damaged."""
        reader = detect_format(path)
        if reader is None:
            return None
        opened = next((component for component in self.components if component.path == path), None)
        try:
            return (opened or Component("", path, reader)).layout
        except UNREADABLE:
            return None

    @property
    def unread_files(self) -> list[LeftBehind]:
        """Return the files in its directory that no component reads, without config and tokenizer."""
        used = {component.layout.root / name for component in self.components for name in component.layout.files}
        return [left for left in self.list_not_copied_files(used) if left.why != COMPANION]

    @cached_property
    def unsupported_files_error(self) -> Unsupported | None:
        """Return the error for files of a trainer that ckptkit cannot read yet; None for any other checkpoint."""
        unread = None if self.components or self.unreadable else find_unsupported_files(self.path)
        if unread is None:
            return None
        return Unsupported(f"{unread.what}: ckptkit cannot read this yet", path=self.path, hint=unread.hint)


Source = str | os.PathLike[str] | Checkpoint  # accepted wherever a function takes a checkpoint


def path_of_source(source: Source) -> Path:
    """Return the path or URL of a source, whether or not a checkpoint is there."""
    return source.path if isinstance(source, Checkpoint) else to_path(source)


def nonempty_path_name(path: Path) -> str:
    """Return the name of a directory or file, also if the path is `.` or `..`."""
    return path.name if path.name not in ("", "..") else path.resolve().name


def local_path_of_source(source: Source) -> Path:
    """Return the local path of a source, whether or not a checkpoint is there. Raises `Usage` for a remote path."""
    path = source.path if isinstance(source, Checkpoint) else source
    if isinstance(path, JoinedPath):
        return join_paths([to_local_path(root) for root in local_paths_of(path)])
    return to_local_path(path)


def open_layout(source: Source) -> Layout:
    """Return the byte range of every chunk in all components of a checkpoint; for `source` see `Checkpoint.open`."""
    return Checkpoint.open(source).layout


def step_checkpoints_in_run(root: Path) -> list[Checkpoint]:
    """Return the directories and files named like checkpoints in the run at `root`, complete or not, oldest first."""
    return sorted_checkpoints_with_step(map(Checkpoint.in_run, candidate_paths_in_run(root)))


def candidate_paths_in_run(root: Path) -> list[Path]:
    """Return the paths in the run at `root` that may be checkpoints, by name alone."""
    is_step = find_step_of_path(root) is not None
    steps = [path for path in visible_children(root) if is_like_checkpoint(path)]
    inner = find_only_step_directory(root, steps)
    candidates = [path for path in steps if path != inner and not (is_step and trainers.is_whole(path.name))]
    prefetch_listings(candidates)
    return candidates


def sorted_checkpoints_with_step(checkpoints: Iterable[Checkpoint]) -> list[Checkpoint]:
    """Return the checkpoints whose name has a step, in the order of steps."""
    named = [checkpoint for checkpoint in checkpoints if checkpoint.step_in_name is not None]
    return sorted(
        named, key=lambda checkpoint: trainers.checkpoint_sort_key(checkpoint.step_in_name or 0, checkpoint.name)
    )


def all_checkpoints_in_run(root: Path) -> list[Checkpoint]:
    """Return the checkpoints of the run at `root`: first by step, then the trainer's last one and others."""
    named = step_checkpoints_in_run(root)
    known = {checkpoint.path for checkpoint in named}
    others_in_run = [path for path in visible_children(root) if path not in known] if named else []
    others = [path for path in others_in_run if path.is_dir() or trainers.is_last(path.name)]
    return [*named, *(checkpoint for checkpoint in map(Checkpoint.in_run, others) if checkpoint.components)]


def runs_in(root: Path) -> list[Path]:
    return [folder for folder in directories_without_step(root) if step_checkpoints_in_run(folder)]


class RunAround(CheckpointWarning):
    """A directory is both a training run and a model: a warning that names the one that ckptkit uses."""


def find_latest_beside_stray(checkpoint: Checkpoint) -> Checkpoint | None:
    """Return the latest checkpoint of a run that looked like a checkpoint because of a stray file in it; else None.

    Warns which of the two ckptkit uses. A model with description files, as a trainer exports at the end of a run, is
    used itself: this returns None. Raises the error for a run without a complete checkpoint.
    """
    path, reader = checkpoint.path, checkpoint.components[0].reader
    if not path.is_dir() or find_step_of_path(path) is not None or checkpoint.components[0].path != path:
        return None
    if checkpoint.is_run_with_strays:
        latest = find_latest_checkpoint(path)  # warns if it is not the highest step
        if latest is None:
            raise no_checkpoint_error(path)
        files = ", ".join(sorted(checkpoint.components[0].layout.files))
        warn(f"{path}: a run; using {latest.name}, and not {files} beside it", RunAround)
        return latest
    if lacks_main_file(path, reader):
        return None
    if reader.is_model_only and (left := find_latest(path).checkpoint):
        words = f"using the model in this directory, not {left.name}, the latest checkpoint of the run in it"
        warn(f"{path}: {words}", RunAround)
    return None


class LatestDiffers(CheckpointWarning):
    """The checkpoint that a trainer would resume from is not the one with the highest step."""


class LatestCheckpoint(NamedTuple):
    """The latest checkpoint of a run, None if none is complete, and why it is not the one that names suggest."""

    checkpoint: Checkpoint | None
    remarks: tuple[str, ...] = ()


def find_latest_checkpoint(root: Path) -> Checkpoint | None:
    """Return the latest complete checkpoint of the run at `root`, None if it has none; see `find_latest`.

    Warns if it is not the one with the highest step, or if a latest-checkpoint file names an incomplete one.
    """
    latest = find_latest(root)
    for remark in latest.remarks if latest.checkpoint else ():
        warn(f"{root}: {remark}", LatestDiffers)
    return latest.checkpoint


def find_latest(root: Path) -> LatestCheckpoint:
    """Find the checkpoint that the trainer of the run at `root` would resume from.

    This is the checkpoint that a latest-checkpoint file, a link such as `last` or the newest `last.ckpt` points to, if
    it is complete; else the complete one with the highest step.
    """
    named = step_checkpoints_in_run(root)
    highest = next((one for one in reversed(named) if one.is_complete), None)
    candidates: list[tuple[str, Checkpoint]] = []
    remarks: list[str] = []
    trackers = trackers_in(root) if root.is_dir() else []
    for tracker in (one for one in trackers if one.is_latest):
        if not tracker.target:
            remarks.append(f"`{tracker.name}` names no checkpoint")
            continue
        tracked = next((one for one in named if tracker.is_naming(one.path)), None)
        tracked = tracked or Checkpoint.at(root / tracker.target)
        if tracked.components and tracked.is_complete:
            candidates.append((tracker.name, tracked))
        else:
            what = "is not complete" if (root / tracker.target).exists() else "does not exist"
            remarks.append(f"`{tracker.name}` names {tracker.target}, which {what}")
    remarks += [f"`{one.name}` names {one.target}" for one in trackers if one.is_guess and not one.is_latest]
    for path in visible_children(root):
        if trainers.is_last(path.name) and (last := Checkpoint.at(path)).is_complete:
            step = step_or_none(last)
            if step is None:
                remarks.append(f"`{path.name}` has no step in its name, so it may be later")
            # `last` wins if its step is higher, or if it was written later: then the training was rolled back
            elif highest is None or step > (step_or_none(highest) or 0) or is_rolled_back(last, highest):
                candidates.append((path.name, last))
    named_by, latest = max(candidates, key=lambda one: step_or_none(one[1]) or 0, default=("", highest))
    others = [(name, one) for name, one in candidates if latest and step_or_none(one) != step_or_none(latest)]
    remarks += [f"`{name}` names {one.name}" for name, one in others if name != one.name]
    if latest and highest and latest.path != highest.path:
        remarks.append(f"using {latest.name}, which `{named_by}` names; the highest step is {highest.name}")
    elif latest and remarks:
        remarks[-1] += f"; using {latest.name}"
    return LatestCheckpoint(latest, tuple(remarks))


def is_rolled_back(last: Checkpoint, highest: Checkpoint) -> bool:
    """Return whether a run's last checkpoint is newer than its highest step: training restarted from an earlier one."""
    with translate_os_errors(last.path):
        return last.path.stat().st_mtime > highest.path.stat().st_mtime and step_or_none(last) != step_or_none(highest)


def step_or_none(checkpoint: Checkpoint) -> int | None:
    """Return the step of a checkpoint; None if it has none or cannot be read."""
    try:
        return checkpoint.step
    except (Corrupt, IOFailure, Unsafe, Unsupported):
        return None


def visible_children(root: Path) -> Iterator[Path]:
    """Yield the paths in a directory, except hidden ones and links to other paths in it."""
    for path in list_children(root) if root.is_dir() else []:
        if not (
            path.name.startswith(".") or (path.is_symlink() and find_link_target_entry(root, str(path.readlink())))
        ):
            yield path


def unknown_format_error(path: Path) -> NotACheckpoint:
    """Return the error for a path where no format finds a checkpoint."""
    if path.is_dir():
        return NotACheckpoint("no known format" if list_children(path) else "empty", path=path)
    if not path.exists():
        return missing_path_error(path)
    return find_single_dcp_file_error(path) or NotACheckpoint("no known format", path=path)


def find_unfinished_in_store_error(path: Path) -> NotACheckpoint | None:
    """Return the error for a path in a store whose upload or deletion is unfinished; None for any other."""
    from ckptkit.io.claims import find_claim, find_unfinished_upload_error  # deferred: only needed for this error

    claim = find_claim(path)
    if claim is not None and claim.is_deletion:
        hint = f"run {command_line('prune', path.parent, '--yes')} to finish it"
        return NotACheckpoint(f"found no complete checkpoint: a {claim.describe()}", path=path, hint=hint)
    upload = find_unfinished_upload_error(path, claim)
    return None if upload is None else NotACheckpoint(upload.message, path=path, hint=upload.hint)


def no_checkpoint_error(path: Path) -> CkptError:
    """Return the error for a path that is neither a checkpoint nor a run with a readable one."""
    if unfinished_work := find_unfinished_in_store_error(path):
        return unfinished_work
    if not path.exists():
        return missing_path_error(path)
    hint = f"pass a checkpoint ({describe_common_formats()} and others), or a run with directories like ckpt-500"
    if not path.is_dir():
        return find_single_dcp_file_error(path) or find_foreign_file_error(path) or no_format_error(path, hint)
    files = (file for file in list_children(path) if file.suffix in (*ONE_FILE, ".pt2") and file.is_file())
    programs = filter(
        None, map(find_foreign_file_error, files)
    )  # files that could be checkpoints, and are something else
    if error := find_rank_files_error(path) or find_unfinished_run_error(path) or next(programs, None):
        return error
    runs, names = runs_in(path), names_in(path)
    if runs:
        hint = f"pass `{runs[0]}`, which contains checkpoints"
    elif any(map(trainers.is_run_file_name, names)):
        hint = "pass another directory, or wait until the training saves a checkpoint"
        return NotACheckpoint(f"the run has no checkpoint yet, only {', '.join(names[:4])}", path=path, hint=hint)
    return NotACheckpoint("no checkpoint in any known format, and no run with checkpoints", path=path, hint=hint)


def find_unfinished_run_error(path: Path) -> NotACheckpoint | Unsupported | None:
    """Return the error for a run without a complete, readable checkpoint; None for any other directory."""
    unfinished = step_checkpoints_in_run(path)
    if not unfinished:
        return None
    problems = (problem for checkpoint in reversed(unfinished) for problem in checkpoint.problems())
    unsupported = next((problem for problem in problems if isinstance(problem, Unsupported)), None)
    if unsupported is not None:
        return unsupported
    names = ", ".join(checkpoint.name for checkpoint in unfinished)
    hint = f"run {command_line('verify', unfinished[-1].path)}, which lists the problems"
    return NotACheckpoint(f"the run has no complete checkpoint; unfinished: {names}", path=path, hint=hint)

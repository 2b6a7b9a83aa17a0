"""Find the components of a checkpoint: model and optimizer in separate directories, or training state beside a model.

Looks at names and detects formats. Describes every other file by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from ckptkit import trainers
from ckptkit.checkpoints.component import MODEL, Component
from ckptkit.checkpoints.manifest import NAME as MANIFEST
from ckptkit.checkpoints.trainer_evidence import read_json_object
from ckptkit.errors import Unsupported, names_and_more
from ckptkit.formats import (
    FormatReader,
    detect_format,
    has_known_file_name,
    is_checkpoint_by_contents,
    lacks_main_file,
)
from ckptkit.formats.archives.torch_save import is_torch_save
from ckptkit.formats.rank_names import names_differing_in_rank, not_joined_error
from ckptkit.io.file import list_children, list_directories, names_in
from ckptkit.io.local_file import is_link_outside_cache
from ckptkit.models.companions import FILES
from ckptkit.models.names.weights import COPY, TRAINING
from ckptkit.trainers import ONE_FILE, find_step_of_path, is_like_checkpoint_name, name_without_suffixes
from ckptkit.trainers.trainer import Unread

TRAINING_SUFFIXES = (".pt", ".pth", ".bin")  # files of optimizers, schedulers and random states
LINK = "not a regular file"
HIDDEN = "hidden"
CHECKPOINT = "a checkpoint of its own"
RUN = "a run with checkpoints of its own"
WEIGHTS = "weights of another model, or of an earlier save"
PERHAPS_WEIGHTS = "unknown, perhaps weights"
NOT_KNOWN = "not known"
EARLIER = "the manifest of an earlier save"
COMPANION = "config or tokenizer"
EXPORTED = "exported by the trainer, beside its own states"
CHANGES = "how the model was changed, such as by quantizers or pruning"
LOST = (WEIGHTS, PERHAPS_WEIGHTS, CHANGES, COPY)  # not copied although the output may need it
DESCRIPTION = "describes these weights only"
_REASON_BY_NAME: Mapping[str, Callable[[str], bool]] = {  # reason -> function of a file name
    TRAINING: trainers.is_training_state,
    COMPANION: FILES.__contains__,
    DESCRIPTION: trainers.is_description,
}


class LeftBehind(NamedTuple):
    """A file of a source, or a directory of files, that is neither read nor copied, and why."""

    path: Path
    why: str
    name: str  # path relative to the checkpoint's directory

    @property
    def root(self) -> Path:
        return self.path.parents[len(Path(self.name).parts) - 1]

    @property
    def is_expected(self) -> bool:
        """Return whether a rule says that the output does not need the file."""
        return self.why not in (*LOST, NOT_KNOWN)


def find_components(path: Path) -> tuple[tuple[Component, ...], tuple[Path, ...]]:
    """Return the components of the checkpoint at `path`, the model first, and those in no known format."""
    wholes = find_complete_subdirectories(path)
    if wholes is not None:
        return wholes, ()
    reader = None if is_run(path) else detect_format(path)
    if has_unsupported_files(path, reader):
        return (), ()
    if reader is None or has_only_stray_files(path, reader):
        return components_inside(path)
    components, strange = with_components_beside(Component("", path, reader))
    return tuple(components), tuple(strange)


def is_run(path: Path) -> bool:
    """Return whether a directory without a step in its name is a run, although a file in it could be a model.

    It is a run if (1) file names of checkpoints have steps, or (2) a latest-checkpoint file, a link or a last
    checkpoint is beside names that may be steps. It is a checkpoint if a format recognizes a file in it.
    """
    if not path.is_dir() or find_step_of_path(path) is not None:
        return False
    names = [name for name in names_in(path) if not trainers.is_step_file_beside_model(name)]
    has_steps = any(
        name.endswith(ONE_FILE) and find_step_of_path(Path(name_without_suffixes(name))) is not None for name in names
    )
    is_tracked = any(map(is_like_checkpoint_name, names)) and any(
        trainers.is_tracker(name) or trainers.is_last(name) or (path / name).is_symlink() for name in names
    )
    return (has_steps or is_tracked) and not (has_known_file_name(names) or is_checkpoint_by_contents(path))


def find_complete_subdirectories(path: Path) -> tuple[Component, ...] | None:
    """Return the subdirectories that contain the full checkpoint, except files beside them; None without any.

    The checkpoint's directory has a step in its name; this distinguishes it from a run. A subdirectory only counts as
    complete if no other subdirectory has shards: otherwise each subdirectory is a component.
    """
    if find_step_of_path(path) is None or not path.is_dir():
        return None
    subdirectories = list_directories(path)
    complete = [folder for folder in subdirectories if trainers.is_whole(folder.name)]
    inner = find_only_step_directory(path, subdirectories)
    if inner is not None and not complete and detect_format(path) is None:
        complete = [inner]
    readers = [(folder, reader) for folder in complete if (reader := detect_format(folder)) and reader.is_sharded]
    others = (detect_format(folder) for folder in directories_without_step(path) if folder not in complete)
    if not readers or any(reader is not None and reader.is_sharded for reader in others):
        return None
    return tuple(Component(folder.name, folder, reader, has_all=True) for folder, reader in readers)


def find_only_step_directory(path: Path, candidates: Iterable[Path]) -> Path | None:
    """Return the only path in `candidates` whose name has a step, if it is the step of the checkpoint's directory.

    Trainers that save through another library write `checkpoint-500/iter_0000500`, possibly with weights in the Hub's
    format beside it.
    """
    step = find_step_of_path(path)
    named = (
        [candidate for candidate in candidates if find_step_of_path(candidate) is not None] if step is not None else []
    )
    return named[0] if len(named) == 1 and find_step_of_path(named[0]) == step else None


def components_in_subdirectory(subdirectory: Path) -> tuple[list[Component], list[Path]]:
    """Return the components in a subdirectory, and those in no known format.

    They are the subdirectory itself with those beside its model, an optimizer's only file, or several state files.
    """
    reader = detect_format(subdirectory)
    if reader is not None:
        states = state_files_as_components(subdirectory, reader)
        if len(states) > 1:
            return states, []
        return with_components_beside(Component(subdirectory.name, subdirectory, reader))
    names = names_in(subdirectory) if trainers.is_non_model_component_name(subdirectory.name) else []
    if len(names) != 1:
        return [], []
    only = subdirectory / names[0]
    reader = detect_format(only) if only.suffix in TRAINING_SUFFIXES and only.is_file() else None
    return [Component(subdirectory.name, only, reader)] if reader else [], []


def with_components_beside(component: Component) -> tuple[list[Component], list[Path]]:
    """Return a component with the training-state files beside it, and the files beside it in no known format.

    They are in the component's directory, or, for a model file, have the same step in their names.
    """
    path, known, strange = component.path, [component], list[Path]()
    step = None if path.is_dir() else find_step_of_path(Path(name_without_suffixes(path.name)))
    if not path.is_dir() and step is None:
        return known, strange
    folder = path if path.is_dir() else path.parent
    above = f"{component.place}/" if component.place else ""
    names = sorted(names_in(folder))
    for name in names:
        beside, key = folder / name, trainers.find_key_for_file(name, step, names)
        is_file = key is not None and beside.is_file()
        is_folder = key is None and step is None and trainers.is_beside_model(name) and beside.is_dir()
        if (is_file or is_folder) and (reader := detect_format(beside)):
            known.append(Component(f"{above}{name}", beside, reader, key))
        elif is_file or is_folder:
            strange.append(beside)
    return known, strange


def state_files_as_components(directory: Path, reader: FormatReader) -> list[Component]:
    """Return each state file of a directory as a component under its own name; [] for a model."""
    is_of_training = any(map(trainers.is_training_state, names_in(directory)))
    if reader.is_sharded or not is_of_training or not lacks_main_file(directory, reader):
        return []
    files = [
        path for path in list_children(directory) if path.suffix in ONE_FILE and path.is_file() and reader.detect(path)
    ]
    return [Component(f"{directory.name}/{file.name}", file, reader, under=file.stem) for file in files]


def components_inside(path: Path) -> tuple[tuple[Component, ...], tuple[Path, ...]]:
    """Return the components in the subdirectories of a checkpoint, the model first, and those in no known format."""
    components: list[Component] = []
    strange: list[Path] = []
    for folder in directories_without_step(path):
        known, unknown = components_in_subdirectory(folder)
        components += known
        strange += unknown
    if all(component.under is not None for component in components):
        return (), ()  # only training state, without the model that it belongs to
    return tuple(sorted(components, key=lambda component: not component.is_model)), tuple(strange)


def has_only_stray_files(path: Path, reader: FormatReader) -> bool:
    """Return whether the files that a format recognizes are stray files beside subdirectories with the model."""
    if not lacks_main_file(path, reader):
        return False
    names = [folder.name for folder in list_directories(path)]
    has_components = MODEL in names or any(map(trainers.is_non_model_component_name, names))
    return has_components and any(component.is_model for component in components_inside(path)[0])


def directories_without_step(path: Path) -> list[Path]:
    """Return the subdirectories whose names do not mark them as checkpoints of their own; [] for a file."""
    if not path.is_dir():
        return []
    names = names_in(path)
    return [
        folder
        for folder in list_directories(path)
        if find_step_of_path(folder) is None and not trainers.is_copied_unchanged(folder.name, names)
    ]


def has_unsupported_files(path: Path, reader: FormatReader | None) -> bool:
    """Return whether a path has files of a trainer that ckptkit cannot read.

    `reader` is the format that would read the path. It takes precedence if it knows one of the files by name, unless
    that name belongs to a trainer that ckptkit cannot read.
    """
    names = names_in(path) if path.is_dir() else [path.name]
    owned = [name for name in names if reader is not None and reader.owns_file(name)]
    if not path.is_dir() and reader is not None and not owned:
        return False  # you passed the path of a torch.save file
    if any(find_unread_files_among(path, [name]) is None for name in owned):
        return False
    return find_unread_files_among(path, file_names_in_component(path)) is not None


def find_unread_files_among(path: Path, names: Iterable[str]) -> Unread | None:
    """Return the description of a trainer's files among these names that ckptkit cannot read; None without any."""
    unread = trainers.find_unreadable_file(names)
    if unread is None or unread.json is None:
        return unread
    name, key = unread.json
    files = [place / name for place in ([path, *directories_without_step(path)] if path.is_dir() else [path.parent])]
    return unread if any(file.is_file() and key in read_json_object(file) for file in files) else None


def find_rank_files_error(path: Path, depth: int = 4) -> Unsupported | None:
    """Return the error for files or directories of several ranks anywhere in a directory; None without any.

    `depth` is the number of directory levels to search: fairseq2 has `model/pp_00/tp_00/sdp_00.pt`.
    """
    below = directories_without_step(path)
    files = [file.name for file in list_children(path) if file.suffix in ONE_FILE and file not in below]
    names = [name for name in files if trainers.find_owner_rank_of_file(name) is None]
    for siblings in (sorted(names), [folder.name for folder in below]):
        rank_names = next(
            (rank_set for name in siblings if len(rank_set := names_differing_in_rank(name, siblings)) > 1), []
        )
        if rank_names:
            return not_joined_error(rank_names, path)
    deeper = (find_rank_files_error(folder, depth - 1) for folder in below) if depth else iter(())
    return next(filter(None, deeper), None)


def find_unsupported_files(path: Path) -> Unread | None:
    """Return the description of files of a trainer or program that ckptkit cannot read; None without any."""
    files = [file for file in (list_children(path) if path.is_dir() else [path]) if file.is_file()]
    foreign = (
        unread
        for file in files
        if (unread := trainers.find_foreign_program_file(file.name)) and not is_torch_save(file)
    )
    return find_unread_files_among(path, file_names_in_component(path)) or next(foreign, None)


def file_names_in_component(path: Path) -> Iterator[str]:
    """Return the names in a directory and in its inner directories; the name of a file for a file."""
    if not path.is_dir():
        return iter([path.name])
    return (name for place in (path, *directories_without_step(path)) for name in names_in(place))


def ranks_with_files_at(path: Path) -> Iterator[Hashable]:
    """Yield the ranks that have files of their own at a directory or file, by names of its format or of trainers."""
    names = names_in(path) if path.is_dir() else [path.name]
    reader = detect_format(path) if path.is_dir() else None
    if reader and (ranks := reader.ranks_in(names)):
        yield from ranks
        return
    for name in names:
        rank = trainers.find_number_in(name, "ranks")
        rank = trainers.find_owner_rank_of_file(name) if rank is None else rank
        if rank is not None:
            yield rank


def is_hidden_file_not_copied(name: str, beside: Iterable[str]) -> bool:
    """Return whether a hidden file is not copied, because neither a format nor a trainer needs it."""
    is_needed = (
        trainers.is_copied_unchanged(name, beside)
        or has_known_file_name([name])
        or trainers.find_unreadable_file([name]) is not None
    )
    return name.startswith(".") and not (is_needed or name in trainers.companion_directories())


def describe_not_copied(files: Iterable[LeftBehind], verb: str) -> list[str]:
    """Return one line for each reason: the verb, the first names, and the reason."""
    names: dict[str, dict[str, None]] = {}
    for left in files:
        names.setdefault(left.why, {})[left.name] = None  # several sources may have the same file: list it once
    return [f"{verb}: {names_and_more([*names_left], 6)} ({why})" for why, names_left in names.items()]


def unused_files(
    root: Path, used: frozenset[Path], components: set[Path], directory: Path | None = None
) -> Iterator[LeftBehind]:
    """Yield the unused files of directory `root`, or of `directory` in it; `components` have the training state."""
    paths = list_children(directory or root)
    names = {path.name for path in paths}
    for path in paths:
        if path in used or is_manifest_or_marker(path.name):
            continue
        name = str(path.relative_to(root))
        step = find_step_of_path(path)
        is_unused = not any(path in used_path.parents for used_path in used)
        is_folder = path.is_dir() and not path.is_symlink()
        if path.name in trainers.module_change_directories() and is_unused:
            yield LeftBehind(path, CHANGES, name)
        elif path in components and path.is_dir() and is_unused:
            yield LeftBehind(path, TRAINING if trainers.is_non_model_component_name(path.name) else WEIGHTS, name)
        elif trainers.is_copied_unchanged(path.name, names) and is_unused:
            yield LeftBehind(path, TRAINING, name)
        elif (
            is_unused
            and is_folder
            and step is None
            and any(find_step_of_path(inner) is not None for inner in list_directories(path))
        ):
            yield LeftBehind(path, RUN, name)
        elif (
            is_folder
            and not is_hidden_file_not_copied(path.name, names)
            and (step is None or path in components or not is_unused)
        ):
            yield from unused_files(root, used, components, path)
        else:
            why = TRAINING if directory in components else reason_not_copied(path, names)
            is_copy = directory is not None and directory.name in trainers.companion_directories()
            yield LeftBehind(path, EXPORTED if is_copy and why in (WEIGHTS, PERHAPS_WEIGHTS, NOT_KNOWN) else why, name)


def is_manifest_or_marker(name: str) -> bool:
    """Return whether a file of this name describes only the save it belongs to, so that no copy may have it."""
    return name == MANIFEST or trainers.is_commit_marker(name)


def reason_not_copied(path: Path, beside: Iterable[str]) -> str:
    """Return the description of an unused file or directory, by its name."""
    if is_link_outside_cache(path) or not (path.is_file() or path.is_dir()):
        return LINK
    if is_hidden_file_not_copied(path.name, beside):
        return HIDDEN
    if path.is_dir():
        return CHECKPOINT
    for why, is_one in _REASON_BY_NAME.items():
        if is_one(path.name):
            return why
    if has_known_file_name([path.name]):
        return WEIGHTS
    return PERHAPS_WEIGHTS if path.suffix in ONE_FILE else NOT_KNOWN

"""Find the components of a checkpoint: model and optimizer apart, or the rest of a training beside a model.

Looks at names, and at the formats that they call for. Says of what else lies there what it seems to be.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from ckptkit import trainers
from ckptkit.checkpoints.component import MODEL, Component
from ckptkit.checkpoints.evidence import read_object
from ckptkit.checkpoints.manifest import NAME as MANIFEST
from ckptkit.errors import Unsupported, and_more
from ckptkit.formats import FormatReader, detect_format, is_known_file, is_known_inside, is_stray
from ckptkit.formats.archives.state_files import is_torch_save
from ckptkit.formats.rank_names import find_set, not_joined
from ckptkit.io.file import children, folders, names_in
from ckptkit.io.local import is_strange_link
from ckptkit.models.companions import FILES
from ckptkit.models.names.weights import TRAINING
from ckptkit.trainers import ONE_FILE, may_be_step_name, stem_of, step_of
from ckptkit.trainers.trainer import Unread

OF_TRAINING = (".pt", ".pth", ".bin")  # files of optimizers, schedulers and random states
LINK = "not a regular file"
HIDDEN = "hidden"
CHECKPOINT = "a checkpoint of its own"
RUN = "a run with checkpoints of its own"
WEIGHTS = "weights of another model, or of an earlier save"
NOT_KNOWN = "not known"
EARLIER = "the manifest of an earlier save"
COMPANION = "config or tokenizer"
EXPORTED = "exported by the trainer, beside its own states"
CHANGES = "how the model was changed, such as by quantizers or pruning"
LOST = (WEIGHTS, CHANGES)  # what an output may lack
DESCRIPTION = "describes these weights only"
_BY_NAME = {  # what files of known names are
    TRAINING: trainers.is_training_state,
    COMPANION: FILES.__contains__,
    DESCRIPTION: trainers.is_description,
}


class LeftBehind(NamedTuple):
    """A file of a source that is neither read nor taken along, or a directory of such files, and why."""

    path: Path
    why: str
    name: str  # as seen from the directory of the checkpoint

    @property
    def root(self) -> Path:
        """Return the directory of the checkpoint."""
        return self.path.parents[len(Path(self.name).parts) - 1]

    @property
    def is_known(self) -> bool:
        """Return whether a rule says that it may stay behind."""
        return self.why not in (*LOST, NOT_KNOWN)


def is_run(path: Path) -> bool:
    """Return whether a directory, of no step itself, is a run although there is a file in it that could be a model.

    Its checkpoints are files named by their steps, or a file or link is their last one or says which is meant. With a
    file in it that a format knows, by its name or by what is in it, it is a checkpoint, whatever else lies there.
    """
    if not path.is_dir() or step_of(path) is not None:
        return False
    names = [name for name in names_in(path) if not trainers.is_beside_file(name)]
    has_steps = any(name.endswith(ONE_FILE) and step_of(Path(stem_of(name))) is not None for name in names)
    is_tracked = any(map(may_be_step_name, names)) and any(
        trainers.is_tracker(name) or trainers.is_last(name) or (path / name).is_symlink() for name in names
    )
    return (has_steps or is_tracked) and not (is_known_file(names) or is_known_inside(path))


def complete_folders(path: Path) -> tuple[Component, ...] | None:
    """Return the directories in a checkpoint's that hold all of it, but for what lies beside them; None without any.

    The step in the name of the directory that they lie in tells them from the checkpoints of a run. A directory only
    has all if no other one beside it has shards: else each has a part, whatever it is called.
    """
    if step_of(path) is None or not path.is_dir():
        return None
    there = folders(path)
    wholes = [folder for folder in there if trainers.is_whole(folder.name)]
    inner = only_step(path, there)
    if inner is not None and not wholes and detect_format(path) is None:
        wholes = [inner]
    found = [(folder, reader) for folder in wholes if (reader := detect_format(folder)) and reader.is_sharded]
    if not found or any(has_shards(folder) for folder in inner_folders(path) if folder not in wholes):
        return None
    return tuple(Component(folder.name, folder, reader, has_all=True) for folder, reader in found)


def has_shards(folder: Path) -> bool:
    """Return whether a checkpoint of several ranks is in a directory."""
    reader = detect_format(folder)
    return reader is not None and reader.is_sharded


def only_step(path: Path, there: Iterable[Path]) -> Path | None:
    """Return the one of what is `there` in a checkpoint's directory that is named like a step, if it is of this step.

    Trainers that save by another have `checkpoint-500/iter_0000500`, and may put weights of the Hub's format beside it.
    """
    step = step_of(path)
    named = [place for place in there if step_of(place) is not None] if step is not None else []
    return named[0] if len(named) == 1 and step_of(named[0]) == step else None


def components_in(folder: Path) -> list[Component]:
    """Return the components of a checkpoint in a directory of it.

    That is the directory, or the only file of an optimizer, or each of several files of states, which no index joins.
    """
    reader = detect_format(folder)
    if reader is not None:
        states = states_in(folder, reader)
        return states if len(states) > 1 else [Component(folder.name, folder, reader)]
    names = names_in(folder) if trainers.is_other_part(folder.name) else []
    only = folder / next(iter(names)) if len(names) == 1 else None
    reader = detect_format(only) if only is not None and only.suffix in OF_TRAINING and only.is_file() else None
    return [Component(folder.name, only, reader)] if only is not None and reader is not None else []


def states_in(folder: Path, reader: FormatReader) -> list[Component]:
    """Return the files in a directory that are entries of a checkpoint, under their own names; [] for a model."""
    is_of_training = any(map(trainers.is_training_state, names_in(folder)))
    if reader.is_sharded or not is_of_training or not is_stray(folder, reader):
        return []
    files = [path for path in children(folder) if path.suffix in ONE_FILE and path.is_file() and reader.detect(path)]
    return [Component(f"{folder.name}/{file.name}", file, reader, under=file.stem) for file in files]


def components_inside(path: Path) -> tuple[Component, ...]:
    """Return the components in the directories of a checkpoint, the model first."""
    found = [component for folder in inner_folders(path) for component in components_in(folder)]
    if all(component.under is not None for component in found):
        return ()  # states without anything that they are beside
    return tuple(sorted(found, key=lambda component: not component.is_model))


def models_of(components: Iterable[Component]) -> list[Component]:
    """Return the components that may be the model: by their names and, if these leave several, by their tensors."""
    named = [component for component in components if component.is_model]
    if len(named) < 2:
        return named
    return [component for component in named if component.may_have_weights] or named


def is_stray_file(path: Path, reader: FormatReader) -> bool:
    """Return whether the files that a format claims are strays beside directories with the model of a training."""
    if not is_stray(path, reader) or not any(is_component_name(folder.name) for folder in folders(path)):
        return False
    return any(component.is_model for component in components_inside(path))


def is_component_name(name: str) -> bool:
    """Return whether trainers give this name to a directory with a component of a checkpoint, and no other."""
    return name == MODEL or trainers.is_other_part(name)


def components_beside(path: Path) -> dict[Path, Component | None]:
    """Return what lies beside a model and belongs to it, by where: None for what no format claims.

    That lies in the model's directory, or is of the same step as a model that is a file.
    """
    step = None if path.is_dir() else step_of(Path(stem_of(path.name)))
    if not path.is_dir() and step is None:
        return {}
    folder = path if path.is_dir() else path.parent
    found: dict[Path, Component | None] = {}
    names = sorted(names_in(folder))
    for name in names:
        place, key = folder / name, trainers.key_beside(name, step, names)
        if place.is_file() if key is not None else step is None and trainers.is_beside_model(name) and place.is_dir():
            reader = detect_format(place)
            found[place] = Component(name, place, reader, key) if reader else None
    return found


def inner_folders(path: Path) -> list[Path]:
    """Return the directories in a directory that are no checkpoints of their own by their names; [] for a file."""
    if not path.is_dir():
        return []
    names = names_in(path)
    return [folder for folder in folders(path) if step_of(folder) is None and not trainers.is_kept(folder.name, names)]


def is_unread(path: Path, reader: FormatReader | None) -> bool:
    """Return whether a trainer's files that no format here puts together lie at a path.

    `reader` is the format that would claim it: if it knows a file there by its name, and no trainer has that name for
    what cannot be read, it reads that, whatever else lies there.
    """
    names = names_in(path) if path.is_dir() else [path.name]
    owned = [name for name in names if reader is not None and reader.owns(name)]
    if not path.is_dir() and reader is not None and not owned:
        return False  # a file of torch.save that was asked for
    if any(unread_at(path, [name]) is None for name in owned):
        return False
    return unread_at(path, names_near(path)) is not None


def unread_at(path: Path, names: Iterable[str]) -> Unread | None:
    """Return what files of these names at a path are, if some trainer's that ckptkit does not read is among them."""
    found = trainers.find_unread(names)
    if found is None or found.json is None:
        return found
    file, key = found.json
    places = [path, *inner_folders(path)] if path.is_dir() else [path.parent]
    files = (place / file for place in places)
    return found if any(one.is_file() and key in read_object(one) for one in files) else None


def files_of_ranks(path: Path, depth: int = 4) -> Unsupported | None:
    """Return the error for the files or directories of several ranks that lie anywhere in a directory; None if none do.

    `depth` is how many levels of directories to look through: fairseq2 has `model/pp_00/tp_00/sdp_00.pt`.
    """
    below = inner_folders(path)
    files = [file.name for file in children(path) if file.suffix in ONE_FILE and file not in below]
    names = [name for name in files if trainers.owner_of_file(name) is None]
    for there in (sorted(names), [folder.name for folder in below]):
        found = next((like for name in there if len(like := find_set(name, there)) > 1), [])
        if found:
            return not_joined(found, path)
    deeper = (files_of_ranks(folder, depth - 1) for folder in below) if depth else iter(())
    return next(filter(None, deeper), None)


def find_unread(path: Path) -> Unread | None:
    """Return what lies at a path without a checkpoint, if files of others do: a trainer's, or another program's."""
    files = [file for file in (children(path) if path.is_dir() else [path]) if file.is_file()]
    foreign = (found for file in files if (found := trainers.find_foreign([file.name])) and not is_torch_save(file))
    return unread_at(path, names_near(path)) or next(foreign, None)


def names_near(path: Path) -> Iterator[str]:
    """Return the names in a directory, and in its directories that are no checkpoints of their own; that of a file."""
    if not path.is_dir():
        return iter([path.name])
    return (name for place in (path, *inner_folders(path)) for name in names_in(place))


def ranks_in(place: Path) -> Iterator[Hashable]:
    """Return the ranks that have files of their own in a directory, by the names of these."""
    names, reader = names_in(place), detect_format(place)
    if reader and (ranks := reader.ranks_in(names)):
        yield from ranks
    else:
        yield from ranks_of(names)


def ranks_of(names: Iterable[str]) -> Iterator[int]:
    """Return the ranks that are told by the names of files of trainers."""
    for name in names:
        rank, owner = trainers.rank_in(name), trainers.owner_of_file(name)
        if rank is not None or owner is not None:
            yield rank if rank is not None else owner or 0


def is_left(name: str, beside: Iterable[str]) -> bool:
    """Return whether a hidden file stays behind: neither a format nor a trainer needs it to read what lies beside."""
    is_needed = trainers.is_kept(name, beside) or is_known_file([name]) or trainers.find_unread([name]) is not None
    return name.startswith(".") and not (is_needed or name in trainers.companion_folders())


def describe_left(found: Iterable[LeftBehind], verb: str) -> list[str]:
    """Return a line for each reason: the verb, the first names, and the reason."""
    names: dict[str, dict[str, None]] = {}
    for left in found:
        names.setdefault(left.why, {})[left.name] = None  # once, where several sources have it
    return [f"{verb}: {', '.join(list(some)[:6])}{and_more(len(some) - 6)} ({why})" for why, some in names.items()]


def left_in(
    root: Path, used: frozenset[Path], components: set[Path], folder: Path | None = None
) -> Iterator[LeftBehind]:
    """Yield what of directory `root` is not `used`, or of a folder in it; in `components` is state of the training."""
    there = children(folder or root)
    names = {path.name for path in there}
    for path in there:
        if path in used or is_save_marker(path.name):
            continue
        name = str(path.relative_to(root))
        is_other = step_of(path) is not None and path not in components
        if trainers.is_change(path.name) and not any(path in one.parents for one in used):
            yield LeftBehind(path, CHANGES, name)
        elif path in components and path.is_dir() and not any(path in one.parents for one in used):
            yield LeftBehind(path, TRAINING if trainers.is_other_part(path.name) else WEIGHTS, name)
        elif step_of(path) is None and holds_steps(path) and not any(path in one.parents for one in used):
            yield LeftBehind(path, RUN, name)
        elif path.is_dir() and not path.is_symlink() and not is_left(path.name, names) and not is_other:
            yield from left_in(root, used, components, path)
        else:
            why = TRAINING if folder in components else reason_to_leave(path, names)
            is_copy = folder is not None and folder.name in trainers.companion_folders()
            yield LeftBehind(path, EXPORTED if is_copy and why in (WEIGHTS, NOT_KNOWN) else why, name)


def holds_steps(path: Path) -> bool:
    """Return whether directories that are called like checkpoints lie in a directory."""
    return path.is_dir() and not path.is_symlink() and any(step_of(child) is not None for child in folders(path))


def is_save_marker(name: str) -> bool:
    """Return whether a file of this name describes the save that it is in, and no copy or conversion of that."""
    return name == MANIFEST or trainers.is_commit(name)


def reason_to_leave(path: Path, beside: Iterable[str]) -> str:
    """Return what a file or directory that is not used seems to be, by its name."""
    if is_strange_link(path) or not (path.is_file() or path.is_dir()):
        return LINK
    if is_left(path.name, beside):
        return HIDDEN
    if path.is_dir():
        return CHECKPOINT
    for why, is_one in _BY_NAME.items():
        if is_one(path.name):
            return why
    return WEIGHTS if path.suffix in ONE_FILE or is_known_file([path.name]) else NOT_KNOWN

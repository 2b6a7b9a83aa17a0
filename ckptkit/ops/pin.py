"""Pin checkpoints, so that nothing deletes or demotes them whatever the rules say, and unpin them."""

from __future__ import annotations

from pathlib import Path

from ckptkit.checkpoints.checkpoint import Checkpoint, Source, local_path_of
from ckptkit.errors import NotACheckpoint, Usage
from ckptkit.files.file import absent
from ckptkit.runs.deletion import deleting
from ckptkit.runs.pins import clear_pin, is_pinned, set_pin
from ckptkit.trainers import step_of

_PATIENCE = 10.0  # seconds that a pin waits for others to end deleting


def pin(*checkpoints: Source) -> list[Path]:
    """Pin checkpoints, a run meaning its latest: neither `prune` nor a training deletes them. Gives what was pinned.

    Raises `NotACheckpoint`, with nothing pinned, if one is no complete checkpoint; `Occupied` while another process is
    deleting checkpoints of the run.
    """
    chosen = list(dict.fromkeys(choose(local_path_of(checkpoint)) for checkpoint in checkpoints))
    for path in chosen:
        with deleting(path.parent, patience=_PATIENCE):  # else it could be deleted between a look at it and the pin
            require_complete(path)
            set_pin(path)
    return chosen


def unpin(*checkpoints: Source) -> list[Path]:
    """Take back the pins of checkpoints, which may be gone by now. Gives those that were pinned.

    Raises `NotACheckpoint`, with nothing changed, if one is neither pinned nor a complete checkpoint.
    """
    chosen = list(dict.fromkeys(local_path_of(checkpoint).resolve() for checkpoint in checkpoints))
    pinned = [path for path in chosen if is_pinned(path)]
    for path in chosen:
        if path not in pinned:
            require_complete(path)
    for path in pinned:
        clear_pin(path)
    return pinned


def choose(path: Path) -> Path:
    """Return the checkpoint that a user means, where it really lies. Raises `NotACheckpoint` if it is not complete."""
    if not path.exists():
        raise absent(path)
    found = Checkpoint.open(path).path.resolve()
    if step_of(found) is None and step_of(found.parent) is not None:
        raise Usage("this is a part of a checkpoint", path=path, hint=f"pin all of it: {found.parent}")
    require_complete(found)
    return found


def require_complete(path: Path) -> None:
    """Raise `NotACheckpoint` if a path is no complete checkpoint."""
    if not (path.is_dir() and Checkpoint.at(path).is_complete):
        hint = f"`ckptkit verify {path}` says what is wrong with it; `ckptkit ls {path.parent}` lists the others"
        raise NotACheckpoint("no complete checkpoint", path=path, hint=hint)

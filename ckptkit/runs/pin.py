"""Pin checkpoints, so that nothing deletes or demotes them whatever the rules say, and unpin them."""

from __future__ import annotations

from pathlib import Path

from ckptkit.checkpoints.checkpoint import Checkpoint, Source
from ckptkit.checks.verify import require_sound, verify_part
from ckptkit.errors import Usage
from ckptkit.io.file import absent
from ckptkit.runs.keeper import keeper_of, require_complete, run_of
from ckptkit.runs.pins import is_pinned
from ckptkit.trainers import step_of


def pin(*checkpoints: Source) -> list[Path]:
    """Pin checkpoints, so that neither `prune` nor a training deletes them; return the pinned ones.

    Of a run, pins the latest. A run is local or on S3; of a checkpoint on several disks, pins the first directory.
    Raises `NotACheckpoint` if one is not a complete checkpoint, `Corrupt` if `verify --fast` finds a problem in one,
    such as a missing shard, both with nothing pinned; `Occupied` while another process is deleting checkpoints of the
    run.
    """
    chosen = list(dict.fromkeys(choose(run_of(checkpoint)) for checkpoint in checkpoints))
    for path in chosen:
        keeper_of(path.parent).pin(path)
    return chosen


def unpin(*checkpoints: Source) -> list[Path]:
    """Remove the pins of checkpoints, which need not exist any more; return the ones that were pinned.

    Raises `NotACheckpoint`, with nothing changed, if one is neither pinned nor a complete checkpoint.
    """
    chosen = list(dict.fromkeys(run_of(checkpoint).resolve() for checkpoint in checkpoints))
    for path in chosen:
        keeper_of(path.parent).refresh()
    pinned = [path for path in chosen if is_pinned(path)]
    for path in chosen:
        if path not in pinned:
            require_complete(path)
    for path in pinned:
        keeper_of(path.parent).unpin(path)
    return pinned


def choose(path: Path) -> Path:
    """Return the checkpoint that a user means, where it really lies.

    Raises `NotACheckpoint` if it is not complete, `Corrupt` if files of it are missing or too short.
    """
    keeper_of(path).refresh()
    if not path.exists():
        raise absent(path)
    checkpoint = Checkpoint.open(path)
    found = checkpoint.path.resolve()
    if step_of(found) is None and step_of(found.parent) is not None:
        raise Usage("this is a part of a checkpoint", path=path, hint=f"pin the whole checkpoint: {found.parent}")
    require_complete(found)
    for place in checkpoint.places:
        require_sound(verify_part(place, fast=True), f"pin another checkpoint, or run `ckptkit verify {found}`")
    return found

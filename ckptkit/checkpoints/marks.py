"""Find the files of a checkpoint that come last where files appear one by one: its marks. Opens no file."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import PurePath
from typing import NamedTuple

from ckptkit.checkpoints.manifest import NAME as MANIFEST
from ckptkit.models.companions import CONFIG


class PlacedFiles(NamedTuple):
    """The files of one part of a checkpoint, in directory `place` of the whole, and those of them that describe it."""

    place: str
    files: Collection[str]
    descriptions: Collection[str]


def find_marks(parts: Iterable[PlacedFiles], names: Collection[str], *, is_for_loaders: bool) -> tuple[str, ...]:
    """Return the files without which nobody takes the others for a checkpoint, in the order in which they come last.

    `parts` begin with the model. The manifests among all `names` come first; then of each part the files that describe
    it, or the last of its files if none does, those of the model after the others. config.json is the last one in a
    Hugging Face model, which `is_for_loaders`; elsewhere it comes with the manifests.
    """
    manifests = [name for name in sorted(names) if PurePath(name).name == MANIFEST]
    described = []
    for place, files, descriptions in reversed(list(parts)):
        last = [name for name in sorted(files) if name in descriptions] or sorted(files)[-1:]
        described += [str(PurePath(place, name)) for name in last]
    config = [CONFIG] if CONFIG in names else []
    marks = [*manifests, *described, *config] if is_for_loaders else [*manifests, *config, *described]
    return tuple(dict.fromkeys(marks))

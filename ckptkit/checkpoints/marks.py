"""Find the files of a checkpoint that come last where files appear one by one: its marks."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import PurePath
from typing import NamedTuple

from ckptkit.checkpoints.manifest import NAME as MANIFEST
from ckptkit.models.companions import CONFIG


class PlacedFiles(NamedTuple):
    """The files of one component of a checkpoint, in directory `place` of it, and those that describe the component."""

    place: str
    files: Collection[str]
    descriptions: Collection[str]


def find_marks(components: Iterable[PlacedFiles], names: Collection[str], *, is_for_loaders: bool) -> tuple[str, ...]:
    """Return the files without which nobody takes the others for a checkpoint, in the order in which they come last.

    `components` begin with the model. The manifests among all `names` come first. Then come the files that describe
    each component, or its last file if none does; those of the model come after the others. config.json is last in a
    Hugging Face model, which `is_for_loaders`; elsewhere it comes with the manifests.
    """
    manifests = [name for name in sorted(names) if PurePath(name).name == MANIFEST]
    described = []
    for place, files, descriptions in reversed(list(components)):
        last = [name for name in sorted(files) if name in descriptions] or sorted(files)[-1:]
        described += [str(PurePath(place, name)) for name in last]
    config = [CONFIG] if CONFIG in names else []
    marks = [*manifests, *described, *config] if is_for_loaders else [*manifests, *config, *described]
    return tuple(dict.fromkeys(marks))

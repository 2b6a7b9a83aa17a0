"""Find the marker files of a checkpoint: the files that must be written last if files become visible one by one."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import PurePath
from typing import NamedTuple

from ckptkit.checkpoints.manifest import NAME as MANIFEST
from ckptkit.models.companions import CONFIG


class PlacedFiles(NamedTuple):
    """The files of one component, in directory `place` of the checkpoint, and the files that describe the component."""

    place: str
    files: Collection[str]
    descriptions: Collection[str]


def files_to_end_with(
    components: Iterable[PlacedFiles], names: Collection[str], *, is_for_loaders: bool
) -> tuple[str, ...]:
    """Return the files without which no reader takes the rest for a checkpoint, in the order to write them.

    `components` begin with the model. The manifests among all `names` come first. Then, for each component, the files
    that describe it (or else its last file), the model's component last. config.json is last in a Hugging Face model
    (`is_for_loaders`); otherwise it comes with the manifests.
    """
    manifests = [name for name in sorted(names) if PurePath(name).name == MANIFEST]
    described = []
    for directory, files, descriptions in reversed(list(components)):
        last = [name for name in sorted(files) if name in descriptions] or sorted(files)[-1:]
        described += [str(PurePath(directory, name)) for name in last]
    config = [CONFIG] if CONFIG in names else []
    marks = [*manifests, *described, *config] if is_for_loaders else [*manifests, *config, *described]
    return tuple(dict.fromkeys(marks))

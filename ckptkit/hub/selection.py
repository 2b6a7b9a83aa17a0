"""Select the files of a checkpoint to push, with a reason for each file that is not pushed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

from ckptkit.checkpoints.checkpoint import Checkpoint, Source
from ckptkit.checkpoints.manifest import NAME as MANIFEST
from ckptkit.checkpoints.manifest import Manifest, read_manifest
from ckptkit.checks.inspect import inspect
from ckptkit.checks.own_files import OwnFiles
from ckptkit.errors import Usage
from ckptkit.formats import FormatReader
from ckptkit.hub.model_card import NAME as CARD
from ckptkit.hub.model_card import make_card
from ckptkit.hub.transfers import Content, size_of
from ckptkit.io.file import children
from ckptkit.io.local import is_strange_link
from ckptkit.layout import Layout
from ckptkit.models.companions import read_companions
from ckptkit.trainers.ckptkit import TRAINING

_OF_TRAINING = (
    *("optimizer*", "optim.*", "scheduler.*", "scheduler_*.bin", "scaler.*", "sampler*.bin", "dl_state_dict*"),
    *("rng_state*", "random_states*", "trainer_state.json", "training_args.bin", "custom_checkpoint_*"),
)
_TEMPORARY = ("*.tmp", "*.lock", "*.part", "*.incomplete", "*~", "*.swp")


@dataclass(frozen=True, slots=True)
class Selection:
    """The files of the checkpoint at `root` to push, by name on the Hub, and the reasons why others are `left_out`.

    `has_card` means that ckptkit wrote the model card.
    """

    root: Path
    reader: FormatReader
    layout: Layout
    contents: Mapping[str, Content]
    left_out: Mapping[str, str]
    has_card: bool = False

    @property
    def sizes(self) -> dict[str, int]:
        """Return the size of each file in bytes."""
        return {name: size_of(content) for name, content in self.contents.items()}

    def without_card(self) -> Selection:
        """Return the selection without a model card, for a repository that already has one."""
        contents = {name: content for name, content in self.contents.items() if name != CARD}
        kept = {} if self.has_card else {CARD: "the Hub keeps its model card"}
        return replace(self, contents=contents, left_out={**self.left_out, **kept})


def select_files(source: Source, repo_id: str) -> Selection:
    """Return the files to push of the checkpoint at `source`, or of a run's latest: those of its model component.

    Raises `Usage` if the model is a single file.
    """
    checkpoint = Checkpoint.open(source)
    root, reader = checkpoint.model_component.path, checkpoint.model_component.reader
    if not root.is_dir():
        hint = "pass the directory that the file is in, or an output of `ckptkit consolidate`"
        raise Usage("only directories are pushed", path=root, hint=hint)
    layout, manifest = reader.read(root), read_manifest(root)
    needed = OwnFiles(reader, root, layout, manifest).needed
    contents: dict[str, Content] = {}
    left_out = left_beside(root, checkpoint.path)
    for child in children(root):
        reason = None if child.name in needed else reason_to_stay(child)
        if reason is None:
            contents[child.name] = child
        else:
            left_out[child.name] = reason
    if manifest is not None:
        contents[MANIFEST] = without_paths(manifest).to_bytes()
    has_card = CARD not in contents
    if has_card:
        companions = read_companions(root)
        config = companions.config if companions else None
        contents[CARD] = make_card(repo_id, inspect(root), names=contents, config=config, manifest=manifest)
    return Selection(root, reader, layout, contents, left_out, has_card)


def left_beside(root: Path, whole: Path) -> dict[str, str]:
    """Return the entries next to the model component in directory `whole`, with reasons why they are not pushed."""
    beside = [] if root == whole else [child for child in children(whole) if child != root]
    return {child.name: reason_to_stay(child) or "not the model's" for child in beside}


def reason_to_stay(path: Path) -> str | None:
    """Return the reason why a file that the checkpoint does not need is not pushed, None if it is pushed."""
    if is_strange_link(path):
        return "a link"
    if path.name == TRAINING or any(fnmatchcase(path.name, pattern) for pattern in _OF_TRAINING):
        return "state of training"
    if path.name.startswith("."):
        return "hidden"
    if any(fnmatchcase(path.name, pattern) for pattern in _TEMPORARY):
        return "temporary"
    return None if path.is_file() else "a directory"


def without_paths(manifest: Manifest) -> Manifest:
    """Return the manifest with only the name of its source, not the path on this machine."""
    if manifest.source is None or "path" not in manifest.source:
        return manifest
    return replace(manifest, source={**manifest.source, "path": Path(manifest.source["path"]).name})

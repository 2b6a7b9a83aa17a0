"""Read several files of torch.save by their index: a model, or an optimizer with parameter indices.

Source: transformers' `save_pretrained(safe_serialization=False)`, `pytorch_model.bin.index.json`; and for optimizers
colossalai/checkpoint_io/general_checkpoint_io.py, `pytorch_optim.bin.index.json`, whose metadata names a file with the
parameter groups.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ckptkit.errors import ELSEWHERE, CkptError, Corrupt, Incomplete, Report, Unsupported, errors_at, raise_problem
from ckptkit.formats.archives.flatten import FlatState, Flattening
from ckptkit.formats.archives.torch_save import archive_extents_of, entry_locations_in_file, read_state_file
from ckptkit.formats.index_file import read_index
from ckptkit.formats.protocols import FormatReader
from ckptkit.io.file import is_existing_path, names_in, require_plain_file_name
from ckptkit.layout import Extent, KeyPath, Layout

_INDEX = re.compile(r".*\.(?:bin|pt|pth)\.index\.json")
_NUMBERED = re.compile(r"(.*)-[0-9]{5}-of-[0-9]{5}\.(bin|pt|pth)")
_SHARD = re.compile(r"pytorch_(?:model|optim)-[0-9]{5}\.bin")
_GROUPS = "param_groups"  # in the metadata of an optimizer's index, and in its state
_OPTIMIZER = "optimizer"


@dataclass(frozen=True, slots=True)
class Index:
    """An index in directory `root`: the file of each name, and the file of an optimizer's groups, None for a model."""

    root: Path
    name: str
    places: dict[str, str]
    groups: str | None

    @property
    def files(self) -> list[str]:
        return [*sorted(set(self.places.values())), *([self.groups] if self.groups else [])]


class PtShards(FormatReader):
    """The format of a directory with an index of torch.save files."""

    name = "pt_shards"
    known_by = "`*.bin.index.json`"

    def owns_file(self, name: str) -> bool:
        return any(pattern.fullmatch(name) for pattern in (_INDEX, _NUMBERED, _SHARD))

    def detect(self, path: Path) -> bool:
        """Return True for a directory with an index, or with files that are numbered like indexed ones."""
        return path.is_dir() and any(_INDEX.fullmatch(name) or _NUMBERED.fullmatch(name) for name in names_in(path))

    def check_files_complete(self, path: Path, report: Report) -> None:
        """Report each file that the index names and that is missing or truncated."""
        index = read_directory_index(path)
        for name in index.files:
            try:
                require_file(index, name)
                entry_locations_in_file(path / name)
            except CkptError as error:
                report(error)

    def read(self, path: Path, report: Report = raise_problem) -> Layout:
        """Return the layout of a model, or of an optimizer under `optimizer`. Reports files and names amiss."""
        index = read_directory_index(path)
        whole = FlatState()
        unread: list[str] = []
        for file in index.files:
            try:
                require_file(index, file)
                add_file_contents(whole, index, file, report)
            except CkptError as error:
                report(error)
                unread.append(file)
        described = (index.name, *(file for file in index.files if file not in unread))
        above = "" if index.groups is None else f"{_OPTIMIZER}.state."
        absent = {f"{above}{name}": file for name, file in index.places.items() if file in unread}
        return Layout(path, self.name, whole.tensors, whole.blobs, whole.keys, descriptions=described, absent=absent)

    def checksummed_extents(self, layout: Layout, report: Report = raise_problem) -> Iterator[Extent]:
        return archive_extents_of(layout, layout.descriptions[1:], report)


def read_directory_index(path: Path) -> Index:
    """Return the index in a directory, or the model's if there are several. Raises `Unsupported` for several models."""
    names = sorted(filter(_INDEX.fullmatch, names_in(path)))
    numbered = next(filter(None, map(_NUMBERED.fullmatch, sorted(names_in(path)))), None)
    if not names and numbered:
        wanted = f"`{numbered[1]}.{numbered[2]}.index.json`, which lists the files beside `{numbered[0]}`"
        raise Incomplete(f"expected {wanted}; found none", path=path, hint=ELSEWHERE)
    models = [name for name in names if "optim" not in name]
    if len(models or names) != 1:
        message = f"expected one index of torch.save files, found {len(names)}: {', '.join(names[:4])}"
        raise Unsupported(message, path=path, hint="move each model's files to a directory of its own")
    name = (models or names)[0]
    places, metadata = read_index(path / name)
    if not places:
        raise Corrupt("the index lists no files", path=path / name)
    groups = metadata.get(_GROUPS)
    if groups is not None:
        if not isinstance(groups, str):
            raise Corrupt(f"`{_GROUPS}` in the metadata is not a file name", path=path / name)
        require_plain_file_name(groups, path)
    return Index(path, name, places, groups)


def add_file_contents(whole: FlatState, index: Index, file: str, report: Report) -> None:
    """Add the contents of one of the files. Reports names that differ from the index. Every error names the file."""
    above: KeyPath = () if index.groups is None else (_OPTIMIZER, _GROUPS if file == index.groups else "state")
    with errors_at(path=index.root / file):
        state = read_state_file(index.root, file)
        flattening = Flattening(state.entries, file)
        children = flattening.members(state.value)
        if file != index.groups:
            listed = {name for name, place in index.places.items() if place == file}
            in_file = {str(name) for name, _ in children}
            for name in sorted(listed - in_file):
                message = f"`{index.name}` lists the tensor in this file, but the file does not have it"
                report(Corrupt(message, path=index.root / file, tensor=name))
            for name in sorted(in_file - listed):
                message = f"the tensor is in the file, but `{index.name}` does not list it"
                report(Corrupt(message, path=index.root / file, tensor=name))
        flattening.add_children(children, above)
        duplicate = next((name for name in flattening.flat.keys if name in whole.keys), None)
        if duplicate is not None:
            raise Corrupt("another file contains the tensor too", tensor=duplicate)
    whole.update(flattening.flat)


def require_file(index: Index, name: str) -> None:
    if not is_existing_path(index.root / name):
        hint = "download the missing files again, to this directory"
        raise Incomplete(f"the file is missing, but `{index.name}` lists it", path=index.root / name, hint=hint)

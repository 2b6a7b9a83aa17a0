"""Parts: a checkpoint of several directories, such as model and optimizer apart, as one layout to look at."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Self

from ckptkit import edits
from ckptkit.checkpoints.runs import find_checkpoint, find_parts, find_whole
from ckptkit.errors import Corrupt, IOFailure, Unsafe, Unsupported
from ckptkit.formats import detect_format, open_layout
from ckptkit.layout import Blob, Layout, StoredTensor


@dataclass(frozen=True, slots=True)
class Parts:
    """The layouts of a checkpoint by the directory in `whole` that each is of; the first, of `path`, has the model.

    `names` are those of all entries in all parts, each with its part and the name that it has there: the same, unless
    an earlier part has that too.
    """

    whole: Path
    path: Path
    layouts: Mapping[str, Layout]
    names: Mapping[str, tuple[str, str]]

    @property
    def model(self) -> Layout:
        """The part with the model, or the only one."""
        return next(iter(self.layouts.values()))

    def select(self, keep: Callable[[str], bool]) -> Self:
        """The entries whose name `keep` accepts."""
        names = {name: found for name, found in self.names.items() if keep(name)}
        kept = set(names.values())
        layouts = {
            place: edits.select(layout, {own for at, own in kept if at == place}.__contains__)
            for place, layout in self.layouts.items()
        }
        return replace(self, layouts=layouts, names=names)

    def only(self, name: str) -> Self:
        """A single tensor."""
        place, own = self.names[name]
        layout = self.layouts[place]
        alone = replace(layout, tensors={own: layout.tensors[own]}, blobs={})
        return replace(self, layouts={place: alone}, names={name: (place, own)})

    def change(self, what: Callable[[Layout], Layout]) -> Self:
        """The same names, with something done to each layout."""
        return replace(self, layouts={place: what(layout) for place, layout in self.layouts.items()})

    def join(self) -> Layout:
        """All of it as one layout, in the format of the model."""
        if not any(self.layouts):  # all of it is one part
            return self.model
        tensors: dict[str, StoredTensor] = {}
        blobs: dict[str, Blob] = {}
        for name, (place, own) in self.names.items():
            layout = self.layouts[place]
            if own in layout.tensors:
                tensors[name] = move_tensor(layout.tensors[own], place)
            else:
                blobs[name] = move_blob(layout.blobs[own], place)
        return Layout(
            root=self.whole,
            format=self.model.format,
            tensors=tensors,
            blobs=blobs,
            keys={name: self.layouts[place].key(own) for name, (place, own) in self.names.items()},
            world_size=max((layout.world_size or 0 for layout in self.layouts.values()), default=0) or None,
            descriptions=tuple(
                move(path, place) for place, layout in self.layouts.items() for path in layout.descriptions
            ),
        )


def open_parts(path: Path, read: Callable[[Path], Layout] = open_layout, unread: list[str] | None = None) -> Parts:
    """All parts of the checkpoint at `path`, or of the latest of the run at `path`, by `read`.

    `unread` is told of parts beside the model's that cannot be read; without it that is an error.
    """
    whole = find_whole(path)
    model = find_checkpoint(whole)
    layouts = {place_of(model, whole): read(model)}
    for part in find_parts(whole) if whole.is_dir() else []:
        if part == model or detect_format(part) is None:  # somebody's own directory may be called `training`
            continue
        try:
            layouts[place_of(part, whole)] = read(part)
        except (Corrupt, IOFailure, Unsafe, Unsupported) as error:
            if unread is None:
                raise
            unread.append(f"{part.name}: {error.message}")
    return Parts(whole, model, layouts, dict(name_all(layouts)))


def place_of(part: Path, whole: Path) -> str:
    """The directory in a checkpoint that a part is, empty for all of it."""
    return "" if part == whole else part.name


def name_all(layouts: Mapping[str, Layout]) -> Iterator[tuple[str, tuple[str, str]]]:
    """A name for each entry of each part, with the part and the name that it has there."""
    given: set[str] = set()
    for place, layout in layouts.items():
        fresh = {own: f"{place}.{own}" if own in given else own for own in layout.names}
        given.update(fresh.values())
        yield from ((name, (place, own)) for own, name in fresh.items())


def move(path: str, place: str) -> str:
    """The path of a file in a part, as it is in the whole."""
    return str(PurePosixPath(place, path))


def move_tensor(tensor: StoredTensor, place: str) -> StoredTensor:
    """A tensor of a part, as it is in the whole."""
    return replace(tensor, chunks=tuple(replace(chunk, path=move(chunk.path, place)) for chunk in tensor.chunks))


def move_blob(blob: Blob, place: str) -> Blob:
    """An entry that is no tensor, as it is in the whole."""
    return replace(blob, path=move(blob.path, place))

"""Survey a layout for damage: files that are missing or cut short, envelopes that do not open, bytes that changed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from ckptkit.engine.damage import find_damage, nbytes_of, run_of
from ckptkit.errors import CkptError, Corrupt, IOFailure
from ckptkit.formats import locate, unpack
from ckptkit.io.file import file_size
from ckptkit.io.progress import Progress, telling
from ckptkit.layout import Blob, Chunk, Fault, Layout


@dataclass(slots=True)
class Survey:
    """The damage in a layout: chunks by the name of their tensor and their number in it, and entries by name."""

    chunks: dict[tuple[str, int], CkptError] = field(default_factory=dict)
    entries: dict[str, CkptError] = field(default_factory=dict)

    def explained(self, reported: Iterable[CkptError]) -> Survey:
        """Return the damage with the problems that were reported of files instead of those found by their sizes."""
        why = {error.path: error for error in reported}
        return replace(self, chunks={place: why.get(error.path, error) for place, error in self.chunks.items()})

    def mark(self, layout: Layout) -> Layout:
        """Return the layout with the damaged chunks lost, and without the damaged entries."""
        tensors = dict(layout.tensors)
        for name in {name for name, _ in self.chunks} & tensors.keys():
            chunks = list(tensors[name].chunks)
            for i, chunk in enumerate(chunks):
                error = self.chunks.get((name, i))
                chunks[i] = chunk if error is None else Chunk.lost(chunk.box, chunk.dtype, Fault.of(error))
            tensors[name] = replace(tensors[name], chunks=tuple(chunks))
        blobs = {name: blob for name, blob in layout.blobs.items() if name not in self.entries}
        return replace(layout, tensors=tensors, blobs=blobs)


def survey(layout: Layout, *, jobs: int | None = None, progress: Progress | None = None) -> Survey:
    """Find all damage in a layout: read every byte of its tensors once, except those of lost chunks."""
    found, located = look_inside(layout)
    sound = found.mark(located)
    damage = find_damage(sound, jobs=jobs, progress=telling(progress, nbytes_of(sound)))
    for name, i, chunk in numbered(sound) if damage else ():
        wrong = None if chunk.is_lost else damage.get(run_of(chunk))
        if wrong is not None:
            found.chunks[name, i] = wrong.blame(path=layout.root / chunk.path)
    return found


def look_at_structure(layout: Layout) -> Survey:
    """Return the chunks and entries whose files are missing or too short, or whose envelopes do not open."""
    return look_inside(layout)[0]


def look_inside(layout: Layout) -> tuple[Survey, Layout]:
    """Return the damage that shows without a look at the tensors' bytes, and the layout with these located."""
    found = look_at_sizes(layout)
    reported: list[CkptError] = []
    located = locate(unpack(found.mark(layout), reported.append), reported.append)
    told = {(error.tensor, error.offset): error for error in reversed(reported)}
    for name, error in ((name, error) for (name, _), error in told.items() if name in located.blobs):
        found.entries[str(name)] = error
    for name, i, chunk in numbered(located):
        if chunk.wrapper is not None:
            unknown = Corrupt("the item there cannot be read", path=layout.root / chunk.path)
            found.chunks[name, i] = told.get((name, chunk.offset), unknown)
    return found, located


def without_files(layout: Layout) -> Layout:
    """Return the layout with chunks without elements as zeros, since the files that they name may be missing."""

    def apart(chunk: Chunk) -> Chunk:
        return chunk if chunk.box.numel else Chunk.of_zeros(chunk.box, chunk.dtype)

    return replace(
        layout,
        tensors={
            name: replace(tensor, chunks=tuple(map(apart, tensor.chunks))) for name, tensor in layout.tensors.items()
        },
    )


def numbered(layout: Layout) -> list[tuple[str, int, Chunk]]:
    """Return every chunk that has bytes, with the name of its tensor and its number in it."""
    return [
        (name, i, chunk)
        for name, tensor in layout.tensors.items()
        for i, chunk in enumerate(tensor.chunks)
        if chunk.box.numel and not chunk.is_zeros
    ]


def look_at_sizes(layout: Layout) -> Survey:
    """Return the chunks and entries of missing files, and those behind the end of a file."""
    found, sizes = Survey(), dict[str, int | CkptError]()
    for name, i, chunk in numbered(layout):
        error = None if chunk.is_lost else problem_of(chunk, layout.root, sizes)
        if error is not None:
            found.chunks[name, i] = error
    for name, blob in layout.blobs.items():
        error = problem_of(blob, layout.root, sizes) if blob.content is None and blob.length else None
        if error is not None:
            found.entries[name] = error
    return found


def problem_of(place: Chunk | Blob, root: Path, sizes: dict[str, int | CkptError]) -> CkptError | None:
    """Return the error for a chunk or entry that does not lie inside its file; `sizes` are those that are known."""
    size = sizes.get(place.path)
    if size is None:
        try:
            size = file_size(root / place.path)
        except (Corrupt, IOFailure) as error:
            size = error.with_traceback(None)
        sizes[place.path] = size
    if isinstance(size, CkptError):
        return size
    if not place.is_in_file:
        return Corrupt("the file cannot be read", path=root / place.path)
    if place.offset + place.length <= size:
        return None
    return Corrupt(f"the file is truncated: it ends at byte {size}", path=root / place.path)

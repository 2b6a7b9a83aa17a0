"""One directory or file of a checkpoint, with its layout and manifest; join several to one layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path

from ckptkit.checkpoints.evidence import gather
from ckptkit.checkpoints.manifest import NAME as MANIFEST
from ckptkit.checkpoints.manifest import Manifest, lost_since, read_manifest
from ckptkit.checkpoints.optimizers.flat_parameters import unflatten_parameters
from ckptkit.errors import (
    CkptError,
    Corrupt,
    Incomplete,
    IOFailure,
    Report,
    Unsafe,
    Unsupported,
    refuse,
    translate_os_errors,
)
from ckptkit.formats import FormatReader
from ckptkit.io.crc32 import RESTORE, crc32, tell_damage
from ckptkit.io.file import names_in, read_small
from ckptkit.io.path import is_remote
from ckptkit.layout import Chunk, Layout, StoredTensor, edits
from ckptkit.layout.box import whole
from ckptkit.layout.wrappers import is_flat_name
from ckptkit.models.names.weights import may_have_weights
from ckptkit.trainers import is_exported, is_other_part, marker_of, step_of, step_of_place, unfinished_names, who_wrote

_LARGEST = 1 << 26  # bytes of a file that is read again to compare it with its manifest
_UNFINISHED = "wait for the save to end, or take another step"
MODEL = "model"  # the key of a model that has none of its own, and lies beside an optimizer


@dataclass(frozen=True)
class Component:
    """A directory or file of a checkpoint in one format. `place` is its name in the checkpoint, "" for all of it.

    With `under` it is a file beside the model's, and its entries belong under these keys, joined by dots; under none if
    that is "". One that `takes_twins` has the rounded copies in the place of the tensors that have them. Where the
    masters of its weights are asked for, `masters` is its layout with these in the place of the weights. The model's
    config.json lies in `base`, if not with it.
    Where it was `salvaged`, that is its layout in the place of what the files say, which is damaged. With `has_all` it
    is a directory that holds all of the checkpoint in whose directory it lies.
    """

    place: str
    path: Path
    reader: FormatReader
    under: str | None = None
    takes_twins: bool = False
    masters: Layout | None = field(default=None, repr=False, compare=False)
    base: str | None = None
    salvaged: Layout | None = field(default=None, repr=False, compare=False)
    has_all: bool = False

    @property
    def is_model(self) -> bool:
        return self.under is None and not is_other_part(self.place or self.path.name)

    @property
    def may_have_weights(self) -> bool:
        """Return whether its metadata lists tensors that a model may have; True if the metadata cannot be read."""
        try:
            return may_have_weights(self.layout)
        except (Corrupt, IOFailure, Unsafe, Unsupported):
            return True

    @property
    def problem(self) -> CkptError | None:
        """Return what shows without reading metadata that it was not written to its end, None if nothing does."""
        with translate_os_errors(self.path):
            if problems := self.reader.problems(self.path):
                other = next((problem for problem in problems if isinstance(problem, Unsupported)), None)
                return other or Incomplete("unfinished", path=self.path)
            return find_unfinished(self.path, is_part=bool(self.place))

    @cached_property
    def layout(self) -> Layout:
        """Return where its chunks lie, with the checksums that its manifest has for them.

        Raises `Corrupt` for a manifest that is damaged, and whatever keeps the files from being read.
        """
        if unfinished := find_unfinished(self.path, is_part=bool(self.place)):
            raise unfinished
        if self.salvaged is not None:
            layout = with_file(self.salvaged, self.path)
        else:
            with translate_os_errors(self.path):
                layout = with_file(self.read_files(), self.path)
                if layout.spares:
                    from ckptkit.checkpoints.replicas import check_replicas  # few checkpoints have any

                    check_replicas(layout, refuse)
                check_descriptions(layout, self.manifest)
                layout = self.apply_context(layout)
            layout = self.with_sums(layout, self.manifest)
            check_headers(layout)
        return edits.take_twins(layout) if self.takes_twins else layout

    def read_files(self) -> Layout:
        """Return the layout that the reader reads of the files."""
        try:
            return self.reader.read(self.path)
        except Incomplete as error:
            raise lost_since(error, self.path) from None

    def apply_context(self, layout: Layout) -> Layout:
        """Return what its reader has read with flat parameters cut, under the keys where it belongs."""
        if any(is_flat_name(str(layout.key(name)[-1])) for name in layout.tensors):
            layout = unflatten_parameters(layout, self.path, self.base)
        return edits.nest(layout, tuple(self.under.split("."))) if self.under else layout

    def with_sums(self, layout: Layout, manifest: Manifest | None) -> Layout:
        """Return its layout with the checksums that a manifest has for its files and chunks, if there is one."""
        if manifest is None:
            return layout
        layout = with_run_sums(layout, manifest)
        if manifest.has_tensors_of(self.path, self.reader.owns):
            sums = manifest.tensors
            layout = replace(layout, tensors={name: with_sum(t, sums.get(name)) for name, t in layout.tensors.items()})
        known = {path: manifest.files[path] for path in layout.paths & manifest.files.keys()}
        return replace(layout, file_sums={path: (one.nbytes, one.crc32) for path, one in known.items()})

    @cached_property
    def trainer(self) -> str | None:
        """Return who wrote it, told by what only they leave; None if nothing tells."""
        return who_wrote(gather(self.path, (self.layout,)))

    @property
    def is_adapter(self) -> bool:
        """Return whether it is a file with an adapter for use, or a directory with such a file."""
        return any(map(is_exported, (self.path.name, *(names_in(self.path) if self.path.is_dir() else ()))))

    @cached_property
    def manifest(self) -> Manifest | None:
        """Return its manifest, None if it has none."""
        return read_manifest(self.path if self.path.is_dir() else self.path.parent)

    @property
    def has_manifest(self) -> bool:
        """Return whether a manifest lies in its directory; a file by itself has none."""
        return self.path.is_dir() and (self.path / MANIFEST).exists()

    @cached_property
    def in_whole(self) -> Layout:
        """Return its layout with files named as they are seen from the checkpoint's directory."""
        return edits.in_folder(self.layout, self.folder)

    @property
    def folder(self) -> str:
        """Return the directory in the checkpoint's that its files lie in, "" for that directory itself."""
        return self.place if self.under is None else self.place.rpartition("/")[0]


def with_file(layout: Layout, path: Path) -> Layout:
    """Return the layout that was read at `path` with the name of the file, if that is not a directory."""
    return replace(layout, file=path.name) if layout.root == path.parent else layout


def find_unfinished(path: Path, *, is_part: bool = False) -> Incomplete | None:
    """Return the error for a checkpoint, or a component, that its trainer's own marks call unfinished; else None.

    A component in the directory of a step has the marks of both. `is_part` says so of one in any other directory.
    """
    if path.is_dir() and (marker := marker_of(path)) and marker not in names_in(path):
        message = f"unfinished: expected the file `{marker}`, found none"
        return Incomplete(message, path=path, hint=_UNFINISHED)
    is_inside = is_part or (step_of(path) is None and step_of_place(path) is not None)
    for place in (path, path.parent) if is_inside else (path,):
        if place.is_dir() and (found := unfinished_names().intersection(names_in(place))):
            message = f"unfinished: its trainer left the file `{min(found)}`"
            return Incomplete(message, path=place, hint=_UNFINISHED)
    return None


def check_headers(layout: Layout) -> None:
    """Raise `Corrupt` for a local file whose header does not match the CRC-32 in its manifest."""
    if layout.file_sums and not is_remote(layout.root) and has_sums(layout):
        from ckptkit.engine.whole_files import compare_headers  # of formats that have no CRC-32 themselves

        compare_headers(layout)


def check_descriptions(layout: Layout, manifest: Manifest | None, report: Report = refuse) -> None:
    """Report `Corrupt` for metadata or an index whose CRC-32 differs from that in the manifest."""
    recorded = {} if manifest is None else manifest.files
    for name in sorted(recorded.keys() & layout.descriptions):
        path, known = layout.root / name, recorded[name]
        if known.nbytes > _LARGEST:
            continue
        content = read_small(path, _LARGEST)
        if crc32(content) != known.crc32:
            report(Corrupt(tell_damage(len(content), 0, crc32(content), known.crc32), path=path, hint=RESTORE))


def has_sums(layout: Layout) -> bool:
    """Return whether the chunks of its first tensors have a CRC-32: then nearly all have."""
    return any(chunk.crc32 is not None for tensor in islice(layout.tensors.values(), 2) for chunk in tensor.chunks)


def with_run_sums(layout: Layout, manifest: Manifest) -> Layout:
    """Return the layout with the checksums that a manifest has for runs of bytes in its files."""
    runs = {name: file.runs for name, file in manifest.files.items() if file.runs}

    def with_run_sum(chunk: Chunk) -> Chunk:
        crc = runs[chunk.path].get(chunk.bytes) if chunk.path in runs else None
        return chunk if crc is None or chunk.crc32 is not None or chunk.where else chunk._replace(crc32=crc)

    def with_chunk_sums(tensor: StoredTensor) -> StoredTensor:
        return replace(tensor, chunks=tuple(map(with_run_sum, tensor.chunks)))

    if not runs:
        return layout
    return replace(layout, tensors={name: with_chunk_sums(tensor) for name, tensor in layout.tensors.items()})


def with_sum(tensor: StoredTensor, crc: int | None) -> StoredTensor:
    """Return the tensor with the CRC-32 of its row-major bytes, if they lie in one piece and have none recorded."""
    if crc is None or len(tensor.chunks) != 1:
        return tensor
    (chunk,) = tensor.chunks
    is_plain = chunk.where is None and chunk.strides is None and chunk.dtype == tensor.spec.dtype
    if chunk.crc32 is not None or chunk.run is not None or not is_plain or chunk.box != whole(tensor.spec.shape):
        return tensor
    return replace(tensor, chunks=(chunk._replace(crc32=crc),))


def join(root: Path, components: Sequence[Component]) -> Layout:
    """Return the components of the checkpoint at `root` as one layout; the first is the model's."""
    if len(components) == 1 and not components[0].place:
        return components[0].layout
    return join_layouts(root, components, [component.in_whole for component in components])


def join_layouts(root: Path, components: Sequence[Component], layouts: Sequence[Layout]) -> Layout:
    """Return the layouts of the components as one. A model without nesting goes under a key if others are beside it."""
    named: list[Layout] = []
    taken: set[str] = set()
    for component, layout in zip(components, layouts, strict=True):
        own = (*layout.names, *layout.absent)
        names = {name: f"{component.place}.{name}" if name in taken else name for name in own}
        is_bare = component is components[0] and all(len(layout.key(name)) == 1 for name in layout.names)
        above = (MODEL,) if is_bare and any(other.under for other in components) else ()
        keys = {names[name]: (*above, *layout.key(name)) for name in layout.names}
        named.append(edits.with_names(layout, names, keys))
        taken.update(names.values())
    return edits.join(root, named)

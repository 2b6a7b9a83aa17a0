"""One component of a checkpoint: a directory or file with its layout and manifest. Joins several into one layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path

from ckptkit.checkpoints.manifest import NAME as MANIFEST
from ckptkit.checkpoints.manifest import Manifest, explain_deleted_metadata, read_manifest
from ckptkit.checkpoints.optimizers.flat_parameters import unflatten_parameters
from ckptkit.checkpoints.trainer_evidence import gather_trainer_evidence
from ckptkit.errors import (
    CkptError,
    Corrupt,
    Incomplete,
    IOFailure,
    Report,
    Unsafe,
    Unsupported,
    raise_problem,
    skip_problem,
    translate_os_errors,
)
from ckptkit.formats import FormatReader, locate_all_chunks
from ckptkit.io.crc32 import RESTORE, crc32, damage_message
from ckptkit.io.file import names_in, read_small
from ckptkit.io.path import is_remote
from ckptkit.layout import Chunk, Layout, StoredTensor, edits
from ckptkit.layout.box import full_box
from ckptkit.layout.wrappers import is_flat_parameter_name
from ckptkit.models.names.weights import Weights, find_weights, may_have_weights
from ckptkit.trainers import (
    find_step_of_path,
    find_step_of_path_or_parent,
    is_exported,
    is_non_model_component_name,
    required_completion_marker,
    unfinished_names,
    who_wrote,
)

_MAX_VERIFIED = 1 << 26  # bytes: larger files are not read only to verify their checksum
_UNFINISHED = "wait for the save to end, or take another step"
MODEL = "model"  # key for a bare state dict when other components are beside it


@dataclass(frozen=True)
class Component:
    """A directory or file of a checkpoint in one format.

    `place` is its relative path in the checkpoint, "" if it is the checkpoint itself. `under` is set for a file beside
    the model's: its entries get these keys (joined by dots; none for ""). `takes_twins` replaces tensors by their
    low-precision copies. `masters` is the layout with the fp32 master weights in place of the weights, if they were
    asked for. `base` has the model's config.json, if that is not with the component. `salvaged` replaces the layout of
    damaged files. `has_all` marks a directory that contains the full checkpoint.
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
        return self.under is None and not is_non_model_component_name(Path(self.place).name or self.path.name)

    @property
    def may_have_weights(self) -> bool:
        """Return whether its metadata lists tensors that a model may have; True if the metadata is unreadable."""
        try:
            return may_have_weights(self.layout)
        except (Corrupt, IOFailure, Unsafe, Unsupported):
            return True

    @property
    def problem(self) -> CkptError | None:
        """Return the error if the component is unfinished, without reading metadata; None if it looks complete."""
        with translate_os_errors(self.path):
            if problems := self.reader.problems(self.path):
                other = next((problem for problem in problems if isinstance(problem, Unsupported)), None)
                return other or Incomplete("unfinished", path=self.path)
            return find_unfinished_error(self.path, is_component=bool(self.place))

    @cached_property
    def layout(self) -> Layout:
        """Return the byte ranges of its chunks, with the checksums that its manifest has for them.

        Raises `Corrupt` for a damaged manifest, or a header that differs from its CRC-32, and any error of reading the
        files.
        """
        if unfinished := find_unfinished_error(self.path, is_component=bool(self.place)):
            raise unfinished
        if self.salvaged is not None:
            layout = with_single_file_name(self.salvaged, self.path)
        else:
            with translate_os_errors(self.path):
                try:
                    layout = with_single_file_name(self.reader.read(self.path), self.path)
                except Incomplete as error:
                    raise explain_deleted_metadata(error, self.path) from None
                if layout.spares:
                    from ckptkit.checkpoints.replicas import check_replicas  # deferred: rarely needed

                    check_replicas(layout, raise_problem)
                check_metadata_checksums(layout, self.manifest)
                layout = self.with_original_parameters(layout)
            layout = self.with_manifest_checksums(layout, self.manifest)
            # the chunks of the first tensors stand for all
            first = (chunk for tensor in islice(layout.tensors.values(), 2) for chunk in tensor.chunks)
            if layout.file_sums and not is_remote(layout.root) and any(chunk.crc32 is not None for chunk in first):
                # deferred: for formats without checksums of their own
                from ckptkit.engine.check_sources import verify_mostly_checksummed_files

                verify_mostly_checksummed_files(layout)
        return edits.with_low_precision_as_weights(layout) if self.takes_twins else layout

    @cached_property
    def weights(self) -> Weights:
        """Return the model's tensors, under the model's own names. Raises `Mismatch` if there are none."""
        return find_weights(self.layout)

    def with_original_parameters(self, layout: Layout) -> Layout:
        """Return the layout with flat parameters split into the original ones, nested below the keys of `under`."""
        if any(is_flat_parameter_name(str(layout.key(name)[-1])) for name in layout.tensors):
            layout = unflatten_parameters(layout, self.path, self.base)
        return edits.nest_below_key(layout, tuple(self.under.split("."))) if self.under else layout

    def with_manifest_checksums(self, layout: Layout, manifest: Manifest | None) -> Layout:
        """Return the layout with the manifest's checksums of its files, byte ranges and tensors."""
        if manifest is None:
            return layout
        tensors = layout.tensors
        if runs := {name: file.runs for name, file in manifest.files.items() if file.runs}:

            def with_sum(chunk: Chunk) -> Chunk:
                crc = runs[chunk.path].get(chunk.checksummed_range) if chunk.path in runs else None
                return chunk if crc is None or chunk.crc32 is not None or chunk.where else chunk._replace(crc32=crc)

            tensors = {name: replace(one, chunks=tuple(map(with_sum, one.chunks))) for name, one in tensors.items()}
        if manifest.tensors_belong_to(self.path, self.reader.owns_file):
            sums = manifest.tensors
            tensors = {name: with_tensor_checksum(tensor, sums.get(name)) for name, tensor in tensors.items()}
        known = {path: manifest.files[path] for path in layout.paths & manifest.files.keys()}
        file_sums = {path: (file_sum.nbytes, file_sum.crc32) for path, file_sum in known.items()}
        return replace(layout, tensors=tensors, file_sums=file_sums)

    @cached_property
    def trainer(self) -> str | None:
        """Return the trainer that wrote the component; None if nothing identifies it."""
        return who_wrote(gather_trainer_evidence(self.path, (self.layout,)))

    @property
    def is_adapter(self) -> bool:
        """Return whether it is an exported adapter file, or a directory with one."""
        return any(map(is_exported, (self.path.name, *(names_in(self.path) if self.path.is_dir() else ()))))

    @cached_property
    def manifest(self) -> Manifest | None:
        return read_manifest(self.path if self.path.is_dir() else self.path.parent)

    @property
    def has_manifest(self) -> bool:
        """Return whether its directory has a manifest; a single file has none."""
        return self.path.is_dir() and (self.path / MANIFEST).exists()

    @cached_property
    def layout_relative_to_checkpoint(self) -> Layout:
        """Return its layout with file names relative to the checkpoint's directory."""
        return edits.prepend_directory_to_paths(self.layout, self.folder)

    @property
    def folder(self) -> str:
        """Return the subdirectory of the checkpoint that contains its files, "" for the checkpoint's own directory."""
        return self.place if self.under is None else self.place.rpartition("/")[0]


def with_single_file_name(layout: Layout, path: Path) -> Layout:
    """Return the layout that was read at `path` with the name of the file, if `path` is a file."""
    return replace(layout, file=path.name) if layout.root == path.parent else layout


def find_unfinished_error(path: Path, *, is_component: bool = False) -> Incomplete | None:
    """Return the error for a checkpoint or component that its trainer's own markers call unfinished; else None.

    A component inside a checkpoint's directory obeys the markers of both directories. `is_component` says that `path`
    is such a component if its parent's name has no step.
    """
    if path.is_dir() and (marker := required_completion_marker(path)) and marker not in names_in(path):
        message = f"unfinished: expected the file `{marker}`, found none"
        return Incomplete(message, path=path, hint=_UNFINISHED)
    is_inside = is_component or (find_step_of_path(path) is None and find_step_of_path_or_parent(path) is not None)
    for directory in (path, path.parent) if is_inside else (path,):
        if directory.is_dir() and (markers := set(unfinished_names()).intersection(names_in(directory))):
            message = f"unfinished: its trainer left the file `{min(markers)}`"
            return Incomplete(message, path=directory, hint=_UNFINISHED)
    return None


def check_metadata_checksums(layout: Layout, manifest: Manifest | None, report: Report = raise_problem) -> None:
    """Report `Corrupt` for metadata or an index whose CRC-32 differs from the manifest's."""
    recorded = {} if manifest is None else manifest.files
    for name in sorted(recorded.keys() & layout.descriptions):
        path, known = layout.root / name, recorded[name]
        if known.nbytes > _MAX_VERIFIED:
            continue
        content = read_small(path, _MAX_VERIFIED)
        if crc32(content) != known.crc32:
            report(Corrupt(damage_message(len(content), 0, crc32(content), known.crc32), path=path, hint=RESTORE))


def require_archives_of_one_save(layout: Layout) -> None:
    """Compare each archive file with the CRC-32 in its manifest. Reads only the ends of the archives, no tensors.

    Does not check damaged archives: the reader of the data verifies its checksum. Raises `Corrupt` for a file that
    another save, or another rank, wrote.
    """
    # deferred: `ls` and `inspect` need neither
    from ckptkit.engine.check_sources import find_files_of_other_saves
    from ckptkit.formats.archives.locate import ENVELOPE

    archives = {
        name: tensor
        for name, tensor in layout.tensors.items()
        if any(chunk.wrapper == ENVELOPE and chunk.path in layout.file_sums for chunk in tensor.chunks)
    }
    if archives and not is_remote(layout.root):
        located = locate_all_chunks(replace(layout, tensors=archives, blobs={}), skip_problem)
        for error in find_files_of_other_saves(located).values():
            raise error


def with_tensor_checksum(tensor: StoredTensor, crc: int | None) -> StoredTensor:
    """Return the tensor with the CRC-32 of its row-major bytes, if it is one contiguous chunk without a checksum."""
    if crc is None or len(tensor.chunks) != 1:
        return tensor
    (chunk,) = tensor.chunks
    is_plain = chunk.where is None and chunk.strides is None and chunk.dtype == tensor.spec.dtype
    if chunk.crc32 is not None or chunk.run is not None or not is_plain or chunk.box != full_box(tensor.spec.shape):
        return tensor
    return replace(tensor, chunks=(chunk._replace(crc32=crc),))


def join_layouts(root: Path, components: Sequence[Component], layouts: Sequence[Layout]) -> Layout:
    """Join the layouts of components. A bare state dict is nested under `model` if others are beside it."""
    named: list[Layout] = []
    used_names: set[str] = set()
    for component, layout in zip(components, layouts, strict=True):
        own = (*layout.names, *layout.absent)
        # a name that an earlier component uses gets this component's name in front
        names = {name: f"{component.place}.{name}" if name in used_names else name for name in own}
        is_bare = component is components[0] and all(len(layout.key(name)) == 1 for name in layout.names)
        above = (MODEL,) if is_bare and any(other.under for other in components) else ()
        keys = {names[name]: (*above, *layout.key(name)) for name in layout.names}
        named.append(edits.select_and_rename_entries(layout, names, keys))
        used_names.update(names.values())
    return edits.join_disjoint_layouts(root, named)

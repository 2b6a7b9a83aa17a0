"""Survey the components of a checkpoint for damage, mark lost data, and replace it with copies in the component."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.checkpoints.component import Component, check_metadata_checksums
from ckptkit.checkpoints.manifest import explain_deleted_metadata
from ckptkit.checkpoints.replicas import find_differing_copies
from ckptkit.conversion.salvaging.copies import Faults, replace_lost_by_replicas, replace_lost_from_copy
from ckptkit.engine.check_sources import find_files_of_other_saves
from ckptkit.engine.visit import byte_range_of_chunk, byte_ranges_in, find_damaged_ranges
from ckptkit.errors import (
    DAMAGED,
    RESTORE,
    CkptError,
    Corrupt,
    IOFailure,
    Mismatch,
    Unsafe,
    Unsupported,
    skip_problem,
    translate_os_errors,
)
from ckptkit.formats import decompress_entries, locate_all_chunks
from ckptkit.io.file import file_size, is_existing_path
from ckptkit.io.path import is_remote
from ckptkit.io.progress import Progress, make_progress_reporter
from ckptkit.layout import Blob, Chunk, Fault, Layout, Spec, StoredTensor
from ckptkit.layout.box import full_box
from ckptkit.models.companions import find_companions
from ckptkit.models.expected import Form, closest_form_or_error


@dataclass(slots=True)
class Survey:
    """The damage in a layout: chunks by tensor name and index, and entries by name.

    `foreign_files` are undamaged files of another save or rank: all their chunks and entries are among the damage.
    """

    chunks: dict[tuple[str, int], CkptError] = field(default_factory=dict)
    entries: dict[str, CkptError] = field(default_factory=dict)
    foreign_files: frozenset[str] = frozenset()

    def mark_damage_as_lost(self, layout: Layout) -> Layout:
        """Return the layout with the damaged chunks marked as lost, and without the damaged entries."""
        tensors = dict(layout.tensors)
        for name in {name for name, _ in self.chunks} & tensors.keys():
            chunks = list(tensors[name].chunks)
            for i, chunk in enumerate(chunks):
                error = self.chunks.get((name, i))
                chunks[i] = chunk if error is None else Chunk.lost(chunk.box, chunk.dtype, Fault.of(error))
            tensors[name] = replace(tensors[name], chunks=tuple(chunks))
        blobs = {name: blob for name, blob in layout.blobs.items() if name not in self.entries}
        return replace(layout, tensors=tensors, blobs=blobs)


def survey_damage(layout: Layout, *, jobs: int | None = None, progress: Progress | None = None) -> Survey:
    """Find all damage in a layout: read every byte of its tensors once, except those of lost chunks."""
    damage_found, located = survey_structure_and_locate(layout)
    sound = damage_found.mark_damage_as_lost(located)
    total = sum(length for _, _, length in dict(byte_ranges_in(sound)))
    damage = find_damaged_ranges(sound, jobs=jobs, progress=make_progress_reporter(progress, total))
    for name, i, chunk in chunks_with_bytes(sound) if damage else ():
        wrong = None if chunk.is_lost else damage.get(byte_range_of_chunk(chunk))
        if wrong is not None:
            damage_found.chunks[name, i] = wrong.blame(path=layout.root / chunk.path)
    return damage_found


def survey_structure(layout: Layout) -> Survey:
    """Return the chunks and entries whose files are missing or too short, or whose zip wrappers do not open."""
    return survey_structure_and_locate(layout)[0]


def survey_structure_and_locate(layout: Layout) -> tuple[Survey, Layout]:
    """Return the damage that can be found without reading tensor data, and the layout with located tensors."""
    damage = survey_file_sizes(layout)
    reported: list[CkptError] = []
    located = locate_all_chunks(
        decompress_entries(damage.mark_damage_as_lost(layout), reported.append), reported.append
    )
    reported_by_place = {(error.tensor, error.offset): error for error in reversed(reported)}
    for name, error in ((name, error) for (name, _), error in reported_by_place.items() if name in located.blobs):
        damage.entries[str(name)] = error
    for name, i, chunk in chunks_with_bytes(located):
        if chunk.wrapper is not None:
            unknown = Corrupt("the zip entry of this tensor cannot be read", path=layout.root / chunk.path)
            damage.chunks[name, i] = reported_by_place.get((name, chunk.offset), unknown)
    add_files_of_other_saves(damage, located)
    return damage, located


def add_files_of_other_saves(damage: Survey, located: Layout) -> None:
    """Add the chunks and entries of each file that differs from the manifest, although nothing in it is damaged."""
    if is_remote(located.root) or not located.file_sums:
        return
    damaged = {error.path for error in (*damage.chunks.values(), *damage.entries.values())}
    foreign = {
        path: error for path, error in find_files_of_other_saves(located).items() if located.root / path not in damaged
    }
    if not foreign:
        return
    for name, i, chunk in chunks_with_bytes(located):
        if chunk.path in foreign:
            damage.chunks[name, i] = foreign[chunk.path]
    damage.entries.update({name: foreign[blob.path] for name, blob in located.blobs.items() if blob.path in foreign})
    damage.foreign_files = frozenset(foreign)


def detach_empty_chunks_from_files(layout: Layout) -> Layout:
    """Return the layout with empty chunks turned into zeros, because the files that they name may be missing."""

    def apart(chunk: Chunk) -> Chunk:
        return chunk if chunk.box.numel else Chunk.of_zeros(chunk.box, chunk.dtype)

    tensors = layout.tensors.items()
    return replace(layout, tensors={name: replace(one, chunks=tuple(map(apart, one.chunks))) for name, one in tensors})


def chunks_with_bytes(layout: Layout) -> list[tuple[str, int, Chunk]]:
    """Return every chunk that has bytes, with its tensor's name and its index in the tensor."""
    return [
        (name, i, chunk)
        for name, tensor in layout.tensors.items()
        for i, chunk in enumerate(tensor.chunks)
        if chunk.box.numel and not chunk.is_zeros
    ]


def survey_file_sizes(layout: Layout) -> Survey:
    """Return the chunks and entries of missing files, and those beyond the end of a file."""
    damage, sizes = Survey(), dict[str, int | CkptError]()
    for name, i, chunk in chunks_with_bytes(layout):
        error = None if chunk.is_lost else find_out_of_file_error(chunk, layout.root, sizes)
        if error is not None:
            damage.chunks[name, i] = error
    for name, blob in layout.blobs.items():
        error = find_out_of_file_error(blob, layout.root, sizes) if blob.content is None and blob.length else None
        if error is not None:
            damage.entries[name] = error
    return damage


def find_out_of_file_error(stored: Chunk | Blob, root: Path, sizes: dict[str, int | CkptError]) -> CkptError | None:
    """Return the error for a chunk or entry outside its file; None if it is inside. `sizes` caches file sizes."""
    size = sizes.get(stored.path)
    if size is None:
        try:
            size = file_size(root / stored.path)
        except (Corrupt, IOFailure) as error:
            size = error.with_traceback(None)
        sizes[stored.path] = size
    if isinstance(size, CkptError):
        return size
    if not stored.is_in_file:
        return Corrupt("the file cannot be read", path=root / stored.path)
    if stored.offset + stored.length <= size:
        return None
    # not `truncated`, whose numbers differ for each tensor: the summary groups tensors by this message
    return Corrupt(f"the file is truncated: it ends at byte {size}", path=root / stored.path)


SurveyFunction = Callable[[Layout], Survey]
FaultByPath = Mapping[Path | None, Fault]

_GONE = "it could not be read"
_ROUNDED = "its rounded copy"
_MASTER = "the master weights"


def repair_checkpoint(
    checkpoint: Checkpoint, other: Checkpoint | None, faults: Faults, survey: SurveyFunction
) -> Checkpoint:
    """Return a checkpoint whose damage is marked as lost, or replaced by copies in the same component.

    `survey` finds the damage in a layout. The metadata of `other` describes a component without metadata, if everything
    in that component's files matches it. Raises the error that makes the model component unreadable; leaves out any
    other unreadable component.
    """
    model = checkpoint.model_component
    parts = []
    for component in checkpoint.components:
        try:
            parts.append(repair_component(component, other, faults, survey))
        except (Corrupt, IOFailure, Mismatch, Unsupported) as caught:
            error = explain_deleted_metadata(caught, component.path)
            if component is model:
                if not isinstance(error, Mismatch):  # a mismatch already has a hint about --fill-from
                    hint = RESTORE if error.hint == DAMAGED else error.hint
                    error.hint = f"nothing can be salvaged without it{f': {hint}' if hint else ''}"
                raise error from None
            faults.unnamed.append(Fault.of(error.blame(path=component.path)))
            faults.places.append(component.path)
    faults.unnamed += [Fault("no known format", path) for path in checkpoint.strange]
    faults.places += checkpoint.strange
    return replace(checkpoint, components=tuple(parts), strange=())


def repair_component(
    component: Component, other: Checkpoint | None, faults: Faults, survey: SurveyFunction
) -> Component:
    """Return a component with its lost chunks marked, or replaced by copies."""
    reported: list[CkptError] = []
    with translate_os_errors(component.path):
        # the metadata of the other checkpoint describes the files if their own is missing
        kind = component.place, component.reader.name
        alike = [one.path for one in other.components if (one.place, one.reader.name) == kind] if other else []
        report = reported.append
        read = component.reader.read_by_other_metadata(component.path, alike[0], report) if alike else None
        if read is None:
            read = component.reader.read(component.path, report)
        elif other is not None:
            faults.described_by = other.path
        manifest = None
        try:
            manifest = component.manifest
        except (Corrupt, IOFailure, Unsafe) as error:
            faults.unnamed.append(Fault.of(error))
        check_metadata_checksums(read, manifest, lambda error: faults.unnamed.append(Fault.of(error)))
        read = component.with_original_parameters(read)
    unexplained = record_unlisted_tensors(read, faults, reported)
    why = {error.path: Fault.of(error) for error in reported}
    layout = with_unreadable_tensors_lost(
        component.with_manifest_checksums(read, manifest), component, faults, unexplained, why
    )
    layout = without_differing_copies(detach_empty_chunks_from_files(layout), faults, with_bytes=False)
    damage = survey(layout)
    of_files = {error.path: error for error in reported if error.tensor is None}  # they say more than file sizes do
    damage.chunks = {place: of_files.get(error.path, error) for place, error in damage.chunks.items()}
    faults.entries.update((name, Fault.of(error)) for name, error in damage.entries.items())
    faults_by_tensor = {error.tensor: Fault.of(error) for error in reversed(reported) if error.tensor is not None}
    layout = without_copies_in(layout, damage.foreign_files)
    repaired = with_lost_chunks_replaced(damage.mark_damage_as_lost(layout), faults, survey, faults_by_tensor)
    return replace(component, salvaged=replace(repaired, spares={}, absent={}, file_sums={}))


def without_copies_in(layout: Layout, files: frozenset[str]) -> Layout:
    """Return the layout without the copies of chunks that are in these files."""
    if not files:
        return layout
    spares = {name: tuple(one for one in chunks if one.path not in files) for name, chunks in layout.spares.items()}
    twins = {name: twin for name, twin in layout.twins.items() if files.isdisjoint(chunk.path for chunk in twin.chunks)}
    return replace(layout, spares=spares, twins=twins)


def record_unlisted_tensors(layout: Layout, faults: Faults, reported: Iterable[CkptError]) -> list[Fault]:
    """Record the problems of tensors that the layout lacks; return the faults that nothing in the layout explains."""
    known = {*layout.names, *layout.absent}
    used = {layout.root / path for path in (*layout.paths, *layout.absent.values())}
    explains = bool(layout.absent) or any(not is_existing_path(path) for path in used)
    for error in reported:
        if error.tensor is not None and error.tensor not in known:
            faults.unplaced[error.tensor] = Fault.of(error)
    strange = (error for error in reported if error.tensor is None and error.path not in used)
    return [Fault.of(error) for error in strange if not (explains and error.path is not None and error.path.is_dir())]


def with_unreadable_tensors_lost(
    layout: Layout, component: Component, faults: Faults, unexplained: Sequence[Fault], why: FaultByPath
) -> Layout:
    """Return the layout with unreadable tensors marked as lost, if config.json has their shapes.

    They get the most frequent dtype. The first `unexplained` fault stands for all other missing parameters.
    """
    config = find_companions(component.path, component.base).config if layout.absent or unexplained else None
    form = closest_form_or_error({*layout.tensors, *layout.absent}, config) if config else None
    shapes = form.shapes if isinstance(form, Form) else {}
    absent = {
        name: why.get(layout.root / file, Fault(_GONE, layout.root / file)) for name, file in layout.absent.items()
    }
    if unexplained and isinstance(form, Form):
        absent |= {
            name: unexplained[0] for name in form.needed_names if name not in layout.tensors and name not in absent
        }
    else:
        faults.unnamed += unexplained
    # most tensors of a model have the same dtype, so the most frequent one is the best guess
    dtypes = Counter(tensor.spec.dtype for tensor in layout.tensors.values()).most_common(1)
    tensors = dict(layout.tensors)
    for name, fault in absent.items():
        if name in tensors and name in shapes:
            tensors[name] = replace(tensors[name], spec=replace(tensors[name].spec, shape=shapes[name]))
        elif name in shapes and dtypes:
            spec = Spec(dtypes[0][0], shapes[name])
            tensors[name] = StoredTensor(spec, (Chunk.lost(full_box(spec.shape), spec.dtype, fault),))
        else:
            tensors.pop(name, None)
            faults.unplaced[name] = fault
    return replace(layout, tensors=tensors)


def with_lost_chunks_replaced(
    layout: Layout, faults: Faults, survey: SurveyFunction, faults_by_file: Mapping[str, Fault]
) -> Layout:
    """Return a marked layout with copies for its lost chunks. `faults_by_file` are the reported faults, by tensor."""
    root = layout.root
    known = {name: chunks for name, chunks in layout.spares.items() if name in layout.tensors}
    replicas = {name: replace(layout.tensors[name], chunks=chunks) for name, chunks in known.items()}
    seen = replace(layout, tensors=replicas, blobs={}, twins={}, file_sums={})
    surveyed = survey(seen).mark_damage_as_lost(seen).tensors if replicas else {}
    undamaged = {name: tuple(chunk for chunk in one.chunks if not chunk.is_lost) for name, one in surveyed.items()}
    spares = without_differing_copies(replace(layout, spares=undamaged), faults, with_bytes=True).spares
    tensors = {
        name: replace_lost_by_replicas(tensor, root, spares.get(name, ()), faults_by_file.get(name))
        for name, tensor in layout.tensors.items()
    }
    repaired = [name for name, one in tensors.items() if one is not layout.tensors[name] and not one.is_lost]
    faults.repaired.update(dict.fromkeys(repaired))
    if not layout.twins:
        return replace(layout, tensors=tensors)
    seen = replace(layout, tensors=layout.twins, blobs={}, twins={}, file_sums={})
    twins = survey(seen).mark_damage_as_lost(seen).tensors
    return replace(
        layout,
        tensors={
            name: replace_lost_from_copy(one, twins.get(name), root, faults, _ROUNDED) for name, one in tensors.items()
        },
        twins={
            name: replace_lost_from_copy(one, tensors.get(name), root, faults, _MASTER) for name, one in twins.items()
        },
    )


def without_differing_copies(layout: Layout, faults: Faults, *, with_bytes: bool) -> Layout:
    """Return the layout without copies that differ from the chosen chunks. Records their tensors as faults."""
    if not layout.spares:
        return layout
    different = find_differing_copies(layout, skip_problem, with_bytes=with_bytes)
    for name, chosen, copy in different:
        why = f"the copy in `{copy.path}` has other bytes; the output has the bytes of `{chosen.path}`"
        faults.unplaced.setdefault(name, Fault(why, layout.root / chosen.path))
    dropped = {(pair.name, pair.copy) for pair in different}
    spares = layout.spares.items()
    kept = {name: tuple(chunk for chunk in chunks if (name, chunk) not in dropped) for name, chunks in spares}
    return replace(layout, spares=kept)

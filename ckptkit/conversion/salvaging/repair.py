"""Repair the parts of a checkpoint: mark lost data, and replace it with copies in the same part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.checkpoints.component import Component, check_descriptions
from ckptkit.checkpoints.manifest import Manifest
from ckptkit.checkpoints.replicas import find_different
from ckptkit.conversion.salvaging.copies import complete, names_repaired, patch
from ckptkit.conversion.salvaging.faults import Faults
from ckptkit.conversion.salvaging.survey import Survey, without_files
from ckptkit.errors import (
    DAMAGED,
    RESTORE,
    CkptError,
    Corrupt,
    IOFailure,
    Mismatch,
    Report,
    Unsafe,
    Unsupported,
    ignore,
    translate_os_errors,
)
from ckptkit.io.file import is_there
from ckptkit.layout import Chunk, Fault, Layout, Spec, StoredTensor
from ckptkit.layout.box import whole
from ckptkit.models.companions import find_companions
from ckptkit.models.expected import Form, form_or_reason

Look = Callable[[Layout], Survey]
Why = Mapping[Path | None, Fault]

_GONE = "it could not be read"
_ROUNDED = "its rounded copy"
_MASTER = "the master weights"


def repair(checkpoint: Checkpoint, other: Checkpoint | None, faults: Faults, look: Look) -> Checkpoint:
    """Return a checkpoint with the damage in each part marked as lost, unless the part has a copy of the same bytes.

    `look` finds the damage in a layout. The metadata of `other` describes a part that has none, if everything in the
    files of that part matches it. Raises the error that makes the part with the model unreadable; leaves out any other
    unreadable part.
    """
    model = checkpoint.model_component
    parts = []
    for part in checkpoint.components:
        try:
            parts.append(repair_part(part, other, faults, look))
        except (Corrupt, IOFailure, Mismatch, Unsupported) as error:
            if part is model:
                if not isinstance(error, Mismatch):  # which hints at another --fill-from
                    hint = RESTORE if error.hint == DAMAGED else error.hint
                    error.hint = f"nothing can be salvaged without it{f': {hint}' if hint else ''}"
                raise
            faults.unnamed.append(Fault.of(error.blame(path=part.path)))
            faults.places.append(part.path)
    faults.unnamed += [Fault("no known format", path) for path in checkpoint.strange]
    faults.places += checkpoint.strange
    return replace(checkpoint, components=tuple(parts), strange=())


def repair_part(part: Component, other: Checkpoint | None, faults: Faults, look: Look) -> Component:
    """Return a part with its lost chunks marked, or replaced by copies."""
    reported: list[CkptError] = []
    with translate_os_errors(part.path):
        read = read_part(part, other, faults, reported.append)
        manifest = manifest_of(part, faults)
        check_descriptions(read, manifest, lambda error: faults.unnamed.append(Fault.of(error)))
        read = part.apply_context(read)
    unexplained = note_rest(read, faults, reported)
    why = {error.path: Fault.of(error) for error in reported}
    layout = with_absent(part.with_sums(read, manifest), part, faults, unexplained, why)
    layout = without_different(without_files(layout), faults, with_bytes=False)
    found = look(layout).explained(error for error in reported if error.tensor is None)
    faults.entries.update((name, Fault.of(error)) for name, error in found.entries.items())
    told = {error.tensor: Fault.of(error) for error in reversed(reported) if error.tensor is not None}
    repaired = with_copies(found.mark(layout), faults, look, told)
    return replace(part, salvaged=replace(repaired, spares={}, absent={}, file_sums={}))


def read_part(part: Component, other: Checkpoint | None, faults: Faults, report: Report) -> Layout:
    """Return the layout of a part, by the metadata of another checkpoint if the part has none."""
    if other is not None:
        alike = (one for one in other.components if (one.place, one.reader.name) == (part.place, part.reader.name))
        layouts = (part.reader.read_like(part.path, one.path, report) for one in alike)
        layout = next(layouts, None)
        if layout is not None:
            faults.described_by = other.path
            return layout
    return part.reader.read(part.path, report)


def manifest_of(part: Component, faults: Faults) -> Manifest | None:
    """Return the manifest of a part. Notes a damaged one and returns None."""
    try:
        return part.manifest
    except (Corrupt, IOFailure, Unsafe) as error:
        faults.unnamed.append(Fault.of(error))
        return None


def note_rest(layout: Layout, faults: Faults, reported: Iterable[CkptError]) -> list[Fault]:
    """Note the problems of tensors that the layout does not have; return those that nothing in the layout explains."""
    known = {*layout.names, *layout.absent}
    used = {layout.root / path for path in (*layout.paths, *layout.absent.values())}
    explains = bool(layout.absent) or any(not is_there(path) for path in used)
    for error in reported:
        if error.tensor is not None and error.tensor not in known:
            faults.unplaced[error.tensor] = Fault.of(error)
    strange = (error for error in reported if error.tensor is None and error.path not in used)
    return [Fault.of(error) for error in strange if not (explains and error.path is not None and error.path.is_dir())]


def with_absent(layout: Layout, part: Component, faults: Faults, unexplained: Sequence[Fault], why: Why) -> Layout:
    """Return the layout with the unreadable tensors as lost ones, if config.json tells their shapes.

    They get the most frequent dtype. The first `unexplained` fault stands for all other missing parameters.
    """
    config = find_companions(part.path, part.base).config if layout.absent or unexplained else None
    form = form_or_reason({*layout.tensors, *layout.absent}, config) if config else None
    shapes = form.shapes if isinstance(form, Form) else {}
    absent = {
        name: why.get(layout.root / file, Fault(_GONE, layout.root / file)) for name, file in layout.absent.items()
    }
    if unexplained and isinstance(form, Form):
        absent |= {name: unexplained[0] for name in form.needed if name not in layout.tensors and name not in absent}
    else:
        faults.unnamed += unexplained
    dtypes = Counter(tensor.spec.dtype for tensor in layout.tensors.values()).most_common(1)
    tensors = dict(layout.tensors)
    for name, fault in absent.items():
        if name in tensors and name in shapes:
            tensors[name] = replace(tensors[name], spec=replace(tensors[name].spec, shape=shapes[name]))
        elif name in shapes and dtypes:
            spec = Spec(dtypes[0][0], shapes[name])
            tensors[name] = StoredTensor(spec, (Chunk.lost(whole(spec.shape), spec.dtype, fault),))
        else:
            tensors.pop(name, None)
            faults.unplaced[name] = fault
    return replace(layout, tensors=tensors)


def with_copies(layout: Layout, faults: Faults, look: Look, told: Mapping[str, Fault]) -> Layout:
    """Return a marked layout in which spare chunks and second copies replace lost chunks.

    `told` are the reported problems of single tensors.
    """
    root = layout.root
    spares = without_different(replace(layout, spares=sound_spares(layout, look)), faults, with_bytes=True).spares
    tensors = {
        name: complete(tensor, root, spares.get(name, ()), told.get(name)) for name, tensor in layout.tensors.items()
    }
    faults.repaired.update(dict.fromkeys(names_repaired(layout.tensors, tensors)))
    if not layout.twins:
        return replace(layout, tensors=tensors)
    seen = replace(layout, tensors=layout.twins, blobs={}, twins={})
    twins = look(seen).mark(seen).tensors
    return replace(
        layout,
        tensors={name: patch(one, twins.get(name), root, faults, _ROUNDED) for name, one in tensors.items()},
        twins={name: patch(one, tensors.get(name), root, faults, _MASTER) for name, one in twins.items()},
    )


def without_different(layout: Layout, faults: Faults, *, with_bytes: bool) -> Layout:
    """Return the layout without the copies that differ from the chosen chunks, which stay. Notes their tensors."""
    if not layout.spares:
        return layout
    different = find_different(layout, ignore, with_bytes=with_bytes)
    for name, chosen, copy in different:
        why = f"the copy in `{copy.path}` has other bytes; the output has the bytes of `{chosen.path}`"
        faults.unplaced.setdefault(name, Fault(why, layout.root / chosen.path))
    dropped = {(pair.name, pair.copy) for pair in different}
    spares = {name: tuple(c for c in found if (name, c) not in dropped) for name, found in layout.spares.items()}
    return replace(layout, spares=spares)


def sound_spares(layout: Layout, look: Look) -> dict[str, tuple[Chunk, ...]]:
    """Return the spare chunks of a layout's tensors that are whole."""
    spares = {
        name: replace(layout.tensors[name], chunks=chunks)
        for name, chunks in layout.spares.items()
        if name in layout.tensors
    }
    seen = replace(layout, tensors=spares, blobs={}, twins={})
    found = look(seen).mark(seen).tensors if spares else {}
    return {name: tuple(chunk for chunk in tensor.chunks if not chunk.is_lost) for name, tensor in found.items()}

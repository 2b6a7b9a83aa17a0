"""Fill lost tensors from another checkpoint: an earlier step, or the model that the training began with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.checkpoints.component import Component
from ckptkit.conversion.salvaging.copies import Faults, absolute_path, can_replace, with_absolute_path
from ckptkit.errors import Mismatch, Unsupported
from ckptkit.io.path import is_remote
from ckptkit.layout import Blob, Layout, StoredTensor
from ckptkit.layout.renames import renaming
from ckptkit.models.names import HUB
from ckptkit.models.names.naming import name_training
from ckptkit.models.names.parameters import NewName
from ckptkit.models.names.weights import has_weights
from ckptkit.state.matching import find_model, own_keys
from ckptkit.state.names import NameOptions, ask_names


@dataclass(frozen=True, slots=True)
class FillSource:
    """Another checkpoint to fill from, with the names of its tensors and entries without the model's prefix.

    `weights` are the names of its model's tensors. `new_name` gives a tensor's name in the output, which the other
    checkpoint may already use.
    """

    path: Path
    layout: Layout
    names: Mapping[str, str]
    weights: frozenset[str]
    new_name: NewName
    remarks: tuple[str, ...] = ()

    def tensor(self, own: str) -> StoredTensor | None:
        """Return the tensor of a name with absolute paths; None if it is missing."""
        stored = self.layout.tensors.get(self.entry_name(own))
        if stored is None:
            return None
        return replace(stored, chunks=tuple(with_absolute_path(chunk, self.layout.root) for chunk in stored.chunks))

    def entry_name(self, own: str) -> str:
        """Return its own name of an entry, "" if it has no such entry."""
        return self.names.get(own) or self.names.get(self.new_name(own), "")

    def entry(self, own: str) -> Blob | None:
        """Return the non-tensor entry of a name, with its absolute path; None if it is missing."""
        blob = self.layout.blobs.get(self.entry_name(own))
        return blob and blob._replace(path=absolute_path(self.layout.root, blob.path))


def fill(checkpoint: Checkpoint, other: Checkpoint, faults: Faults, named: NameOptions) -> tuple[Checkpoint, list[str]]:
    """Return a checkpoint whose lost tensors, or lost parts of tensors, are replaced by another checkpoint's.

    `named` are the user's options about names in either. Also returns remarks on names and shapes that do not fit.
    """
    for path in (checkpoint.path, other.path):
        if is_remote(path):
            raise Unsupported("ckptkit cannot fill from or into a remote checkpoint", path=path, hint="copy it here")
    fillers = {
        component.place: fill_source_of(component.layout, checkpoint, other, named) for component in other.components
    }
    joined = (
        fill_source_of(other.layout, checkpoint, other, named) if len(fillers) > 1 else next(iter(fillers.values()))
    )
    filled = [fill_part(component, fillers.get(component.place, joined), faults) for component in checkpoint.components]
    remarks = [remark for filler in (*fillers.values(), joined) for remark in filler.remarks]
    remarks += [remark for _, more in filled for remark in more]
    return replace(checkpoint, components=tuple(component for component, _ in filled)), list(dict.fromkeys(remarks))


def fill_source_of(layout: Layout, checkpoint: Checkpoint, other: Checkpoint, named: NameOptions) -> FillSource:
    """Return a layout of the other checkpoint as a source, its names translated to the family of this checkpoint."""
    remarks: list[str] = []
    model = find_model(checkpoint.model_component.layout)
    ours = named.table_for(model.layout.tensors) if model else None
    if (named.table or checkpoint.family is not other.family) and has_weights(layout):
        config = named.config_of(other) or checkpoint.companions.config
        family = ours or checkpoint.family
        try:
            asked = ask_names(other, family.name if family else HUB, config, named.table)
            layout, remarks = name_training(layout, asked)
        except (Mismatch, Unsupported) as error:
            remarks = [f"did not translate the names in {other.path}: {error.message}"]
    own, model_of_layout = own_names(layout), find_model(layout)
    weights = frozenset(own[name] for name in model_of_layout.came_from.values()) if model_of_layout else frozenset()
    return FillSource(
        other.path, layout, {new: name for name, new in own.items()}, weights, renaming(named.rename), tuple(remarks)
    )


def own_names(layout: Layout) -> dict[str, str]:
    """Return the name of each entry without the prefix of the model; the full name if that would be ambiguous."""
    model = find_model(layout)
    names = {name: name for name in layout.names}
    if model is None:
        return names
    own = {name: ".".join(map(str, key)) for name, key in own_keys(layout, model).items()}
    return own if len(set(own.values())) == len(own) else names


def fill_part(component: Component, filler: FillSource, faults: Faults) -> tuple[Component, list[str]]:
    """Return a component with its lost tensors and entries taken from the other checkpoint, if that has them.

    Also returns remarks on tensors that do not fit.
    """
    remarks = []
    layout = component.salvaged
    assert layout is not None
    own = own_names(layout)
    tensors, blobs = dict(layout.tensors), dict(layout.blobs)
    for name in [name for name, tensor in tensors.items() if tensor.is_lost]:
        filling = filler.tensor(own[name])
        if filling is not None and not can_replace(replace(tensors[name], splits=None), filling):
            remarks.append(
                f"did not fill `{name}`: expected {tensors[name].spec}, found {filling.spec} in {filler.path}"
            )
        elif filling is not None:
            faults.note_filled(filling.chunks, str(filler.path))
            tensors[name] = replace(filling, spec=tensors[name].spec)
    for name, blob in list(lost_entries(own_names_of_lost(layout, faults.entries), filler)):
        blobs[name] = blob
        faults.filled_entries[name] = str(filler.path)
        del faults.entries[name]
    for name in absent_from(component, layout, filler, faults):
        filling = filler.tensor(name)
        if filling is not None:
            faults.note_filled(filling.chunks, str(filler.path))
            tensors[name] = filling
            faults.unplaced.pop(name, None)
    return replace(component, salvaged=replace(layout, tensors=tensors, blobs=blobs)), remarks


def absent_from(component: Component, layout: Layout, filler: FillSource, faults: Faults) -> list[str]:
    """Return the names of tensors that a component should have but has no shapes for.

    If the contents of some of its files are unknown, these include all weights that only the other checkpoint has.
    """
    absent = [name for name in faults.unplaced if name not in layout.names]
    if faults.unnamed and component.is_model and not layout.keys:
        absent += sorted(filler.weights - set(layout.names) - set(absent))
    return absent


def own_names_of_lost(layout: Layout, names: Iterable[str]) -> dict[str, str]:
    """Return the names of lost entries without the prefix of the model."""
    lost = {name: Blob("", 0, 0, b"") for name in names if name in layout.keys or not layout.keys}
    return {
        name: own for name, own in own_names(replace(layout, blobs={**layout.blobs, **lost})).items() if name in lost
    }


def lost_entries(lost: Mapping[str, str], filler: FillSource) -> Iterator[tuple[str, Blob]]:
    """Yield the lost entries that the other checkpoint has."""
    for name, own in lost.items():
        blob = filler.entry(own)
        if blob is not None:
            yield name, blob

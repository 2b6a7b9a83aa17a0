"""Divide a state among the directories of a checkpoint in the making, each in a format of its own, and finish these.

There is one, but where the format has no place for entries that are no tensors: then these and all else that is not
the model's go into a DCP directory `training` beside the weights, which have the names that the model gives them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from torch.distributed.checkpoint.storage import WriteResult

from ckptkit.checkpoints.seal import read_made, seal, write_manifest
from ckptkit.errors import Corrupt, Mismatch, SeveralModels, Unsupported
from ckptkit.formats import EntryWriter, FormatWriter, get_writer, locate
from ckptkit.io.allocation import write_parts
from ckptkit.io.crc32 import whole_crc32
from ckptkit.layout import Blob, Extent, FileOffset, KeyPath, Layout, NewFile, WriterOptions, edits
from ckptkit.models.names.weights import find_model_key, keys_below, training_state
from ckptkit.trainers.ckptkit import TRAINING

_BESIDE = "dcp"  # the format of `training`


@dataclass(frozen=True, slots=True)
class Portion:
    """A directory in the checkpoint, "" for the whole, with a format and the entries that it is to hold.

    `planned` has these by the names under which they are stored; `names` gives those for the names of the state.
    """

    directory: str
    format: str
    planned: Layout
    names: Mapping[str, str]

    @property
    def root(self) -> Path:
        """Return the directory, wherever the checkpoint is being made."""
        return self.planned.root

    def arrange(self, options: WriterOptions, files: Mapping[str, bytes]) -> tuple[NewFile, ...]:
        """Return the files to be made before any data is there, with the small ones that are given."""
        made = get_writer(self.format).arrange(replace(self.planned, blobs={}), options)
        return *made, *(NewFile(name, len(content), ((0, content),)) for name, content in files.items())

    def finish(self, options: WriterOptions, sizes: Mapping[str, int], results: Iterable[WriteResult]) -> None:
        """Complete the files, with the entries and the checksums that needed the data, and add the manifest.

        Raises `Corrupt` if not all was written that was planned.
        """
        results = [result for result in results if result.index.fqn in self.names]
        written = sum(result.size_in_bytes for result in results if not isinstance(result.storage_data, Blob))
        planned = sum({chunk: chunk.length for t in self.planned.tensors.values() for chunk in t.chunks}.values())
        if written != planned:
            raise Corrupt(f"expected {planned} written bytes, found {written}", path=self.root)
        writer = get_writer(self.format)
        blobs = self._embed(writer, options, results)
        made = locate(read_made(writer, self.root, self.planned.tensors))
        checksums = add_up(made, results)
        seal(writer, made, checksums)
        write_manifest(made, checksums, {*sizes, *blobs}, anew=True, entries=chain(*blobs.values()))

    def _embed(
        self, writer: FormatWriter, options: WriterOptions, results: Iterable[WriteResult]
    ) -> dict[str, list[Extent]]:
        """Make the entries a part of the checkpoint; return the files that they remain in, with the bytes of each."""
        found = {self.names[r.index.fqn]: r.storage_data for r in results if isinstance(r.storage_data, Blob)}
        if found.keys() != self.planned.blobs.keys():
            name = min(found.keys() ^ self.planned.blobs.keys())
            raise Corrupt("the entry was not written by the rank that has it", path=self.root, tensor=name)
        if not found:
            return {}
        assert isinstance(writer, EntryWriter)
        blobs = {name: found[name] for name in self.planned.blobs}
        write_parts(self.root, writer.embed(replace(self.planned, blobs=blobs), options))
        extents: dict[str, list[Extent]] = {}
        for name, blob in blobs.items():
            extents.setdefault(blob.path, []).append(Extent(blob.path, blob.offset, blob.length, blob.crc32, name))
        for path in [path for path in extents if not writer.owns(path)]:
            (self.root / path).unlink()
            del extents[path]
        return extents


def divide(planned: Layout, to: str) -> tuple[Portion, ...]:
    """Return the portions of a checkpoint of this format, of the entries of a state.

    A format without a place for other entries gets the model's weights, by the names that the model gives them; all
    else gets a directory of its own. Several models are not taken apart. Raises `Unsupported` where an entry that is no
    tensor lies among weights that have no place for it, or where it does not show which tensors are the weights.
    """
    prefix = None if isinstance(get_writer(to), EntryWriter) else find_key(planned)
    if prefix is None:
        return (Portion("", to, planned, {name: name for name in planned.names}),)
    rest = training_state(planned, prefix)
    names = {name: key[len(prefix) :] for name, key in keys_below(planned, prefix) if key[len(prefix)] not in rest}
    weights = {name: ".".join(map(str, key)) for name, key in names.items()}
    for name in planned.blobs:
        if prefix and planned.key(name)[: len(prefix)] == prefix:
            inner = ".".join(map(str, planned.key(name)[len(prefix) :]))
            hint = f"drop it, or save to a format that has a place for it, such as `{_BESIDE}`"
            raise Unsupported(
                "only tensors can be saved in this format, and this entry is not a tensor", tensor=inner, hint=hint
            )
    model = edits.rename(edits.select(planned, weights.__contains__), weights.__getitem__)
    if len(weights) == len(planned.names):
        return (Portion("", to, model, weights),)
    beside = replace(edits.select(planned, lambda name: name not in weights), root=planned.root / TRAINING)
    return (
        Portion("", to, model, weights),
        Portion(TRAINING, _BESIDE, beside, {name: name for name in beside.names}),
    )


def find_key(planned: Layout) -> KeyPath | None:
    """Return the key path of the model in a state, None for a state of tensors in which no model shows."""
    try:
        return find_model_key(planned)
    except (Mismatch, SeveralModels):
        if planned.blobs:
            raise
        return None


def add_up(made: Layout, results: Iterable[WriteResult]) -> dict[FileOffset, int]:
    """Return the CRC-32 of every chunk that has bytes, from what each result adds to its sum."""
    sums: dict[FileOffset, int] = {}
    for result in results:
        if not isinstance(result.storage_data, Blob):
            for place, part in result.storage_data.items():
                sums[place] = sums.get(place, 0) ^ part
    chunks = {(c.path, c.offset): c for tensor in made.tensors.values() for c in tensor.chunks if c.box.numel}
    return {place: whole_crc32(sums[place], chunk.length) for place, chunk in chunks.items()}

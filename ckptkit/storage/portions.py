"""Divide a state among the directories of a new checkpoint, each with a format of its own, and finalize them.

One directory is enough, unless the format cannot store non-tensor entries. Then these entries, and all others that do
not belong to the model, go into a DCP directory `training` beside the weights. The weights have the model's own names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from torch.distributed.checkpoint.storage import WriteResult

from ckptkit.checkpoints.finalize_files import finalize_files, read_output_layout, write_manifest
from ckptkit.errors import Corrupt, Mismatch, SeveralModels, Unsupported, warn
from ckptkit.formats import EntryWriter, FormatWriter, get_writer, locate_all_chunks
from ckptkit.io.allocation import write_patches
from ckptkit.io.crc32 import crc32_from_contributions
from ckptkit.layout import Blob, Extent, FileOffset, Layout, NewFile, WriterOptions, edits
from ckptkit.layout.wrappers import INSIDE
from ckptkit.models.names.weights import find_model_and_training_keys, keys_below
from ckptkit.storage.plans import written_entries
from ckptkit.trainers.ckptkit import TRAINING

_TRAINING_FORMAT = "dcp"  # format of the directory `training`


@dataclass(frozen=True, slots=True)
class Portion:
    """A directory in the checkpoint ("" for the checkpoint itself), with its format and the entries to store there.

    `planned` has the entries under their stored names; `names` maps names in the state to stored names.
    """

    directory: str
    format: str
    planned: Layout
    names: Mapping[str, str]

    @property
    def root(self) -> Path:
        return self.planned.root

    def lay_out_files(self, options: WriterOptions, files: Mapping[str, bytes]) -> tuple[NewFile, ...]:
        """Return the files to create before any data arrives, including the given small `files`."""
        new_files = get_writer(self.format).lay_out_files(replace(self.planned, blobs={}), options)
        return *new_files, *(NewFile(name, len(content), ((0, content),)) for name, content in files.items())

    def finalize_files(self, options: WriterOptions, sizes: Mapping[str, int], results: Iterable[WriteResult]) -> None:
        """Finalize the files: add non-tensor entries and checksums, which need the data, and write the manifest.

        Raises `Corrupt` if less was written than planned.
        """
        results = [result for result in results if result.index.fqn in self.names]
        written = sum(result.size_in_bytes for result in results if not isinstance(result.storage_data, Blob))
        planned = sum({chunk: chunk.length for t in self.planned.tensors.values() for chunk in t.chunks}.values())
        if written != planned:
            raise Corrupt(f"expected {planned} written bytes, found {written}", path=self.root)
        writer = get_writer(self.format)
        blobs = self._embed_entries(writer, options, results)
        written_layout = locate_all_chunks(read_output_layout(writer, self.root, self.planned.tensors))
        sums: dict[FileOffset, int] = {}  # of every chunk, from the contributions of all results
        for result in results:
            if not isinstance(result.storage_data, Blob):
                for place, part in result.storage_data.items():
                    sums[place] = sums.get(place, 0) ^ part
        stored = (chunk for tensor in written_layout.tensors.values() for chunk in tensor.chunks if chunk.box.numel)
        chunks = {(chunk.path, chunk.offset): chunk for chunk in stored}
        checksums = {place: crc32_from_contributions(sums[place], chunk.length) for place, chunk in chunks.items()}
        finalize_files(writer, written_layout, checksums)
        write_manifest(written_layout, checksums, {*sizes, *blobs}, must_be_new=True, entries=chain(*blobs.values()))

    def _embed_entries(
        self, writer: FormatWriter, options: WriterOptions, results: Iterable[WriteResult]
    ) -> dict[str, list[Extent]]:
        """Move the entries into the checkpoint's files.

        Returns the files that they stay in, with the byte range of each.
        """
        blobs = written_entries(results, self.planned, self.names)
        if not blobs:
            return {}
        assert isinstance(writer, EntryWriter)
        write_patches(self.root, writer.patches_for_non_tensors(replace(self.planned, blobs=blobs), options))
        extents: dict[str, list[Extent]] = {}
        for name, blob in blobs.items():
            extents.setdefault(blob.path, []).append(Extent(blob.path, blob.offset, blob.length, blob.crc32, name))
        for path in [path for path in extents if not writer.owns_file(path)]:
            (self.root / path).unlink()
            del extents[path]
        return extents


def split_model_from_training(planned: Layout, format_name: str) -> tuple[Portion, ...]:
    """Return the portions of a checkpoint in this format, for the entries of a state.

    A format without non-tensor entries gets the model's weights under the model's own names; everything else gets its
    own directory. Several models, and tensors among which no model is recognizable, are not divided. Raises
    `Unsupported` if a non-tensor entry is among the weights, or if it is ambiguous which tensors are the weights.
    """
    whole = (Portion("", format_name, planned, {name: name for name in planned.names}),)
    if isinstance(get_writer(format_name), EntryWriter):
        return whole
    try:
        prefix, training_at = find_model_and_training_keys(planned)
    except (Mismatch, SeveralModels):
        if planned.blobs:
            raise
        return whole
    below = {name: key[len(prefix) :] for name, key in keys_below(planned, prefix)}
    weights = {name: ".".join(map(str, key)) for name, key in below.items() if key[0] not in training_at[-1]}
    for name in planned.blobs:
        if prefix and planned.key(name)[: len(prefix)] == prefix:
            inner = ".".join(map(str, planned.key(name)[len(prefix) :]))
            hint = f"drop it, or save to a format that has a place for it, such as `{_TRAINING_FORMAT}`"
            raise Unsupported(
                "only tensors can be saved in this format, and this entry is not a tensor", tensor=inner, hint=hint
            )
    warn_of_wrapper_prefixes(weights.values())
    model = edits.select_and_rename_tensors(planned, weights)
    if len(weights) == len(planned.names):
        return (Portion("", format_name, model, weights),)
    beside = replace(edits.select_entries(planned, lambda name: name not in weights), root=planned.root / TRAINING)
    return (
        Portion("", format_name, model, weights),
        Portion(TRAINING, _TRAINING_FORMAT, beside, {name: name for name in beside.names}),
    )


def warn_of_wrapper_prefixes(names: Iterable[str]) -> None:
    """Warn of the first weight whose name has the prefix of a wrapper, which no loader of a model removes."""
    for name in names:
        prefix = next((prefix for prefix in INSIDE if prefix.text in f".{name}"), None)
        if prefix is not None:
            way = "save torch's `get_model_state_dict(model)` to drop them"
            warn(f"{name}: names have the prefix `{prefix.text}` (added by {prefix.whose}), and keep it; {way}")
            return

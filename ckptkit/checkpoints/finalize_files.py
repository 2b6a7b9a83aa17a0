"""Create the files of one directory of an output, and finalize them once their data is written.

create_files -> read_output_layout -> (the data is written) -> finalize_files -> write_manifest

A conversion fills the files by its plan, a save from the memory of every rank; both share the other steps. `ckptkit
manifest` computes the checksums of existing checkpoints.
"""

from __future__ import annotations

import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path, PurePath
from typing import NamedTuple

from ckptkit.checkpoints.manifest import NAME, FileSum, Manifest
from ckptkit.engine.check_sources import range_start_of
from ckptkit.engine.scan import file_checksum
from ckptkit.errors import Mismatch, translate_os_errors
from ckptkit.formats import FormatWriter
from ckptkit.io.allocation import create_file, make_directory, write_new_file, write_patches
from ckptkit.io.file import file_size, names_in
from ckptkit.io.joined_path import local_paths_of
from ckptkit.io.staging import publish_file
from ckptkit.layout import Chunk, Extent, FileOffset, Layout, NewFile, edits
from ckptkit.models.companions import CONFIG
from ckptkit.words import count


def create_files(root: Path, files: Iterable[NewFile], *, must_be_new: bool, is_sparse: bool = False) -> None:
    """Create files in directory `root` with their final size and the bytes known beforehand.

    If `must_be_new` is false, a file may exist already; it keeps its content outside the bytes known beforehand. If
    `is_sparse`, unwritten ranges use no disk space.
    """
    make_directory(root)
    for file in files:
        make_directory((root / file.name).parent)
        create_file(root / file.name, file.nbytes, file.parts, must_be_new=must_be_new, is_sparse=is_sparse)


def read_output_layout(
    writer: FormatWriter, root: Path, tensors: Collection[str], entries: Collection[str] = ()
) -> Layout:
    """Return the byte ranges for tensors and other entries in directory `root`, as the format's reader reports them.

    The chunks are not located yet. Raises `Mismatch` if the format has lost a tensor.
    """
    names = {*tensors, *entries}
    with translate_os_errors(root):
        made = edits.select_entries(writer.read(root), names.__contains__)
    lost = set(tensors) - made.tensors.keys()
    if lost:
        raise Mismatch(f"{writer.name} would lose {count(len(lost), 'tensor')}", path=root, tensor=min(lost))
    return made


def finalize_files(writer: FormatWriter, output: Layout, checksums: Mapping[FileOffset, int]) -> None:
    """Write the bytes that depend on the data, such as checksums in headers.

    `checksums` has the CRC-32 of every chunk of `output`. Raises `Corrupt` if the format's own library reads something
    other than `output`.
    """
    write_patches(output.root, writer.patches_after_data(output, checksums))
    writer.check_with_own_library(output)


def write_manifest(
    output: Layout,
    checksums: Mapping[FileOffset, int],
    names: Iterable[str],
    *,
    must_be_new: bool,
    entries: Iterable[Extent] = (),
    source: Mapping[str, str] | None = None,
) -> Manifest:
    """Write and return the manifest of the files `names`; only bytes without a checksum are read.

    `checksums` has the CRC-32 of chunks and blobs of `output`, `entries` are further byte ranges with a known CRC-32.
    `source` is the checkpoint that the output was made from. If `must_be_new` is false, a manifest may exist already.
    """
    sums = file_checksums(output.root, names, (*checksummed_extents(output, checksums), *entries))
    manifest = Manifest(sums, tensor_checksums(output, checksums), source)
    write_new_file(output.root / NAME, manifest.to_bytes(), must_be_new=must_be_new)
    return manifest


def checksummed_extents(output: Layout, checksums: Mapping[FileOffset, int]) -> Iterator[Extent]:
    """Yield the byte range of each chunk and blob that has a checksum."""
    for name, stored in output.chunks_and_blobs:
        offset, length = stored.checksummed_range if isinstance(stored, Chunk) else (stored.offset, stored.length)
        if length and (stored.path, offset) in checksums:
            yield Extent(stored.path, offset, length, checksums[stored.path, offset], name)


def tensor_checksums(output: Layout, checksums: Mapping[FileOffset, int]) -> dict[str, int]:
    """Return the CRC-32 of each tensor that is a single chunk, by name; 0 (that of no bytes) for an empty one."""
    whole = {name: tensor.chunks[0] for name, tensor in output.tensors.items() if len(tensor.chunks) == 1}
    return {name: checksums[range_start_of(chunk)] if chunk.box.numel else 0 for name, chunk in whole.items()}


def file_checksums(root: Path, names: Iterable[str], extents: Iterable[Extent]) -> dict[str, FileSum]:
    """Return the sizes and checksums of files in `root`; only bytes outside the `extents` are read."""
    known: dict[str, list[Extent]] = {}
    for extent in extents:
        known.setdefault(extent.path, []).append(extent)
    sums = {}
    for name in sorted(names):
        size = file_size(root / name)
        sums[name] = FileSum(size, file_checksum(root, name, size, known.get(name, ())))
    return sums


def replace_manifest(root: Path, manifest: Manifest) -> None:
    """Write the manifest of a checkpoint atomically, because others may be reading it.

    For joined directories, replaces every existing manifest, or writes to the first directory.
    """
    for path in local_paths_of(root / NAME) or [next(iter(local_paths_of(root)), root) / NAME]:
        publish_file(path, manifest.to_bytes(), overwrite=True)


def regular_files_in(root: Path) -> set[str]:
    """Return the names of all regular files directly in `root`, except a manifest."""
    return {name for name in names_in(root) if stat.S_ISREG((root / name).lstat().st_mode)} - {NAME}


class PlacedFiles(NamedTuple):
    """The files of one component, in directory `place` of the checkpoint, and the files that describe the component."""

    place: str
    files: Collection[str]
    descriptions: Collection[str]


def files_to_write_last(
    components: Iterable[PlacedFiles], names: Collection[str], *, is_for_loaders: bool
) -> tuple[str, ...]:
    """Return the files without which no reader takes the rest for a checkpoint, in the order to write them.

    `components` begin with the model. The manifests among all `names` come first. Then, for each component, the files
    that describe it (or else its last file), the model's component last. config.json is last in a Hugging Face model
    (`is_for_loaders`); otherwise it comes with the manifests.
    """
    manifests = [name for name in sorted(names) if PurePath(name).name == NAME]
    described = []
    for directory, files, descriptions in reversed(list(components)):
        last = [name for name in sorted(files) if name in descriptions] or sorted(files)[-1:]
        described += [str(PurePath(directory, name)) for name in last]
    config = [CONFIG] if CONFIG in names else []
    marks = [*manifests, *described, *config] if is_for_loaders else [*manifests, *config, *described]
    return tuple(dict.fromkeys(marks))

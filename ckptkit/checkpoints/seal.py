"""Create the files of one directory of an output, and finalize them once their data is written.

create_files -> read_made -> (the data is written) -> seal -> write_manifest

A conversion fills the files by its plan, a save from the memory of every rank; both share the other steps. `ckptkit
manifest` computes the checksums of existing checkpoints.
"""

from __future__ import annotations

import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path, PurePath
from typing import NamedTuple

from ckptkit.checkpoints.manifest import NAME, FileSum, Manifest
from ckptkit.engine.check_sources import bytes_at
from ckptkit.engine.scan import sum_file
from ckptkit.errors import Mismatch, translate_os_errors
from ckptkit.formats import FormatWriter
from ckptkit.io.allocation import create_file, make_folder, write_file, write_parts
from ckptkit.io.file import file_size, names_in
from ckptkit.io.joined import roots_of
from ckptkit.io.staging import publish
from ckptkit.layout import Chunk, Extent, FileOffset, Layout, NewFile, edits
from ckptkit.models.companions import CONFIG
from ckptkit.words import count


def create_files(root: Path, files: Iterable[NewFile], *, anew: bool, is_sparse: bool = False) -> None:
    """Create files in directory `root` with their final size and the bytes known beforehand.

    If `anew` is false, a file may exist already; it keeps its content outside the bytes known beforehand. If
    `is_sparse`, unwritten ranges use no disk space.
    """
    make_folder(root)
    for file in files:
        make_folder((root / file.name).parent)
        create_file(root / file.name, file.nbytes, file.parts, anew=anew, is_sparse=is_sparse)


def read_made(writer: FormatWriter, root: Path, tensors: Collection[str], entries: Collection[str] = ()) -> Layout:
    """Return the byte ranges for tensors and other entries in directory `root`, as the format's reader reports them.

    The chunks are not located yet. Raises `Mismatch` if the format has lost a tensor.
    """
    names = {*tensors, *entries}
    with translate_os_errors(root):
        made = edits.select(writer.read(root), names.__contains__)
    lost = set(tensors) - made.tensors.keys()
    if lost:
        raise Mismatch(f"{writer.name} would lose {count(len(lost), 'tensor')}", path=root, tensor=min(lost))
    return made


def seal(writer: FormatWriter, made: Layout, checksums: Mapping[FileOffset, int]) -> None:
    """Write the bytes that depend on the data, such as checksums in headers.

    `checksums` has the CRC-32 of every chunk of `made`. Raises `Corrupt` if the format's own library reads something
    other than `made`.
    """
    write_parts(made.root, writer.seal(made, checksums))
    writer.check(made)


def write_manifest(
    made: Layout,
    checksums: Mapping[FileOffset, int],
    names: Iterable[str],
    *,
    anew: bool,
    entries: Iterable[Extent] = (),
    source: Mapping[str, str] | None = None,
) -> Manifest:
    """Write and return the manifest of the files `names`; only bytes without a checksum are read.

    `checksums` has the CRC-32 of chunks and blobs of `made`, `entries` are further byte ranges with a known CRC-32.
    `source` is the checkpoint that the output was made from. If `anew` is false, a manifest may exist already.
    """
    sums = sum_files(made.root, names, (*extents_of(made, checksums), *entries))
    manifest = Manifest(sums, sums_of_tensors(made, checksums), source)
    write_file(made.root / NAME, manifest.to_bytes(), anew=anew)
    return manifest


def extents_of(made: Layout, checksums: Mapping[FileOffset, int]) -> Iterator[Extent]:
    """Yield the byte range of each chunk and blob that has a checksum."""
    for name, stored in made.stored:
        offset, length = stored.bytes if isinstance(stored, Chunk) else (stored.offset, stored.length)
        if length and (stored.path, offset) in checksums:
            yield Extent(stored.path, offset, length, checksums[stored.path, offset], name)


def sums_of_tensors(made: Layout, checksums: Mapping[FileOffset, int]) -> dict[str, int]:
    """Return the CRC-32 of each tensor that is a single chunk, by name; 0 (that of no bytes) for an empty one."""
    whole = {name: tensor.chunks[0] for name, tensor in made.tensors.items() if len(tensor.chunks) == 1}
    return {name: checksums[bytes_at(chunk)] if chunk.box.numel else 0 for name, chunk in whole.items()}


def sum_files(root: Path, names: Iterable[str], extents: Iterable[Extent]) -> dict[str, FileSum]:
    """Return the sizes and checksums of files in `root`; only bytes outside the `extents` are read."""
    known: dict[str, list[Extent]] = {}
    for extent in extents:
        known.setdefault(extent.path, []).append(extent)
    sums = {}
    for name in sorted(names):
        size = file_size(root / name)
        sums[name] = FileSum(size, sum_file(root, name, size, known.get(name, ())))
    return sums


def replace_manifest(root: Path, manifest: Manifest) -> None:
    """Write the manifest of a checkpoint atomically, because others may be reading it.

    For joined directories, replaces every existing manifest, or writes to the first directory.
    """
    for path in roots_of(root / NAME) or [next(iter(roots_of(root)), root) / NAME]:
        publish(path, manifest.to_bytes(), overwrite=True)


def regular_files_in(root: Path) -> set[str]:
    """Return the names of all regular files directly in `root`, except a manifest."""
    return {name for name in names_in(root) if stat.S_ISREG((root / name).lstat().st_mode)} - {NAME}


class PlacedFiles(NamedTuple):
    """The files of one component, in directory `place` of the checkpoint, and the files that describe the component."""

    place: str
    files: Collection[str]
    descriptions: Collection[str]


def files_to_end_with(
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

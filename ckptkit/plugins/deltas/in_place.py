"""Change a Hugging Face model in place, so that a crash leaves it old, new, or to be completed.

What changes is first written as a delta of absolute values into a hidden directory of the model, the journal, and
forced to the disk. From the rename that gives the journal its name the model is to become new: to write absolute values
twice does no harm, whatever a crash has left in their places.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from ckptkit.checkpoints.manifest import FileSum, read_manifest
from ckptkit.checkpoints.seal import replace_manifest
from ckptkit.engine.compare import fingerprints
from ckptkit.engine.scan import sum_file
from ckptkit.errors import CkptError, Corrupt, Incomplete, Mismatch, translate_os_errors
from ckptkit.formats import find_format
from ckptkit.formats.protocols import JOURNAL
from ckptkit.io.allocation import make_folder
from ckptkit.io.crc32 import crc32
from ckptkit.io.disk import again, lock_path, remove, sync_path, sync_tree
from ckptkit.io.file import OpenFiles, file_size, is_there, read_at
from ckptkit.io.locks import acquire, release
from ckptkit.io.staging import clear_dead
from ckptkit.layout import Chunk, Extent, FileOffset, Layout, edits
from ckptkit.plugins.deltas.chain import put_into
from ckptkit.plugins.deltas.changes import changes_in, load_changes
from ckptkit.plugins.deltas.new_blocks import Successor, blocks_of
from ckptkit.plugins.deltas.open_delta import WHOLE, Delta, open_delta
from ckptkit.plugins.deltas.record import DeltaRecord
from ckptkit.plugins.deltas.spool import Spool
from ckptkit.plugins.deltas.write_delta import FoundChanges, write_delta

_SPOOL = ".changes"


def write_log(root: Path, base: Layout, sums: Mapping[str, int], successor: Successor) -> DeltaRecord:
    """Write the delta from a base with these sums to its successor into directory `root`, which is made.

    Raises `Corrupt` if the bytes of the base are not those of its sums.
    """
    make_folder(root)
    after = dict(sums)
    with Spool(root / _SPOOL, base.specs) as spool:
        for name in successor.specs:
            old = new = 0
            for block in successor.blocks(name):
                old, new = crc32(block.old, old), crc32(block.new, new)
                spool.add(name, block.first, changes_in(block.old, block.new, base.specs[name].dtype.itemsize))
            if old != sums[name]:
                raise Corrupt(f"expected CRC-32 {sums[name]:08x}, found {old:08x}", path=base.root, tensor=name)
            after[name] = new

        def fill(wanted: Layout, names: Mapping[str, str]) -> dict[FileOffset, int]:
            return {place: crc for key, name in names.items() for place, crc in fill_one(wanted, key, name)}

        def fill_one(wanted: Layout, key: str, name: str) -> Iterator[tuple[FileOffset, int]]:
            chunk = wanted.tensors[key].chunks[0]
            at = crc = 0
            with OpenFiles(wanted.root, writable=True) as files:
                for block in successor.blocks(name):
                    files[chunk.path].write_at(block.new, chunk.offset + at)
                    at, crc = at + len(block.new), crc32(block.new, crc)
            yield (chunk.path, chunk.offset), crc

        record = write_delta(root, FoundChanges(base.specs, sums, after, spool, fill))
    remove(root / _SPOOL)
    return record


_NEW, _OLD = f"{JOURNAL}.new", f"{JOURNAL}.old"
_PIECE = 1 << 18  # bytes that are read, changed and written at once


@contextmanager
def locked(local: Path) -> Iterator[None]:
    """Keep others from writing the model while the block runs. Raises `Occupied` if somebody does."""
    path = lock_path(local.absolute())
    with translate_os_errors(local):
        lock = acquire(path)
    try:
        yield
    finally:
        release(lock, path)


def has_journal(local: Path) -> bool:
    """Return whether a change of the model was interrupted that has to be completed."""
    return is_there(local / JOURNAL)


def clear(local: Path) -> None:
    """Remove what interrupted calls left, except for a journal."""
    with translate_os_errors(local):
        for name in (_NEW, _OLD):
            remove(local / name)
    clear_dead(local)


def change(local: Path, base: Layout, sums: Mapping[str, int], successor: Successor) -> DeltaRecord:
    """Write the journal of a change from `base` to `successor`."""
    made = local / _NEW
    try:
        record = write_log(made, base, sums, successor)
        with translate_os_errors(local):
            sync_tree(made)
            again(os.rename, made, local / JOURNAL)
            sync_path(local)
    except BaseException:
        with translate_os_errors(local):
            remove(made)
        raise
    return record


def complete(local: Path) -> Delta:
    """Do what the journal says, and remove it. Return what was changed.

    Raises `Corrupt`, and leaves the journal, if the model then is not what the journal says it should be.
    """
    log = open_delta(local / JOURNAL)
    layout = layout_of(local)
    for name, tensor in log.record.tensors.items():
        if layout.tensors[name].spec != tensor.spec:
            raise Mismatch(f"expected {tensor.spec}, found {layout.tensors[name].spec}", path=local, tensor=name)
    with OpenFiles(local, writable=True) as written, OpenFiles(local) as there:
        for name in log.record.tensors:
            chunk = layout.tensors[name].chunks[0]
            for start, data in pieces_of(log, name, chunk, there):
                written[chunk.path].write_at(data, chunk.offset + start)
    touched = sorted({layout.tensors[name].chunks[0].path for name in log.record.tensors})
    for file in touched:
        sync_path(local / file)
    check_result(local, layout, log.record)
    renew_manifest(local, layout, log.record, touched)
    with translate_os_errors(local):
        again(os.rename, local / JOURNAL, local / _OLD)
        sync_path(local)
    clear(local)
    return log


def layout_of(local: Path) -> Layout:
    """Return where the tensors of the model lie, though it has a journal."""

    def report(problem: CkptError) -> None:
        if not (isinstance(problem, Incomplete) and problem.path == local / JOURNAL):
            raise problem

    return find_format(local).read(local, report)


def pieces_of(log: Delta, name: str, chunk: Chunk, files: OpenFiles) -> Iterator[tuple[int, memoryview]]:
    """Yield the bytes of a tensor that are not yet as they are to be, each with where it begins."""
    if log.holds_whole(name):
        for first, data in blocks_of(log.layout, name + WHOLE):
            yield first * chunk.dtype.itemsize, memoryview(data)
        return
    changes = load_changes(log, name)
    width = chunk.dtype.itemsize
    for number in np.unique(changes.positions // (_PIECE // width)):
        start = int(number) * (_PIECE // width) * width
        old = read_at(files[chunk.path], min(_PIECE // width * width, chunk.length - start), chunk.offset + start)
        new = memoryview(bytearray(old))
        put_into(new, start // width, changes, width)
        if new != old:
            yield start, new


def check_result(local: Path, layout: Layout, record: DeltaRecord) -> None:
    """Raise `Corrupt` unless each tensor that changed has the CRC-32 that it should have."""
    found = fingerprints(edits.select(layout, record.tensors.__contains__))
    for name, tensor in record.tensors.items():
        if found[name] != tensor.crc32_new:
            message = f"expected CRC-32 {tensor.crc32_new:08x} after the change, found {found[name]:08x}"
            hint = "something else wrote this model: copy it from its source again"
            raise Corrupt(message, path=local, tensor=name, hint=hint)


def renew_manifest(local: Path, layout: Layout, record: DeltaRecord, files: list[str]) -> None:
    """Put the new checksums into the manifest, if the model has one."""
    manifest = read_manifest(local)
    if manifest is None:
        return
    sums = {**manifest.tensors, **{name: tensor.crc32_new for name, tensor in record.tensors.items()}}
    extents = [
        Extent(chunk.path, chunk.offset, chunk.length, sums.get(name), name)
        for name, tensor in layout.tensors.items()
        for chunk in tensor.chunks
        if chunk.length
    ]
    renewed = {}
    for file in files:
        size = file_size(local / file)
        renewed[file] = FileSum(size, sum_file(local, file, size, [one for one in extents if one.path == file]))
    replace_manifest(local, replace(manifest, files={**manifest.files, **renewed}, tensors=sums))

"""Change a Hugging Face model in place, so that after a crash it is old, new, or can be completed.

The changes are first written as a delta of absolute values into a hidden directory of the model, the journal, and
synced to disk. Renaming that directory to its final name commits the change. After that, completing it is idempotent:
absolute values can be written again over any half-written state.
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
from ckptkit.engine.compare import row_major_checksums
from ckptkit.engine.scan import file_checksum
from ckptkit.errors import CkptError, Corrupt, Incomplete, Mismatch, translate_os_errors
from ckptkit.formats import require_known_format
from ckptkit.formats.protocols import JOURNAL
from ckptkit.io.allocation import make_directory
from ckptkit.io.crc32 import crc32
from ckptkit.io.disk import lock_path, remove_path, retry_interrupted, sync_directory_tree, sync_path
from ckptkit.io.file import OpenFiles, file_size, read_at
from ckptkit.io.locks import acquire_lock, release_lock
from ckptkit.io.staging import remove_dead_leftovers
from ckptkit.layout import Chunk, Extent, FileOffset, Layout, edits
from ckptkit.plugins.deltas.chain import DeltaChain, read_blocks_in_order, write_changes_into
from ckptkit.plugins.deltas.changes import differing_elements, load_changes
from ckptkit.plugins.deltas.open_delta import WHOLE, Delta, open_delta
from ckptkit.plugins.deltas.record import DeltaRecord
from ckptkit.plugins.deltas.write_delta import FoundChanges, Spool, write_delta

_SPOOL = ".changes"
_NEW, _OLD = f"{JOURNAL}.new", f"{JOURNAL}.old"
_PIECE = 1 << 18  # bytes per read-modify-write


@contextmanager
def locked_model(local: Path) -> Iterator[None]:
    """Hold an exclusive lock on the model. Raises `Occupied` if another process has the lock."""
    path = lock_path(local.absolute())
    with translate_os_errors(local):
        lock = acquire_lock(path)
    try:
        yield
    finally:
        release_lock(lock, path)


def remove_leftovers(local: Path) -> None:
    """Remove the leftovers of interrupted calls, except the journal."""
    with translate_os_errors(local):
        for name in (_NEW, _OLD):
            remove_path(local / name)
    remove_dead_leftovers(local)


def write_change_journal(local: Path, base: Layout, sums: Mapping[str, int], chain: DeltaChain) -> DeltaRecord:
    """Write the journal of a change from `base` to the result of `chain`: a delta of absolute values.

    Raises `Corrupt` if the data of `base` does not match `sums`.
    """
    new_journal = local / _NEW
    after = {**sums, **chain.final_checksums}

    def fill_tensors(wanted: Layout, names: Mapping[str, str]) -> dict[FileOffset, int]:
        chunks = {name: wanted.tensors[key].chunks[0] for key, name in names.items()}
        with OpenFiles(wanted.root, writable=True) as files:
            for name, chunk in chunks.items():
                position = chunk.offset
                for block in chain.new_blocks_of(base, name):
                    files[chunk.path].write_at(block.new, position)
                    position += len(block.new)
        return {(chunk.path, chunk.offset): after[name] for name, chunk in chunks.items()}

    try:
        make_directory(new_journal)
        with Spool(new_journal / _SPOOL, base.specs) as spool:
            for name in chain.specs:
                crc, itemsize = 0, base.specs[name].dtype.itemsize
                for block in chain.new_blocks_of(base, name):
                    crc = crc32(block.old, crc)
                    spool.add_block_changes(name, block.first, differing_elements(block.old, block.new, itemsize))
                if crc != sums[name]:
                    message = f"expected CRC-32 {sums[name]:08x}, found {crc:08x}"
                    raise Corrupt(message, path=base.root, tensor=name)
            record = write_delta(new_journal, FoundChanges(base.specs, sums, after, spool, fill_tensors))
        with translate_os_errors(local):
            remove_path(new_journal / _SPOOL)
            sync_directory_tree(new_journal)
            # this rename commits the change: after it, a crash is completed and not undone
            retry_interrupted(os.rename, new_journal, local / JOURNAL)
            sync_path(local)
    except BaseException:
        with translate_os_errors(local):
            remove_path(new_journal)
        raise
    return record


def complete_journal(local: Path) -> Delta:
    """Apply the journal to the model, remove the journal, and return the applied delta.

    Raises `Corrupt` and keeps the journal if the model does not match the journal afterwards.
    """
    log = open_delta(local / JOURNAL)

    def report(problem: CkptError) -> None:
        if not (isinstance(problem, Incomplete) and problem.path == local / JOURNAL):
            raise problem

    layout = require_known_format(local).read(local, report)
    for name, tensor in log.record.tensors.items():
        if layout.tensors[name].spec != tensor.spec:
            raise Mismatch(f"expected {tensor.spec}, found {layout.tensors[name].spec}", path=local, tensor=name)
    with OpenFiles(local, writable=True) as written, OpenFiles(local) as read_files:
        for name in log.record.tensors:
            chunk = layout.tensors[name].chunks[0]
            for start, data in unfinished_ranges(log, name, chunk, read_files):
                written[chunk.path].write_at(data, chunk.offset + start)
    touched = sorted({layout.tensors[name].chunks[0].path for name in log.record.tensors})
    for file in touched:
        sync_path(local / file)
    sums = row_major_checksums(edits.select_entries(layout, log.record.tensors.__contains__))
    for name, tensor in log.record.tensors.items():
        if sums[name] != tensor.crc32_new:
            message = f"expected CRC-32 {tensor.crc32_new:08x} after the change, found {sums[name]:08x}"
            hint = "something else wrote this model: copy it from its source again"
            raise Corrupt(message, path=local, tensor=name, hint=hint)
    renew_manifest(local, layout, log.record, touched)
    with translate_os_errors(local):
        # last: a crash before this rename repeats the whole change, which is idempotent
        retry_interrupted(os.rename, local / JOURNAL, local / _OLD)
        sync_path(local)
    remove_leftovers(local)
    return log


def unfinished_ranges(log: Delta, name: str, chunk: Chunk, files: OpenFiles) -> Iterator[tuple[int, memoryview]]:
    """Yield the byte ranges of a tensor that still differ from the journal, each with its start offset."""
    if log.has_full_tensor(name):
        for first, data in read_blocks_in_order(log.layout, name + WHOLE):
            yield first * chunk.dtype.itemsize, memoryview(data)
        return
    changes = load_changes(log, name)
    width = chunk.dtype.itemsize
    for number in np.unique(changes.positions // (_PIECE // width)):
        start = int(number) * (_PIECE // width) * width
        old = read_at(files[chunk.path], min(_PIECE // width * width, chunk.length - start), chunk.offset + start)
        new = memoryview(bytearray(old))
        write_changes_into(new, start // width, changes, width)
        if new != old:
            yield start, new


def renew_manifest(local: Path, layout: Layout, record: DeltaRecord, files: list[str]) -> None:
    """Update the checksums in the manifest, if the model has one."""
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
        size, inside = file_size(local / file), [extent for extent in extents if extent.path == file]
        renewed[file] = FileSum(size, file_checksum(local, file, size, inside))
    replace_manifest(local, replace(manifest, files={**manifest.files, **renewed}, tensors=sums))

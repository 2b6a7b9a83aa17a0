"""Update a Hugging Face model in place with the deltas that continue from its state.

After a crash the model is old, new, or can be completed. The changes are first written as a delta of absolute values
into a hidden directory of the model, the journal, and synced to disk. Renaming that directory to its final name commits
the change. After that, completing it is idempotent: absolute values can be written again over any half-written state.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.checkpoints.finalize_files import replace_manifest
from ckptkit.checkpoints.manifest import FileSum, read_manifest
from ckptkit.engine.compare import row_major_checksums
from ckptkit.engine.scan import file_checksum
from ckptkit.errors import (
    CkptError,
    Corrupt,
    Incomplete,
    Mismatch,
    NotACheckpoint,
    Unsafe,
    Unsupported,
    Usage,
    translate_os_errors,
)
from ckptkit.formats import locate_all_chunks, require_known_format
from ckptkit.formats.protocols import JOURNAL
from ckptkit.io.allocation import make_directory
from ckptkit.io.crc32 import crc32
from ckptkit.io.disk import lock_path, remove_path, retry_interrupted, sync_directory_tree, sync_path
from ckptkit.io.file import OpenFiles, file_size, is_existing_path, names_in, read_at
from ckptkit.io.locks import acquire_lock, release_lock
from ckptkit.io.path import to_local_path, to_path
from ckptkit.io.staging import remove_orphaned_staging
from ckptkit.layout import Chunk, Extent, FileOffset, Layout, edits
from ckptkit.plugins.deltas.as_consolidated import open_as_consolidated
from ckptkit.plugins.deltas.chain import (
    DeltaChain,
    checksum_by_tensor,
    identity_of_model,
    read_blocks_in_order,
    write_changes_into,
)
from ckptkit.plugins.deltas.changes import differing_elements, load_changes
from ckptkit.plugins.deltas.open_delta import WHOLE, Delta, open_delta
from ckptkit.plugins.deltas.record import RECORD, DeltaRecord, is_complete_delta, is_unfinished_delta, short_id
from ckptkit.plugins.deltas.verify_delta import check_and_count_nan
from ckptkit.plugins.deltas.write_delta import FoundChanges, Spool, write_delta
from ckptkit.summary import Summarized
from ckptkit.words import count

_SPOOL = ".changes"
_NEW, _OLD = f"{JOURNAL}.new", f"{JOURNAL}.old"
_PIECE = 1 << 18  # bytes per read-modify-write


@dataclass(frozen=True, slots=True)
class ChangedInPlace(Summarized):
    """A model at `path` that was changed in place by `deltas`, in this order; empty if it was up to date.

    `is_completed` means that this call first completed an interrupted change. `unfinished` are deltas in the same
    directory that were skipped because their `delta.json` is missing.
    """

    path: Path
    deltas: tuple[Path, ...]
    tensors: int = 0
    elements: int = 0
    is_completed: bool = False
    unfinished: tuple[Path, ...] = ()

    def summary(self) -> Iterator[str]:
        if self.is_completed:
            yield f"{self.path}: completed a change that was interrupted"
        if self.deltas:
            names = ", ".join(path.name for path in self.deltas)
            yield f"{self.path}: changed in place by {names}"
            yield f"{count(self.elements, 'element')} of {count(self.tensors, 'tensor')} changed"
        elif not self.is_completed:
            yield f"{self.path}: up to date, nothing changed"
        for path in self.unfinished:
            yield f"skipped {path.name}: unfinished, its `{RECORD}` is missing"


def apply_in_place(local: str | Path, root: str | Path) -> ChangedInPlace:
    """Update the Hugging Face model in `local` with the deltas in `root` that continue from its state.

    `root` is a delta, or a directory of deltas. A journal in `local` makes this safe. After a crash the model is old or
    new, or the same call completes the update. A server that has mapped the files sees a mixture of old and new
    weights. Raises `Mismatch` if no delta is for this model, and the errors of a bad delta, before it changes anything.
    """
    path, source = to_local_path(local), to_path(root)
    if not path.is_dir():
        raise NotACheckpoint("expected a directory with a Hugging Face model", path=path)
    with locked_model(path):
        remove_leftovers(path)
        is_completed = is_existing_path(path / JOURNAL)
        if is_completed:
            apply_journal(path)
        component = Checkpoint.open(path).model_component
        model = replace(locate_all_chunks(component.layout), blobs={}, twins={}, keys={})
        if model.format != "hf" or model.world_size is not None or component.path != path:
            hint = "run `ckptkit consolidate` first, or `ckptkit apply BASE DELTA OUT`"
            raise Unsupported("expected a Hugging Face model to change in place", path=path, hint=hint)
        sums = checksum_by_tensor(model)
        complete, unfinished = finished_and_unfinished_deltas(source)
        chain = find_continuing_chain(model, sums, complete, source)
        if not chain.deltas:
            return ChangedInPlace(path, (), is_completed=is_completed, unfinished=unfinished)
        for file in sorted(path / name for name in model.files):  # the other names of a file would change too
            hint = f"copy the model with `cp -rL {path} COPY`, and pass COPY"
            if file.is_symlink():
                raise Unsafe("the file is a symbolic link, whose target would change", path=file, hint=hint)
            with translate_os_errors(file):
                links = file.stat().st_nlink
            if links > 1:
                message = f"the file has {links} names (hard links), and all of them would change"
                raise Unsafe(message, path=file, hint=hint)
        record = write_change_journal(path, model, sums, chain)
        apply_journal(path)
    applied = tuple(delta.path for delta in chain.deltas)
    return ChangedInPlace(path, applied, len(record.tensors), record.changed, is_completed, unfinished)


def finished_and_unfinished_deltas(root: Path) -> tuple[list[Path], tuple[Path, ...]]:
    """Return the deltas to choose from, and the unfinished ones: `root`, if it is a delta, or those in it."""
    if not root.is_dir():
        raise NotACheckpoint("expected a directory with deltas", path=root)
    if is_complete_delta(root) or is_unfinished_delta(root):
        return [root], ()
    candidates = [root / name for name in sorted(names_in(root))]
    complete = [path for path in candidates if is_complete_delta(path)]
    if not complete:
        raise NotACheckpoint("expected deltas, found none", path=root, hint="`ckptkit delta BASE NEW OUT` writes one")
    return complete, tuple(filter(is_unfinished_delta, candidates))


def find_continuing_chain(model: Layout, sums: Mapping[str, int], delta_paths: list[Path], root: Path) -> DeltaChain:
    """Return the chain of deltas that continues from the model's state; file names do not set the order.

    Raises `Mismatch` if no delta fits, `Usage` if two deltas have the same base.
    """
    require_consolidated_form(model)
    by_base: dict[str, Delta] = {}
    deltas = [open_delta(path) for path in delta_paths]
    for delta in deltas:
        if (other := by_base.get(delta.record.base)) and other.record.new != delta.record.new:
            message = f"expected one delta of base {short_id(delta.record.base)}, also found {other.path.name}"
            raise Usage(message, path=delta.path, hint="pass one of them instead of the directory")
        by_base[delta.record.base] = delta
    identity = identity_of_model(model.specs, sums)
    if identity not in by_base and all(delta.record.new != identity for delta in deltas):
        if len(deltas) == 1:
            DeltaChain.of(deltas).check_base(model, sums)
        message = f"expected a delta of base {short_id(identity)}, found {count(len(deltas), 'delta')} with other bases"
        hint = "add the missing delta, or pass the model that the first delta starts from"
        raise Mismatch(message, path=root, hint=hint)
    chain: list[Delta] = []
    while identity in by_base and by_base[identity] not in chain:
        chain.append(by_base[identity])
        identity = chain[-1].record.new
        check_and_count_nan(chain[-1])
    full_chain = DeltaChain.of(chain)
    if chain:
        full_chain.check_base(model, sums)
    return full_chain


def require_consolidated_form(model: Layout) -> None:
    """Raise `Unsupported` unless the model is stored as `consolidate` would write it: deltas refer to that form."""
    wanted = open_as_consolidated(model.root, {}, model.root).layout.specs
    for name in sorted(model.specs.keys() | wanted.keys()):
        if model.specs.get(name) != wanted.get(name):
            message = f"`consolidate` would write {wanted.get(name, 'no such tensor')}, found {model.specs.get(name)}"
            hint = "run `ckptkit apply BASE DELTA OUT`, which writes the result elsewhere"
            raise Unsupported(message, path=model.root, tensor=name, hint=hint)


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
    remove_orphaned_staging(local)


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


def apply_journal(local: Path) -> Delta:
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

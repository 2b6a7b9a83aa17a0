"""Check a delta, and whether a checkpoint is its base.

Reads the full delta: checksums, positions, and values that inference engines refuse.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ckptkit.checkpoints.checkpoint import Source
from ckptkit.checkpoints.finalize_files import file_checksums
from ckptkit.checkpoints.manifest import read_manifest
from ckptkit.checkpoints.problems import Problems
from ckptkit.checks.verify import Verified
from ckptkit.errors import CkptError, Corrupt, Report, raise_problem
from ckptkit.io.crc32 import RESTORE
from ckptkit.io.file import file_size, missing_path_error
from ckptkit.io.path import to_path
from ckptkit.layout import edits
from ckptkit.plugins.deltas.as_consolidated import open_as_consolidated
from ckptkit.plugins.deltas.chain import DeltaChain, checksum_by_tensor
from ckptkit.plugins.deltas.changes import (
    as_unsigned_elements,
    count_nan,
    load_changes,
    nan_warnings,
    read_delta_tensor,
)
from ckptkit.plugins.deltas.open_delta import WHOLE, Delta, open_delta
from ckptkit.plugins.deltas.record import FORMAT, RECORD


def check_and_count_nan(delta: Delta, report: Report = raise_problem) -> int:
    """Read all data of a delta, report each damaged tensor, and return how many new values are NaN.

    Positions must be strictly increasing and inside the tensor; a full tensor must have the CRC-32 that `delta.json`
    records.
    """
    nan = 0
    for name in delta.record.tensors:
        try:
            nan += count_nan_in_tensor(delta, name)
        except CkptError as error:
            report(error.blame(path=delta.payload_path_of(name), tensor=name))
    return nan


def count_nan_in_tensor(delta: Delta, name: str) -> int:
    """Check the data of one tensor, and return how many new values are NaN."""
    tensor = delta.record.tensors[name]
    if not delta.has_full_tensor(name):
        return count_nan(load_changes(delta, name).values, tensor.spec.dtype.name)
    key = name + WHOLE
    crc = checksum_by_tensor(edits.select_entries(delta.layout, key.__eq__))[key]
    if crc != tensor.crc32_new:
        raise Corrupt(f"expected CRC-32 {tensor.crc32_new:08x} of the whole tensor, found {crc:08x}")
    values = as_unsigned_elements(read_delta_tensor(delta, key), tensor.spec.dtype.itemsize)
    return count_nan(values, tensor.spec.dtype.name)


def verify_delta(
    path: str | Path, *, base: Source | None = None, dtype: str | Sequence[str] = (), jobs: int | None = None
) -> Verified:
    """Look for damage in the delta in directory `path`, and for anything that prevents applying it to `base`.

    ckptkit uses `base` as `consolidate` would write it, in `dtype` if you pass one. Everything wrong with the delta is
    in the problems of the result. Raises `NotACheckpoint` if there is nothing at `path` or `base`, and any `CkptError`
    if `base` cannot be opened.
    """
    root = to_path(path)
    if not root.exists():
        raise missing_path_error(root)
    opened = None if base is None else open_as_consolidated(base, {"dtype": dtype} if dtype else {}, root)
    problems = Problems()
    verified = Verified(root, FORMAT)
    try:
        delta = open_delta(root)
        verified = verify_delta_data(delta, problems)
        if opened is not None:
            chain = DeltaChain.of([delta])
            chain.check_base(opened.layout, checksum_by_tensor(opened.layout, jobs=jobs))
            for name in chain.specs:
                try:
                    deque(chain.new_blocks_of(opened.layout, name), maxlen=0)  # checks the CRC-32 of the result
                except CkptError as error:
                    problems.add(error)
    except CkptError as error:
        problems.add(error.blame(path=root))
    return replace(verified, problems=problems.all_problems())


def verify_delta_data(delta: Delta, problems: Problems) -> Verified:
    """Read all data of a delta, and collect each damaged tensor and file in `problems`."""
    nan = check_and_count_nan(delta, problems.add)
    tensors = delta.layout.tensors.values()
    checked = sum(tensor.spec.nbytes for tensor in tensors if tensor.chunks[0].crc32 is not None)
    manifest = read_manifest(delta.path)
    files = {RECORD, *delta.layout.files}
    known = {name: manifest.files[name] for name in sorted(files) if name in manifest.files} if manifest else {}
    sums = file_checksums(delta.path, known, ())
    for name, wanted in known.items():
        if sums[name] != wanted and not problems.has_problem_in(delta.path / name):
            message = f"expected CRC-32 {wanted.crc32:08x} (manifest), found {sums[name].crc32:08x}"
            problems.add(Corrupt(message, path=delta.path / name, hint=RESTORE))
    return Verified(
        delta.path,
        FORMAT,
        notes=nan_warnings(nan),
        files=len(files),
        tensors=len(delta.record.tensors),
        nbytes=sum(file_size(delta.path / name) for name in files),
        checked_bytes=checked,
        unchecked_bytes=delta.nbytes - checked,
        has_manifest=manifest is not None,
        looked_at=frozenset(delta.path / name for name in files),
    )

"""Say whether a delta is whole and undamaged, and whether a checkpoint is its base."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from ckptkit.checkpoints.checkpoint import Source
from ckptkit.checkpoints.manifest import Manifest, read_manifest
from ckptkit.checkpoints.problems import Problems
from ckptkit.checkpoints.seal import sum_files
from ckptkit.checks.verify import Verified
from ckptkit.conversion.as_consolidated import as_consolidated
from ckptkit.errors import CkptError, Corrupt
from ckptkit.io.crc32 import RESTORE
from ckptkit.io.file import absent, file_size
from ckptkit.io.path import to_path
from ckptkit.plugins.deltas.chain import DeltaChain
from ckptkit.plugins.deltas.check_delta import check_delta
from ckptkit.plugins.deltas.find import RECORD
from ckptkit.plugins.deltas.identity import sums_of
from ckptkit.plugins.deltas.nan import say_nan
from ckptkit.plugins.deltas.new_blocks import ChainSuccessor, Successor
from ckptkit.plugins.deltas.open_delta import Delta, open_delta
from ckptkit.plugins.deltas.record import FORMAT


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
        raise absent(root)
    opened = None if base is None else as_consolidated(base, {"dtype": dtype} if dtype else {}, root)
    problems = Problems()
    found = Verified(root, FORMAT)
    try:
        delta = open_delta(root)
        found = look_into(delta, problems)
        if opened is not None:
            chain = DeltaChain.of([delta])
            chain.check_base(opened.layout, sums_of(opened.layout, jobs=jobs))
            check_blocks(ChainSuccessor(opened.layout, chain), problems)
    except CkptError as error:
        problems.add(error.blame(path=root))
    return replace(found, problems=problems.list())


def look_into(delta: Delta, problems: Problems) -> Verified:
    """Read all of a delta, and note each tensor and file that is damaged."""
    checked = check_delta(delta, problems.add)
    manifest = read_manifest(delta.path)
    files = {RECORD, *delta.layout.files}
    if manifest is not None:
        compare_with_manifest(delta.path, manifest, files, problems)
    return Verified(
        delta.path,
        FORMAT,
        notes=say_nan(checked.nan),
        files=len(files),
        tensors=len(delta.record.tensors),
        nbytes=sum(file_size(delta.path / name) for name in files),
        checked_bytes=checked.checked_bytes,
        unchecked_bytes=checked.unchecked_bytes,
        has_manifest=manifest is not None,
        looked_at=frozenset(delta.path / name for name in files),
    )


def check_blocks(successor: Successor, problems: Problems) -> None:
    """Make every tensor that changes, and note each one that is not what the delta says."""
    for name in successor.specs:
        try:
            for _ in successor.blocks(name):
                pass
        except CkptError as error:
            problems.add(error)


def compare_with_manifest(root: Path, manifest: Manifest, files: Iterable[str], problems: Problems) -> None:
    """Note the files that differ from the manifest, where nothing in them is known to."""
    known = {name: manifest.files[name] for name in sorted(files) if name in manifest.files}
    found = sum_files(root, known, ())
    for name, wanted in known.items():
        if found[name] != wanted and not problems.are_in(root / name):
            message = f"expected CRC-32 {wanted.crc32:08x} (manifest), found {found[name].crc32:08x}"
            problems.add(Corrupt(message, path=root / name, hint=RESTORE))

"""Find the entries of a run that read a checkpoint beside them: links to it or into it, adapters and deltas of it."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

from ckptkit.adapters.config import NAME as ADAPTER_CONFIG
from ckptkit.adapters.config import parse_adapter_config
from ckptkit.checkpoints.manifest import NAME as MANIFEST
from ckptkit.checkpoints.manifest import read_manifest
from ckptkit.checkpoints.other_kinds import find_known_kind
from ckptkit.errors import Corrupt, Unsafe, Unsupported, translate_os_errors
from ckptkit.io.file import list_directories, names_in
from ckptkit.io.joined import local_paths_of
from ckptkit.io.path import is_remote

Readers = tuple[tuple[str, str], ...]  # the name of an entry of the run, and the reason why it needs the checkpoint


def readers_in(root: Path) -> Mapping[str, Readers]:
    """Return, by its name, the readers of each directory of the run at `root` that another directory of it reads.

    Does not look at links in the run itself, which are trackers, and at hidden directories.
    """
    readers: dict[str, dict[str, str]] = defaultdict(dict)
    directories = local_paths_of(root)
    for entry in (entry for directory in directories for entry in list_directories(directory)):
        if entry.name.startswith(".") or entry.is_symlink():
            continue
        for path in links_and_records(entry):
            name = str(path.relative_to(entry.parent))
            if path.is_symlink():
                target = Path(os.path.realpath(path))
                reads = find_run_entry_with(target, directories)
                reason = f"`{name}` links {'to' if target.name == reads else 'into'} it"
            else:
                reads = find_base_entry(path, directories)
                what = "adapter" if path.name == ADAPTER_CONFIG else "delta"
                reason = f"the {what} in `{path.parent.relative_to(entry.parent)}` has it as its base"
            if reads not in (None, entry.name):
                readers[str(reads)].setdefault(entry.name, reason)
    return {name: tuple(sorted(by_entry.items())) for name, by_entry in readers.items()}


def links_and_records(directory: Path) -> Iterator[Path]:
    """Yield the links, adapter configs and manifests of deltas below a directory, without following links.

    In a store, which has no links, yields only the files in the directory itself.
    """
    if is_remote(directory):
        yield from (directory / name for name in base_records_among(names_in(directory)))
        return
    pending = [directory]
    while pending:
        with translate_os_errors(directory):
            try:
                with os.scandir(pending.pop()) as scanned:  # faster than an `lstat` of thousands of shards
                    entries = sorted(scanned, key=lambda entry: entry.name)
            except FileNotFoundError:  # deleted meanwhile
                continue
        records = base_records_among(entry.name for entry in entries)
        yield from (Path(entry) for entry in entries if entry.is_symlink() or entry.name in records)
        pending += (Path(entry) for entry in entries if entry.is_dir(follow_symlinks=False))


def base_records_among(names: Iterable[str]) -> set[str]:
    """Return the names of files that record the base of an adapter or a delta."""
    names = frozenset(names)
    return {name for name in names if name == ADAPTER_CONFIG or (name == MANIFEST and find_known_kind(names))}


def find_run_entry_with(path: Path, directories: Sequence[Path]) -> str | None:
    """Return the entry of the run in `directories` that is at a path or contains it, None without."""
    for root in (directory.resolve() for directory in directories):
        if root in path.parents:
            return path.relative_to(root).parts[0]
    return None


def find_base_entry(record: Path, directories: Sequence[Path]) -> str | None:
    """Return the entry of the run that an adapter's config or a delta's manifest names as the base, None without.

    The file has the path that the user passed. It may be relative to any directory, or of another mount, so the names
    of the run and of the entry decide.
    """
    try:
        if record.name == ADAPTER_CONFIG:
            base = parse_adapter_config(record).base
        else:
            manifest = read_manifest(record.parent)
            base = (manifest.source or {}).get("base") if manifest else None
    except (Corrupt, Unsafe, Unsupported):
        return None
    if base is None:
        return None
    if inside := find_run_entry_with(Path(os.path.realpath(base)), directories):
        return inside
    parts = PurePosixPath(os.path.normpath(base.replace("\\", "/"))).parts
    for directory in directories:
        at = [i for i, part in enumerate(parts) if (directory / part).is_dir() and part not in ("/", "..")]
        if at and (at[0] == 0 or parts[at[0] - 1] in (directory.resolve().name, "..")):
            return parts[at[0]]
    return None

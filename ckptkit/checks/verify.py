"""Verify that a checkpoint is complete and undamaged: report every problem, and the bytes that have no checksum.

Checks the structure first: files, sizes, coverage, key paths, and the metadata against the files. Then reads every
byte, and compares it with the CRC-32 that the format or a manifest has for it.
"""

from __future__ import annotations

import stat
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptkit.checkpoints.checkpoint import (
    Checkpoint,
    Source,
    all_checkpoints_in_run,
    no_checkpoint_error,
    path_of_source,
)
from ckptkit.checkpoints.component import Component, find_unfinished_error
from ckptkit.checkpoints.examination import examine_checkpoint
from ckptkit.checkpoints.examination.facts import Certainty
from ckptkit.checkpoints.finalize_files import file_checksums
from ckptkit.checkpoints.find_components import EXPORTED, LOST, LeftBehind
from ckptkit.checkpoints.manifest import (
    ByteRange,
    FileSum,
    Manifest,
    StoreSums,
    explain_deleted_metadata,
    read_manifest,
    read_store_checksums,
)
from ckptkit.checkpoints.partial_file import find_partial_file_error, why_maybe_partial_file
from ckptkit.checkpoints.problems import Problems, join_first_names, merge_file_problems
from ckptkit.checkpoints.replicas import check_replicas
from ckptkit.checkpoints.salvage_account import NAME as ACCOUNT
from ckptkit.checkpoints.salvage_account import describe_account, read_account
from ckptkit.checks.checkpoint_files import OwnFiles
from ckptkit.checks.compare_masters import compare_low_precision_copies, compare_masters
from ckptkit.engine.scan import find_first_zero_page, scan_files
from ckptkit.errors import (
    DAMAGED,
    CkptError,
    Corrupt,
    IOFailure,
    Mismatch,
    NotACheckpoint,
    Unsupported,
    Usage,
    names_and_more,
    translate_os_errors,
)
from ckptkit.formats import detect_format, locate_all_chunks, require_known_format
from ckptkit.io.crc32 import RESTORE, damage_message
from ckptkit.io.file import file_size, is_existing_path, list_children
from ckptkit.io.origin import Origin
from ckptkit.io.progress import BytesDone, Progress, make_progress_reporter
from ckptkit.layout import Blob, Chunk, Extent, FileOffset, Layout
from ckptkit.models.config_differences import describe_differences
from ckptkit.state.names import NameOptions
from ckptkit.summary import Summarized, first_lines_and_more
from ckptkit.words import count, format_bytes

_NAMES_SHOWN = 3  # lost tensors in a message

if TYPE_CHECKING:
    from ckptkit.checks.differences import Diff
    from ckptkit.checks.stats import TensorStats


@dataclass(frozen=True, slots=True)
class Verified(Summarized):
    """The result of verifying a checkpoint at `path`, or a component of one.

    `checked_bytes` were verified against a CRC-32, `unchecked_bytes` have none: bytes of tensors and other entries, and
    with a manifest also of complete files. For `proved_files`, the store's CRC-32 was compared instead, without reading
    their bytes; `unproved` counts the files for which this is impossible. `looked_at` are its files, `sums` the
    checksums of the files that were read, `left_behind` other files in its directory, which verify did not read.
    `compared` is the comparison with another checkpoint, if requested; its differences are among the problems. `stats`
    are the statistics of its tensors, if requested. `salvaged` is the account of a salvaged checkpoint, None for any
    other.
    """

    path: Path
    format: str = ""
    problems: tuple[CkptError, ...] = ()
    notes: tuple[str, ...] = ()
    files: int = 0
    tensors: int = 0
    nbytes: int = 0
    checked_bytes: int = 0
    unchecked_bytes: int = 0
    has_manifest: bool = False
    proved_files: int = 0
    unproved: CkptError | None = None
    sums: Mapping[str, FileSum] = field(default_factory=dict)
    looked_at: frozenset[Path] = frozenset()
    left_behind: tuple[LeftBehind, ...] = ()
    compared: Diff | None = None
    stats: tuple[TensorStats, ...] = ()
    salvaged: Mapping[str, Any] | None = None

    @property
    def is_ok(self) -> bool:
        return not self.problems

    @property
    def loss(self) -> str | None:
        """Return a line on the tensors that a salvage lost or filled; None for a checkpoint that was not salvaged."""
        if self.salvaged is None:
            return None
        lost = [entry for entry in self.salvaged.get("lost") or () if isinstance(entry, dict)]
        names = names_and_more([f"`{entry.get('name') or entry.get('path')}`" for entry in lost], _NAMES_SHOWN)
        what = f"{describe_account(self.salvaged)}{f'; missing: {names}' if names else ''}"
        return f"{self.path}: {what}; {ACCOUNT} lists them"

    def summary(self) -> Iterator[str]:
        verdict = count(len(self.problems), "problem") if self.problems else "ok"
        checked, unchecked = format_bytes(self.checked_bytes), format_bytes(self.unchecked_bytes)
        yield f"{self.path}: {verdict}; {checked} checked, {unchecked} without a checksum"
        yield from [self.loss] if self.loss else []
        yield from first_lines_and_more((problem.line for problem in self.problems), len(self.problems))


def require_no_problems(verified: Verified, hint: str) -> None:
    """Raise `Corrupt` with the first problem and the number of problems, if there are any."""
    if verified.problems:
        first, total = verified.problems[0], len(verified.problems)
        message = first.message if total == 1 else f"{first.message}; the first of {total:,} problems"
        raise Corrupt(message, path=first.path, tensor=first.tensor, offset=first.offset, hint=hint)


def verify(
    *sources: Source,
    fast: bool = False,
    against: Source | None = None,
    allow_cast: bool = False,
    map: str | Path | None = None,  # noqa: A002 - called as the option
    rename: str | Sequence[str] = (),
    stats: bool = False,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> list[Verified]:
    """Look for damage in checkpoints, or in every checkpoint of a run. Returns a result for each component.

    With `fast`, reads no tensors: checks the structure and, with a manifest, the checksums that the files record. If a
    store keeps checksums, such as S3, `fast` asks for them: with a manifest, its CRC-32 of each file proves the
    checkpoint, and a file without one is a problem.

    With `against`, a checkpoint or a run of any format and world size, the tensors of an undamaged checkpoint are
    compared with it: all tensors if both have an optimizer, else the model's. Another dtype is a problem, unless you
    pass `allow_cast`: then `against` is converted first. `map` is a table with names of either side, and `rename` has
    rules `REGEX=>TEXT` for the parameters of `against`. With `stats`, the numbers are counted too.

    Raises `NotACheckpoint` if there is no checkpoint, `Unsupported` for files that ckptkit cannot read yet. Every
    problem of an existing checkpoint is in the result.
    """
    if not sources:
        raise Usage("expected a checkpoint or a run, found none", hint="pass at least one path")
    if against is None and (map or rename):
        raise Usage("--map and --rename have no effect without --against", hint="pass --against OTHER")
    checkpoints = [checkpoint for source in sources for checkpoint in find_checkpoints(source)]
    report = make_progress_reporter(
        progress,
        sum(
            bytes_at_path(part)
            for one in checkpoints
            if not one.unreadable
            for part in one.component_paths or [one.path]
        ),
    )
    look = partial(verify_component, fast=fast, jobs=jobs, progress=report)
    known = {checkpoint.path for checkpoint in checkpoints}
    results: list[Verified] = []
    for checkpoint in checkpoints:
        if checkpoint.unreadable:
            results.append(Verified(checkpoint.path, problems=(checkpoint.unreadable,)))
            continue
        parts = with_inconsistencies(checkpoint, verify_components(checkpoint, look, known))
        results += with_unproved_findings(parts) if fast else with_master_comparison(checkpoint, parts, jobs)
    if against is not None and all(part.is_ok for part in results):
        from ckptkit.checks.diff import compare_configs, compare_tensors_with_source  # deferred: imports the engine

        named, other = NameOptions.of(map, rename), Checkpoint.open(against)
        compare = partial(compare_tensors_with_source, allow_cast=allow_cast, named=named, jobs=jobs, progress=progress)
        compared: dict[Path, Diff] = {}
        for source in sources:
            one = Checkpoint.open(source)
            compared |= compare(one, other)
            if (model := one.model_component.path) in compared:
                compared[model] = compared[model].merge(compare_configs(one, other)[0])
        results = [with_diff_as_problems(part, compared.get(part.path)) for part in results]
    if stats and all(part.is_ok for part in results):
        from ckptkit.checks.stats import stats as survey_part  # deferred: imports numpy

        results = [
            replace(part, stats=survey_part(part.path, jobs=jobs, progress=progress).tensors) for part in results
        ]
    return results


def with_unproved_findings(results: Iterable[Verified]) -> Iterator[Verified]:
    """Yield the results of `verify --fast`, with what the checksums of a store do not prove."""
    for part in results:
        if part.unproved is not None:
            yield replace(part, problems=(*part.problems, part.unproved))
            continue
        root = part.path if part.path.is_dir() else part.path.parent
        names = [] if part.has_manifest else sorted(str(path.relative_to(root)) for path in part.looked_at)
        kept = read_store_checksums(root, names)
        if kept.sums or kept.others:  # else the store has no checksums, or the files are local
            note = f"--fast cannot verify the files without a manifest; the store has {kept.describe_checksums(names)}"
            yield replace(part, notes=(*part.notes, note))
        else:
            yield part


def with_inconsistencies(checkpoint: Checkpoint, results: list[Verified]) -> list[Verified]:
    """Return the results, plus inconsistencies if the checkpoint is undamaged.

    A file that is one of several gets only this problem, because the tensors of the other files are missing.
    """
    if not (checkpoint.components and all(part.is_ok for part in results)):
        return results
    first = results[0]
    if part := find_partial_file_error(checkpoint):
        return [replace(first, problems=(part,)), *results[1:]]
    doubt = why_maybe_partial_file(checkpoint)
    problems, notes = [*first.problems], [*first.notes, *([doubt] if doubt else [])]
    for inconsistency in examine_checkpoint(checkpoint):
        if inconsistency.certainty is Certainty.CERTAIN:
            problems.append(inconsistency.to_error(checkpoint.path))
        else:
            notes.append(inconsistency.message_with_tensor)
    return [replace(first, problems=tuple(problems), notes=tuple(notes)), *results[1:]]


def with_master_comparison(checkpoint: Checkpoint, results: list[Verified], jobs: int | None) -> list[Verified]:
    """Return the results; for an undamaged checkpoint, the weights are also compared with the optimizer's masters.

    Weights and optimizer may be in different components.
    """
    if not (checkpoint.components and all(part.is_ok for part in results)):
        return results
    try:
        layout = checkpoint.layout
    except (NotACheckpoint, Mismatch, Unsupported):  # components that cannot be joined
        return results
    problems = Problems()
    try:
        notes = (*results[0].notes, *compare_masters(layout, problems, jobs))
    except CkptError as error:
        problems.add(error.blame(path=checkpoint.path))
        notes = results[0].notes
    return [replace(results[0], problems=problems.all_problems(), notes=notes), *results[1:]]


def with_diff_as_problems(verified: Verified, diff: Diff | None) -> Verified:
    """Return the result with the differences from another checkpoint as further problems.

    There is a problem for each tensor that differs or that only one has, and one for configs that differ.
    """
    if diff is None:
        return verified
    path, other, problems, notes = diff.a, diff.b, [*verified.problems], [*verified.notes]
    certain = [one for one in diff.configs if one.is_certain]
    uncertain = [one for one in diff.configs if not one.is_certain]
    if uncertain:
        notes.append(f"the models may compute different results: {describe_differences(uncertain, str(other))}")
    if certain:
        words = describe_differences(certain, str(other))
        problems.append(Mismatch(f"config.json differs in keys that change the computation: {words}", path=path))
    problems += [Mismatch(f"not in {other}", path=path, tensor=name) for name in diff.only_in_a]
    problems += [Mismatch(f"only in {other}", path=path, tensor=name) for name in diff.only_in_b]
    for difference in diff.different:
        ours, theirs, name = difference.a, difference.b, difference.name
        if difference.reason == "values" or ours is None or theirs is None:
            problems.append(Mismatch(f"the bytes differ from those in {other}", path=path, tensor=name))
            continue
        is_cast = difference.reason == "dtype" and theirs.dtype.is_castable_to(ours.dtype)
        hint = "pass --allow-cast to compare after a cast" if is_cast else None
        message = f"expected {theirs} as in {other}, found {ours}"
        problems.append(Mismatch(message, path=path, tensor=name, hint=hint))
    return replace(verified, problems=tuple(problems), notes=tuple(notes), compared=diff)


def find_checkpoints(source: Source) -> list[Checkpoint]:
    """Return the checkpoint at a path, or all checkpoints of a run, oldest first, and then its stray files."""
    path = path_of_source(source)
    checkpoint = Checkpoint.in_run(path)
    if checkpoint.is_run_with_strays:
        return [*all_checkpoints_in_run(path), checkpoint]
    checkpoints = [] if checkpoint.is_at_own_path else all_checkpoints_in_run(path)
    if checkpoints and not all(candidate.unsupported_files_error for candidate in checkpoints):
        return checkpoints
    if not checkpoint.components:
        raise checkpoint.unreadable or checkpoint.unsupported_files_error or no_checkpoint_error(path)
    return [checkpoint]


def verify_components(
    checkpoint: Checkpoint, verify_path: Callable[[Path], Verified], known_checkpoints: Collection[Path]
) -> list[Verified]:
    """Verify the components of a checkpoint and other weights in its directory.

    The first result lists the other files, without the `known_checkpoints` checkpoints.
    """
    places, root = checkpoint.component_paths or [checkpoint.path], checkpoint.path
    results = [verify_path(path) for path in places]
    results[0] = replace(results[0], salvaged=read_account(root))
    unfinished = find_unfinished_error(root)
    if unfinished and all(problem.line != unfinished.line for part in results for problem in part.problems):
        results[0] = replace(results[0], problems=(unfinished, *results[0].problems))
    if not (root.is_dir() and checkpoint.components and all(part.looked_at for part in results)):
        return results
    seen = frozenset(path for part in results for path in part.looked_at).union(set(places) - {root})
    try:
        left = checkpoint.list_not_copied_files(seen)
    except IOFailure as error:
        return [replace(results[0], problems=(*results[0].problems, error)), *results[1:]]
    weights = [file.path for file in left if file.why in (*LOST, EXPORTED) and detect_format(file.path)]
    rest = tuple(file for file in left if file.path not in (*weights, *known_checkpoints))
    return [replace(results[0], left_behind=rest), *results[1:], *map(verify_path, weights)]


def bytes_at_path(root: Path) -> int:
    """Return the number of bytes of a file, or of the files in a directory, without its subdirectories."""
    with translate_os_errors(root):
        statuses = [path.lstat() for path in list_children(root)] if root.is_dir() else [root.stat()]
        return sum(state.st_size for state in statuses if stat.S_ISREG(state.st_mode))


def verify_component(
    path: Path,
    *,
    fast: bool = False,
    with_manifest: bool = True,
    jobs: int | None = None,
    progress: BytesDone | None = None,
) -> Verified:
    """Look for damage in one directory or file, using its manifest if `with_manifest`.

    With `fast`, the checksums that a store keeps of files are compared with the manifest's.
    """
    problems, entries = Problems(), Counter[Path | None]()
    result = Verified(path)
    try:
        origin = Origin.of(path)
        checkpoint = Checkpoint.at(path)
        if checkpoint.unsupported_files_error:
            raise checkpoint.unsupported_files_error
        reader = checkpoint.components[0].reader if checkpoint.is_at_own_path else require_known_format(path)
        with translate_os_errors(path):
            layout = reader.read(path, problems.add)
            for tensor in layout.tensors.values():
                entries.update({layout.root / chunk.path for chunk in tensor.chunks})
            entries.update(layout.root / blob.path for blob in layout.blobs.values())
            if unfinished := find_unfinished_error(path):
                problems.add(unfinished)
            manifest = read_manifest_or_add_problem(path, problems) if with_manifest else None
            add_empty_adapter_problem(checkpoint.components, layout, problems)
            others = frozenset(component.path for component in checkpoint.components[1:])
            own = OwnFiles(reader, path, layout, manifest, others)
            result = check_structure(own, problems) if fast else check_bytes(own, problems, jobs, progress)
            if layout.spares:
                check_replicas(layout, problems.add, with_bytes=not (fast or problems.all_problems()))
            if layout.twins and not (fast or problems.all_problems()):
                result = replace(result, notes=(*result.notes, *compare_low_precision_copies(layout, problems, jobs)))
            origin.require_unchanged()
    except CkptError as error:
        problems.add(explain_deleted_metadata(error.blame(path=path), path))
    if not result.nbytes:
        with suppress(CkptError):  # the problem that no file could be read for is among the problems
            result = replace(result, nbytes=bytes_at_path(path))
    return replace(result, problems=merge_file_problems(problems.all_problems(), entries))


def add_empty_adapter_problem(components: Iterable[Component], layout: Layout, problems: Problems) -> None:
    """Add a problem if an adapter's tensors have no elements."""
    is_whole = layout.tensors and all(tensor.spec.numel for tensor in layout.tensors.values())
    if is_whole or not any(component.is_adapter for component in components):
        return
    from ckptkit.adapters.find import find_empty_adapter_error

    if error := find_empty_adapter_error(layout):
        problems.add(error)


def check_structure(own: OwnFiles, problems: Problems) -> Verified:
    """Check everything except the data of large tensors; a store's checksums of files prove these too."""
    sizes = file_sizes_of(own, problems)
    store_sums = read_store_checksums(own.root, sizes if own.manifest is not None else ())
    proved = {name: store_sums.sums[name] for name in store_sums.sums if name in own.recorded_file_sums}
    rest = {name: size for name, size in sizes.items() if name not in proved}
    content, extents = open_zip_wrappers(own, rest, problems, with_packed=False)
    unknown = {extent.path for extent in extents if extent.crc32 is None}
    sums = file_checksums(own.root, (rest.keys() & own.recorded_file_sums.keys()) - unknown, extents)
    verify_whole_files(own, {**sums, **proved}, problems)
    result = unverified_result(own, sizes, content, problems)
    if not (store_sums.sums or store_sums.others):  # the store has no checksums, or the files are local
        return result
    return with_store_verified_files(own, result, sizes, proved, store_sums)


def with_store_verified_files(
    own: OwnFiles,
    verified: Verified,
    sizes: Mapping[str, int],
    proved: Collection[str],
    store_sums: StoreSums,
) -> Verified:
    """Return the result with the files that the store's checksums prove, and an error that names the others."""
    unproved = None
    if others := sizes.keys() - proved:
        no_crc, unlisted = (sorted(others & sums.keys()) for sums in (store_sums.others, store_sums.sums))
        why = [f"the store has {store_sums.describe_checksums(no_crc)}"] if no_crc else []
        why += [f"the manifest does not list {join_first_names(unlisted)}"] if unlisted else []
        which = f"{len(others):,} of {count(len(sizes), 'file')}, {format_bytes(sum(sizes[name] for name in others))}"
        hint = "run `ckptkit verify` without --fast: it reads every byte"
        unproved = Unsupported(f"cannot verify {which}: {'; '.join(why)}", path=own.path, hint=hint)
    places = {
        (stored.path, stored.offset): stored.length
        for _, stored in own.layout.chunks_and_blobs
        if stored.path in proved
    }
    total = format_bytes(sum(sizes[name] for name in proved))
    notes = (f"verified {count(len(proved), 'file')}, {total}, by the store's CRC-32",) if proved else ()
    return replace(
        verified,
        notes=(*verified.notes, *notes),
        proved_files=len(proved),
        unproved=unproved,
        checked_bytes=sum(places.values()),
    )


def check_bytes(own: OwnFiles, problems: Problems, jobs: int | None, progress: BytesDone | None) -> Verified:
    """Check everything, reading every byte."""
    sizes = file_sizes_of(own, problems)
    content, extents = open_zip_wrappers(own, sizes, problems)
    scanned = scan_files(own.root, sizes, extents, problems.add, jobs=jobs, progress=progress)
    compare_extent_checksums(own, extents, scanned.extents, problems)
    runs: dict[str, dict[ByteRange, int]] = {}  # of the byte ranges without a checksum in the format
    for extent in extents:
        crc = scanned.extents.get((extent.path, extent.offset))
        if extent.crc32 is None and extent.length and crc is not None:
            runs.setdefault(extent.path, {})[extent.offset, extent.length] = crc
    sums = {name: FileSum(sizes[name], crc, runs.get(name, {})) for name, crc in scanned.files.items()}
    verify_whole_files(own, sums, problems)
    unread = [
        extent.length
        for extent in extents
        if (extent.path, extent.offset) not in scanned.extents
        or (own.expected_checksum(extent) is None and extent.path not in own.recorded_file_sums)
    ]
    result = unverified_result(own, sizes, content, problems)
    unchecked = min(sum(unread), content)
    return replace(result, checked_bytes=content - unchecked, unchecked_bytes=unchecked, sums=sums)


def read_manifest_or_add_problem(checkpoint: Path, problems: Problems) -> Manifest | None:
    """Return the manifest of the checkpoint at `checkpoint`; None if it is missing. Adds a problem if it is damaged."""
    try:
        return read_manifest(checkpoint if checkpoint.is_dir() else checkpoint.parent)
    except CkptError as error:
        problems.add(error)
        return None


def file_sizes_of(own: OwnFiles, problems: Problems) -> dict[str, int]:
    """Return the sizes of the files to read, by name. Adds a problem for a size that differs from the manifest's."""
    sizes: dict[str, int] = {}
    for name in sorted(own.needed_files | own.recorded_file_sums.keys()):
        path = own.root / name
        try:
            if name in own.needed_files and problems.all_problems() and not is_existing_path(path):
                continue  # reading the layout has reported the missing file
            sizes[name] = file_size(path)
        except CkptError as error:
            problems.add(error)
            continue
        known = own.recorded_file_sums.get(name)
        if known is not None and known.nbytes != sizes[name] and not problems.has_problem_in(path):
            message = f"expected {known.nbytes} bytes (manifest), found {sizes[name]}"
            problems.add(Corrupt(message, path=path, hint=RESTORE))
    return sizes


def open_zip_wrappers(
    own: OwnFiles, sizes: Mapping[str, int], problems: Problems, *, with_packed: bool = True
) -> tuple[int, list[Extent]]:
    """Open the zip wrapper of every chunk, and unpack compressed chunks if `with_packed`.

    Returns the number of bytes of tensors and other entries, and the byte ranges that remain to be verified.
    """

    def is_there(place: Chunk | Blob) -> bool:  # it ends before the end of its file
        return place.is_in_file and place.offset + place.length <= sizes.get(place.path, -1)

    chunks = {name: tuple(filter(is_there, tensor.chunks)) for name, tensor in own.layout.tensors.items()}
    sound = replace(
        own.layout,
        tensors={name: replace(own.layout.tensors[name], chunks=found) for name, found in chunks.items() if found},
        blobs={name: blob for name, blob in own.layout.blobs.items() if blob.content is not None or is_there(blob)},
    )
    located = locate_all_chunks(sound, problems.add, decompress=with_packed)
    places = {(c.path, c.offset): c.length for tensor in located.tensors.values() for c in tensor.chunks}
    content = sum(places.values()) + sum(blob.length for blob in located.blobs.values())
    compared = {  # chunks that were unpacked, which verified their internal checksums, if any
        (old.path, old.offset)
        for (_, old), (_, new) in zip(sound.chunks_and_blobs, located.chunks_and_blobs, strict=True)
        if new.path != old.path and (new.crc32 is not None or not new.length)
    }
    extents = own.reader.checksummed_extents(sound, problems.add)
    return content, [extent for extent in extents if (extent.path, extent.offset) not in compared]


def compare_extent_checksums(
    own: OwnFiles, extents: Iterable[Extent], checksums: Mapping[FileOffset, int], problems: Problems
) -> None:
    """Add a problem for each byte range whose CRC-32 differs from the expected one."""
    for extent in extents:
        crc, wanted = checksums.get((extent.path, extent.offset)), own.expected_checksum(extent)
        if not extent.length or crc is None or wanted is None or crc == wanted:
            continue  # an empty byte range shares its offset with the next one
        length, offset, hint = extent.length, extent.offset, None
        if crc == extent.crc32:
            message = f"expected CRC-32 {wanted:08x} of the {length} bytes at byte {offset} (manifest), found {crc:08x}"
            hint = RESTORE
        else:
            message = damage_message(length, offset, crc, wanted)
            if (zeros := find_first_zero_page(own.root, extent)) is not None:
                words = f"the page at byte {zeros} is all zeros and was never written, as after a crash"
                hint = f"use another checkpoint: {words}"
        path, tensor = own.root / extent.path, extent.name or None
        problems.add(Corrupt(message, path=path, tensor=tensor, offset=offset, hint=hint))


def verify_whole_files(own: OwnFiles, sums: Mapping[str, FileSum], problems: Problems) -> None:
    """Add problems for files that differ from the manifest without a known cause or that it does not list."""
    for name, wanted in own.recorded_file_sums.items():
        found, path = sums.get(name), own.root / name
        if found is not None and found != wanted and not problems.has_problem_in(path):
            message = f"expected CRC-32 {wanted.crc32:08x} (manifest), found {found.crc32:08x}"
            problems.add(Corrupt(message, path=path, hint=DAMAGED if name in own.layout.paths else RESTORE))
    if own.manifest and own.path.is_dir():
        for name in own.unexpected_files:
            hint = "delete the file if it belongs to another checkpoint"
            problems.add(Corrupt("the manifest does not list this file", path=own.root / name, hint=hint))


def unverified_result(own: OwnFiles, sizes: Mapping[str, int], content: int, problems: Problems) -> Verified:
    """Return the result for files of these sizes with `content` bytes of entries, none of them verified yet."""
    extra = (
        [] if own.manifest else [name for name in own.unexpected_files if not problems.has_problem_in(own.root / name)]
    )
    return Verified(
        own.path,
        own.reader.name,
        notes=(f"left out files that do not belong to this checkpoint: {', '.join(extra)}",) if extra else (),
        files=len(sizes),
        looked_at=frozenset(own.root / name for name in sizes),
        tensors=len(own.layout.tensors),
        nbytes=sum(sizes.values()),
        unchecked_bytes=content,
        has_manifest=own.manifest is not None,
    )

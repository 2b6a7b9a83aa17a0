"""Copy a checkpoint or delta unchanged to a directory or a store, and verify every checksum during the copy."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path

from ckptkit.checkpoints.checkpoint import Checkpoint, Source
from ckptkit.checkpoints.finalize_files import PlacedFiles, files_to_write_last
from ckptkit.checkpoints.find_components import EARLIER, LeftBehind, is_hidden_file_not_copied, reason_not_copied
from ckptkit.checkpoints.manifest import NAME as MANIFEST
from ckptkit.checkpoints.manifest import FileSum, has_stale_manifest
from ckptkit.checkpoints.other_kinds import find_non_checkpoint_kind
from ckptkit.checkpoints.problems import Problems
from ckptkit.checkpoints.replaceable import check_replaceable, check_replaceable_and_find_markers
from ckptkit.checkpoints.salvage_account import NAME as ACCOUNT
from ckptkit.checks.checkpoint_files import OwnFiles
from ckptkit.checks.verify import compare_extent_checksums, file_sizes_of, open_zip_wrappers, verify_whole_files
from ckptkit.engine.scan import Scanned, copy_files
from ckptkit.errors import Corrupt, IOFailure, NoRoom, Unsafe, Usage, translate_os_errors
from ckptkit.io import pieces
from ckptkit.io.allocation import create_file, make_directory, require_free_space, unallocated_bytes
from ckptkit.io.crc32 import crc32
from ckptkit.io.destination import StorePieces, errors_with_resume_hint, open_destination, to_destination
from ckptkit.io.file import file_size, list_children, opening, read_at
from ckptkit.io.joined_path import local_paths_of
from ckptkit.io.local_file import is_link_outside_cache
from ckptkit.io.origin import Origin
from ckptkit.io.path import drop_cached_listing, is_remote, to_path
from ckptkit.io.pieces import LocalPieces, PieceSink, is_sent_in_pieces
from ckptkit.io.progress import BytesDone, Progress, make_progress_reporter
from ckptkit.io.staging import Stage
from ckptkit.layout import Extent
from ckptkit.models.names.weights import training_state_names
from ckptkit.state.directories import is_same_or_inside, require_free_or_replaceable
from ckptkit.summary import Summarized
from ckptkit.trainers import find_step_of_path
from ckptkit.version import __version__
from ckptkit.words import count, describe_checksums, format_bytes

_JOURNAL = "pieces.jsonl"  # lists the pieces already copied, so that an interrupted copy can continue


@dataclass(frozen=True, slots=True)
class CopiedFiles(Summarized):
    """The result of a copy. `files` has the size of each copied file in bytes, by name.

    `checked_bytes` were verified with a CRC-32; `unchecked_bytes` have no checksum. `sent_bytes` were written by this
    call; an interrupted call had written the other bytes, or the store already had them. `left_behind` are entries of
    the source directory that are not copied. A `dry_run` reads and writes no data.
    """

    source: Path
    output: Path
    format: str
    files: Mapping[str, int]
    checked_bytes: int
    unchecked_bytes: int
    sent_bytes: int
    left_behind: tuple[LeftBehind, ...]
    notes: tuple[str, ...]
    seconds: float
    dry_run: bool = False

    @property
    def nbytes(self) -> int:
        return sum(self.files.values())

    def summary(self) -> Iterator[str]:
        if self.dry_run:
            yield f"would copy {self.source} to {self.output}"
            yield f"{count(len(self.files), 'file')}, {format_bytes(self.nbytes)}"
            return
        yield f"copied {self.source} to {self.output}"
        yield f"{count(len(self.files), 'file')}, {format_bytes(self.nbytes)} in {self.seconds:.2f} s"
        yield describe_checksums(self.checked_bytes, self.unchecked_bytes)
        before = self.nbytes - self.sent_bytes
        yield from [f"{format_bytes(before)} were there already"] if before else []


@dataclass(frozen=True, slots=True)
class CopiedComponent:
    """A component of the checkpoint: its files, their byte ranges, and its directory relative to the checkpoint.

    `small_bytes` are in small entries, whose CRC-32 was verified when the archives were opened.
    """

    own: OwnFiles
    extents: tuple[Extent, ...]
    place: str
    small_bytes: int

    def name_in_checkpoint(self, file: str) -> str:
        return f"{self.place}/{file}" if self.place else file


@dataclass(frozen=True, slots=True)
class Contents:
    """The files to copy from directory `root`: `sizes` has their bytes by name.

    `marks` are the files that make a checkpoint complete, and are written last. A delta has no `parts`; `sums` are the
    checksums of its files.
    """

    root: Path
    format: str
    parts: tuple[CopiedComponent, ...]
    sizes: Mapping[str, int]
    marks: tuple[str, ...]
    left: tuple[LeftBehind, ...] = ()
    is_file: bool = False
    sums: Mapping[str, FileSum] = field(default_factory=dict)

    @property
    def has_training_state(self) -> bool:
        return len(self.parts) > 1 or any(training_state_names(part.own.layout) for part in self.parts)

    @property
    def extents(self) -> Iterator[Extent]:
        """Yield the byte ranges of all components, with file names relative to `root`."""
        for part in self.parts:
            yield from (replace(extent, path=part.name_in_checkpoint(extent.path)) for extent in part.extents)


def cp(
    source: Source,
    dst: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    jobs: int | None = None,
    sync: bool = True,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> CopiedFiles:
    """Copy the files of a checkpoint or delta unchanged to `dst`, a local directory or a URL.

    If `source` is a run, copies its latest complete checkpoint. If the checkpoint is one file, `dst` is a file or key.
    The copy is atomic, and the same call continues an interrupted copy. With `dry_run`, only returns what it would
    copy. Raises `Corrupt` if a file is missing or differs from its checksum, `Occupied` if `dst` exists, and
    `IOFailure` if the store refuses.
    """
    began = time.perf_counter()
    path, list_contents = path_and_file_lister(source)
    target = to_destination(dst)
    require_separate_paths(path, target)
    origin = Origin.of(path)  # before the files are listed, to detect a source that is replaced meanwhile
    contents = list_contents()
    if contents.is_file and path.suffix != target.suffix:
        is_in_directory = not is_remote(target) and target.is_dir()
        named = target / path.name if is_in_directory else target.with_name(target.name + path.suffix)
        hint = f"name the copy like `{named}`"
        raise Usage(f"the source is a file that ends in `{path.suffix}`", path=path, hint=hint)
    advance = make_progress_reporter(progress, sum(contents.sizes.values()))
    send = partial(copy_into_sink, contents, jobs=jobs, progress=advance, origin=origin)
    sent_bytes = 0
    notes: list[str] = []
    if dry_run:
        require_free_or_replaceable(target, overwrite=overwrite, is_file=contents.is_file)
    elif is_remote(target):
        sent_bytes, notes = copy_to_store(contents, target, send, overwrite=overwrite)
    else:
        sent_bytes = copy_to_directory(contents, target, path, send, overwrite=overwrite, sync=sync)
    delta_bytes = sum(file.nbytes for file in contents.sums.values())
    checked = 0 if dry_run else delta_bytes + count_checksummed_bytes(contents.parts)
    total = 0 if dry_run else sum(contents.sizes.values())
    return CopiedFiles(
        source=path,
        output=target,
        format=contents.format,
        files=contents.sizes,
        checked_bytes=checked,
        unchecked_bytes=total - checked,
        sent_bytes=sent_bytes,
        left_behind=contents.left,
        notes=tuple(notes),
        seconds=time.perf_counter() - began,
        dry_run=dry_run,
    )


def path_and_file_lister(source: Source) -> tuple[Path, Callable[[], Contents]]:
    """Return the path of a checkpoint or delta, and a function that lists its files."""
    if not isinstance(source, Checkpoint):
        kind = find_non_checkpoint_kind(path := to_path(source))
        if kind and kind.is_complete(path):
            return path, partial(kind.list_contents, path)
    checkpoint = Checkpoint.open(source)
    return checkpoint.path, partial(list_checkpoint_files, checkpoint)


def require_separate_paths(path: Path, target: Path) -> None:
    """Raise `Unsafe` if the source contains the destination or the other way round."""
    sources, destination = [root.resolve() for root in local_paths_of(path)], target.resolve()
    if any(is_same_or_inside(root, destination) or is_same_or_inside(destination, root) for root in sources):
        hint = "choose another destination"
        raise Unsafe("one of source and destination contains the other", path=target, hint=hint)


def list_checkpoint_files(checkpoint: Checkpoint) -> Contents:
    """Return the files of a checkpoint to copy. Raises the first problem in its structure."""
    root = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    problems = Problems()
    others = frozenset(part.path for part in checkpoint.components)
    parts: list[CopiedComponent] = []
    for component in checkpoint.components:
        with translate_os_errors(component.path):
            layout = component.reader.read(component.path, problems.add)
            beside = others - {component.path}
            own = OwnFiles(component.reader, component.path, layout, component.manifest, beside)
            content, extents = open_zip_wrappers(own, file_sizes_of(own, problems), problems, with_packed=False)
        place = "" if own.root == root else str(own.root.relative_to(root))
        small_bytes = max(0, content - sum(extent.length for extent in extents))
        parts.append(CopiedComponent(own, tuple(extents), place, small_bytes))
    for problem in problems.all_problems():
        raise problem
    needed = {
        root / part.name_in_checkpoint(name)
        for part in parts
        for name in (*part.own.needed_files, *part.own.recorded_file_sums)
    }
    files = (
        list(copied_and_skipped_files(root, needed))
        if checkpoint.path.is_dir()
        else [(path, "") for path in sorted(needed)]
    )
    sizes = {str(path.relative_to(root)): file_size(path) for path, why in files if not why}
    left = tuple(LeftBehind(path, why, str(path.relative_to(root))) for path, why in files if why)
    described = [PlacedFiles(part.place, part.own.needed_files, part.own.layout.descriptions) for part in parts]
    marks = files_to_write_last(described, sizes, is_for_loaders=parts[0].own.reader.is_model_only)
    ordered = {name: sizes[name] for name in (*sorted(sizes.keys() - set(marks)), *marks)}
    is_file = not checkpoint.path.is_dir() and len(sizes) == 1
    return Contents(root, parts[0].own.reader.name, tuple(parts), ordered, marks, left, is_file)


def copied_and_skipped_files(directory: Path, needed: set[Path]) -> Iterator[tuple[Path, str]]:
    """Yield the files below a directory that are copied, with "", and the entries that are not, with the reason."""
    paths = list_children(directory)
    names = {path.name for path in paths}
    for path in paths:
        if path.name == MANIFEST and has_stale_manifest(
            directory
        ):  # mtimes show that it is stale; the copy has new ones
            yield path, EARLIER
        elif path in needed or path.name in (MANIFEST, ACCOUNT):
            yield path, ""
        elif path.is_dir() and not path.is_symlink():
            is_foreign = is_hidden_file_not_copied(path.name, names) or find_step_of_path(path) is not None
            if is_foreign and not any(path in file.parents for file in needed):
                yield path, reason_not_copied(path, names)
            else:
                yield from copied_and_skipped_files(path, needed)
        elif is_hidden_file_not_copied(path.name, names) or is_link_outside_cache(path) or not path.is_file():
            yield path, reason_not_copied(path, names)
        else:
            yield path, ""


def count_checksummed_bytes(components: Sequence[CopiedComponent]) -> int:
    """Return the number of bytes with a CRC-32: files in manifests, and byte ranges with a checksum elsewhere.

    The manifest of one component may also list the files of another.
    """
    files = {
        one.name_in_checkpoint(name): file.nbytes
        for one in components
        for name, file in one.own.recorded_file_sums.items()
    }
    others = [one for one in components if not files.keys() >= set(map(one.name_in_checkpoint, one.own.needed_files))]
    ranges = {
        (one.name_in_checkpoint(extent.path), extent.offset): extent.length
        for one in others
        for extent in one.extents
        if one.own.expected_checksum(extent) is not None
    }
    return sum(files.values()) + sum(ranges.values()) + sum(one.small_bytes for one in others)


def copy_into_sink(
    contents: Contents, sink: PieceSink, *, jobs: int | None, progress: BytesDone | None, origin: Origin
) -> Scanned:
    """Copy every file into a sink. Raises `Corrupt` if a checksum differs, `IOFailure` if the source was replaced."""
    problems = Problems()
    root, sizes = contents.root, contents.sizes
    scanned = copy_files(root, sizes, contents.extents, sink, problems.add, jobs=jobs, progress=progress)
    for part in contents.parts:
        own = part.own
        sums = {
            (e.path, e.offset): scanned.extents.get((part.name_in_checkpoint(e.path), e.offset)) for e in part.extents
        }
        compare_extent_checksums(own, part.extents, {k: crc for k, crc in sums.items() if crc is not None}, problems)
        names = [name for name in own.recorded_file_sums if part.name_in_checkpoint(name) in scanned.files]
        verify_whole_files(
            own,
            {n: FileSum(sizes[part.name_in_checkpoint(n)], scanned.files[part.name_in_checkpoint(n)]) for n in names},
            problems,
        )
    for name, expected in contents.sums.items():
        if FileSum(sizes[name], scanned.files[name]) != expected:
            message = f"expected {expected.nbytes} bytes, CRC-32 {expected.crc32:08x} as in the manifest, found "
            message += f"{sizes[name]}, {scanned.files[name]:08x}"
            problems.add(Corrupt(message, path=root / name))
    for first in problems.all_problems():
        hint = first.hint or "`ckptkit verify` lists all problems"
        raise Corrupt(first.message, path=first.path, tensor=first.tensor, offset=first.offset, hint=hint)
    origin.require_unchanged()
    return scanned


Send = Callable[[PieceSink], Scanned]


def copy_to_directory(contents: Contents, dst: Path, source: Path, send: Send, *, overwrite: bool, sync: bool) -> int:
    """Copy the files to a local directory, or a single file to a local file. Returns the number of written bytes."""
    if overwrite and not (contents.is_file and not dst.is_file()):
        check_replaceable(dst, contents.sizes, output_is_training=contents.has_training_state)
    with translate_os_errors(source):
        files = {name: [size, (contents.root / name).stat().st_mtime_ns] for name, size in contents.sizes.items()}
    # a later call with the same key continues the copy after an interruption
    facts = {"command": "cp", "ckptkit": __version__, "source": str(source.absolute()), "files": files}
    key = json.dumps(facts, indent=1).encode()
    stage = Stage(dst, overwrite=overwrite, sync=sync, key=key, is_file=contents.is_file)
    journal = stage.notes_directory / _JOURNAL

    def may_resume(error: BaseException) -> bool:  # after an interruption or I/O failure, except a full disk
        is_failure = isinstance(error, IOFailure) and not isinstance(error, NoRoom)
        return (is_failure or not isinstance(error, Exception)) and journal.exists()

    with stage.opened(may_resume):
        require_free_space(stage.dst, unallocated_bytes(stage.path, contents.sizes))
        for name, size in contents.sizes.items():
            make_directory((stage.path / name).parent)
            create_file(stage.path / name, size, (), must_be_new=False)
        sink = LocalPieces(stage.path, journal)
        send(sink)
        stage.commit()
    return sum(contents.sizes.values()) - sink.resumed_bytes


def copy_to_store(contents: Contents, dst: Path, send: Send, *, overwrite: bool) -> tuple[int, list[str]]:
    """Copy the files to a prefix in a store, or a single file to a key. Returns the number of sent bytes, and notes.

    The marks are completed last, so that readers never see an incomplete checkpoint as complete.
    """
    sizes, marks = contents.sizes, contents.marks
    facts = json.dumps([pieces.PART_BYTES, *sorted(sizes.items())])
    plan = blake2b(facts.encode(), digest_size=16).hexdigest()  # identifies the upload, so that it can be continued
    destination = open_destination(dst, sizes, marks, plan=plan, is_file=contents.is_file)
    destination.claim(
        overwrite=overwrite,
        check=partial(check_replaceable_and_find_markers, dst, sizes, output_is_training=contents.has_training_state),
    )
    with errors_with_resume_hint(destination):
        sums = send(StorePieces(destination, marks)).files
        for name in (*(name for name in sizes if name not in marks), *marks):
            if is_sent_in_pieces(sizes[name]) or name not in marks:
                destination.finish_file(name, sums[name])
            else:
                path = contents.root / name
                with opening(path) as file:
                    content = read_at(file, sizes[name], 0)
                if crc32(content) != sums[name]:
                    hint = "run the same command again"
                    raise Corrupt("the file changed while it was being copied", path=path, hint=hint)
                destination.put_marker(name, bytearray(content), sums[name])
        destination.commit()
    drop_cached_listing(dst)
    return destination.sent_bytes, destination.missing_feature_remarks()

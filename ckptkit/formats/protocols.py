"""The protocols of a format: reader, writer, and writer of non-tensor entries."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

from ckptkit.errors import CkptError, Corrupt, Report, Unsafe, Unsupported, raise_problem, translate_os_errors
from ckptkit.io.file import names_in
from ckptkit.layout import Extent, FileOffset, Layout, NewFile, Patch, WriterOptions

_HEADER = 1 << 15  # bytes: a typical header of a file
JOURNAL = ".ckptkit-delta"  # in a directory whose files are being changed in place, or that was interrupted


class FormatReader(Protocol):
    """A format that ckptkit can read.

    `name` is the word that users type, `known_by` the files that `detect` looks for. `is_sharded` says that each rank
    of a job has its own file; `is_model_only` that the format stores only tensors. `resized_as` is the format that the
    same library loads with any world size, for a format that may be bound to the world size that wrote it; "" for none.
    """

    name: str
    known_by: str
    is_sharded: bool = False
    is_model_only: bool = False
    resized_as: str = ""

    def owns_file(self, name: str) -> bool:
        """Return True if a file of this name belongs to a checkpoint in its directory, current or older."""

    def rank_of(self, name: str) -> int | None:  # noqa: ARG002 - most names have no rank
        """Return the rank that wrote a file of this name, None for a name without a rank."""
        return None

    def ranks_in(self, names: Iterable[str]) -> set[Hashable]:
        """Return the ranks that wrote files of these names, as any values that identify them."""
        return {rank for name in names if (rank := self.rank_of(name)) is not None}

    def detect(self, path: Path) -> bool:
        """Return True if `path` looks like this format. Cheap: reads file names, never data."""

    def check_files_complete(self, path: Path, report: Report) -> None:
        """Report or raise every problem of the checkpoint at `path` that names and sizes reveal.

        May open small files that describe others: an index, the directory at an archive's end.
        """

    def problems(self, path: Path) -> list[CkptError]:
        """Return the problems that `check_files_complete` finds. Raises `IOFailure`: that proves nothing."""
        problems: list[CkptError] = []
        report = problems.append
        with translate_os_errors(path):
            try:
                self.check_files_complete(path, report)
            except (Corrupt, Unsafe, Unsupported) as error:
                report(error)
        return problems

    def is_complete(self, path: Path) -> bool:
        """Return True if `check_files_complete` finds no problem."""
        return not self.problems(path)

    def metadata_nbytes(self, path: Path) -> int:
        """Return about how many bytes `read` parses; without separate metadata, a little of each file."""
        return _HEADER * (len(names_in(path)) if path.is_dir() else 1)

    def read(self, path: Path, report: Report = raise_problem) -> Layout:
        """Return the location of every chunk of the checkpoint at `path`. Reads no tensor data.

        Reports data that is missing, too short or contradictory; raises an error if the checkpoint is unreadable.
        """

    def read_by_other_metadata(self, path: Path, other: Path, report: Report = raise_problem) -> Layout | None:  # noqa: ARG002
        """Return the layout of files at `path` without metadata, by the metadata of another checkpoint of the same run.

        Returns None if the format does not support this, or if the files have metadata. Raises `Mismatch` if the files
        differ from the metadata of `other`; reports files that are missing or cut short.
        """
        return None

    def is_bound_to_world_size(self, path: Path) -> bool:  # noqa: ARG002 - most load with any number
        """Return True if its own library can load the checkpoint only with the world size that wrote it."""
        return False

    def least_torch_version(self, path: Path) -> str | None:  # noqa: ARG002 - every version reads most
        """Return the oldest torch version whose reader loads the checkpoint at `path`, None for any version."""
        return None

    def checksummed_extents(self, layout: Layout, report: Report = raise_problem) -> Iterator[Extent]:
        """Yield the byte ranges of the layout from `read`, with their CRC-32. May verify small ones at once instead."""


@runtime_checkable
class FormatWriter(FormatReader, Protocol):
    """A format that ckptkit can also write. Its reader reads the files back once they are laid out.

    `suffixes` are the suffixes of a checkpoint that is a single file. `drafted_by` is for a format that needs other
    entries than checkpoints have: the `module:function` that returns a `Conversion` for a `Checkpoint`, the output and
    `ConvertOptions`. `needs_shapes` requires that each elementwise optimizer state has the shape of its parameter. With
    `ties` tensors that are tied in the source share their bytes in the output. With `repeats` several files store the
    same data, and `patches_after_data` copies it from one to the others.
    """

    suffixes: tuple[str, ...] = ()
    drafted_by: str = ""
    needs_shapes: bool = False
    ties: bool = False
    repeats: bool = False

    def lay_out_files(self, wanted: Layout, options: WriterOptions) -> tuple[NewFile, ...]:
        """Return the files for the entries of `wanted`: final names and sizes, and all bytes except the data."""

    def remarks_on_changes(self, wanted: Layout) -> Iterable[str]:  # noqa: ARG002 - most have nothing to say
        """Yield a sentence for each difference between `wanted` and the files that `lay_out_files` returns."""
        return ()

    def checksum_offsets(self, written: Layout) -> Iterable[tuple[FileOffset, int]]:  # noqa: ARG002 - most record none
        """Return the locations of CRC-32s, 4 bytes little endian: each chunk with an offset in its file."""
        return ()

    def patches_after_data(self, written: Layout, checksums: Mapping[FileOffset, int]) -> Iterable[tuple[str, Patch]]:
        """Return the bytes to write, by file, once the data is there. `checksums` has the CRC-32 of each chunk."""
        for place, at in self.checksum_offsets(written):
            if place in checksums:
                yield place[0], (at, checksums[place].to_bytes(4, "little"))

    def check_with_own_library(self, written: Layout) -> None:  # noqa: ARG002 - the library may be one that must not be imported
        """Raise `Corrupt` if the format's own library reads something else from the files than `written` says."""
        return


@runtime_checkable
class EntryWriter(FormatWriter, Protocol):
    """A format with room for non-tensor entries whose sizes are known only while the data is written.

    Then `lay_out_files` gets the tensors alone, and each rank writes its entries, as archives of torch.save, into its
    own file.
    """

    def entries_file_name(self, rank: int) -> str:
        """Return the name of a rank's file of entries. It is removed at the end if the format does not own it."""

    def patches_for_non_tensors(self, wanted: Layout, options: WriterOptions) -> Iterable[tuple[str, Patch]]:
        """Return the bytes that add the non-tensor entries of `wanted`, by file, before `patches_after_data`."""

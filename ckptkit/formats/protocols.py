"""The protocols of a format: reader, writer and writer of entries."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

from ckptkit.errors import CkptError, Corrupt, Report, Unsafe, Unsupported, refuse, translate_os_errors
from ckptkit.io.file import names_in
from ckptkit.layout import Extent, FileOffset, Layout, NewFile, Patch, WriterOptions

_HEADER = 1 << 15  # bytes, as a header of a file has them
JOURNAL = ".ckptkit-delta"  # in a directory whose files are being changed in place, or were when that was interrupted


class FormatReader(Protocol):
    """A format that can be read.

    `name` is the word that users type, `known_by` says what `detect` looks for. `is_sharded` if each rank of a job has
    a file of its own; `is_model_only` if nothing but tensors has a place in it. Of one that can be bound to as many
    ranks as have written it, `resized_as` is the format that its library loads with any number, "" for none.
    """

    name: str
    known_by: str
    is_sharded: bool = False
    is_model_only: bool = False
    resized_as: str = ""

    def owns(self, name: str) -> bool:
        """Return True if a file of this name, in a checkpoint's directory, is part of it or of an older one."""

    def rank_of(self, name: str) -> int | None:  # noqa: ARG002 - most names tell none
        """Return the rank that wrote a file of this name, None where names do not tell."""
        return None

    def ranks_in(self, names: Iterable[str]) -> set[Hashable]:
        """Return the ranks that have written files of these names, each by whatever tells it from the others."""
        return {rank for name in names if (rank := self.rank_of(name)) is not None}

    def detect(self, path: Path) -> bool:
        """Return True if `path` looks like mine. Cheap: file names, never data."""

    def check_names(self, path: Path, report: Report) -> None:
        """Report or raise what keeps the checkpoint at `path` from being read, as far as names and sizes tell.

        Small files that describe others may be opened: an index, the directory at an archive's end.
        """

    def problems(self, path: Path) -> list[CkptError]:
        """Return what `check_names` says. Raises `IOFailure`: a failing system says nothing of the checkpoint."""
        found: list[CkptError] = []
        report = found.append
        with translate_os_errors(path):
            try:
                self.check_names(path, report)
            except (Corrupt, Unsafe, Unsupported) as error:
                report(error)
        return found

    def is_complete(self, path: Path) -> bool:
        """Return True if what `detect` saw has no problems."""
        return not self.problems(path)

    def metadata_bytes(self, path: Path) -> int:
        """Return about how many bytes `read` has to parse: without metadata of their own, a little of each file."""
        return _HEADER * (len(names_in(path)) if path.is_dir() else 1)

    def read(self, path: Path, report: Report = refuse) -> Layout:
        """Return where every chunk of the checkpoint at `path` lies. Opens no tensor data.

        Reports whatever is missing, too short or contradicts itself; raises what makes it unreadable.
        """

    def read_like(self, path: Path, other: Path, report: Report = refuse) -> Layout | None:  # noqa: ARG002
        """Return the layout of files at `path` that lack a description, by that of another checkpoint of the same run.

        None if the format cannot, or if the files have a description. Raises `Mismatch` if the files differ from what
        `other` describes; reports files that are missing or cut short.
        """
        return None

    def is_bound(self, path: Path) -> bool:  # noqa: ARG002 - most are loaded by any number
        """Return True if its own library loads the checkpoint at `path` with as many ranks only as have written it."""
        return False

    def least_torch(self, path: Path) -> str | None:  # noqa: ARG002 - most are read by every version
        """Return the version of torch before which its own reader fails on the checkpoint at `path`, None for any."""
        return None

    def extents(self, layout: Layout, report: Report = refuse) -> Iterator[Extent]:
        """Return the bytes of what `read` gave, each run with the CRC-32 that was recorded for it.

        Small runs that have one may be compared right away: those that differ are reported, the others left out.
        """


@runtime_checkable
class FormatWriter(FormatReader, Protocol):
    """A format that can also be written: by its reader, once its files have been made.

    `suffixes` are those of a file that is a checkpoint by itself, if one can be. With `needs_names` a model has to lie
    under `model`, and its optimizer by the names of parameters under `optimizer`, as torch's own state dicts have it.
    With `needs_shapes` each elementwise state has to have the shape of its parameter.
    With `ties` tensors that are one in the source share their bytes in the output.
    With `repeats` some data stands in several files, and `seal` copies it from one to the others.
    """

    suffixes: tuple[str, ...] = ()
    needs_names: bool = False
    needs_shapes: bool = False
    ties: bool = False
    repeats: bool = False

    def arrange(self, wanted: Layout, options: WriterOptions) -> tuple[NewFile, ...]:
        """Return the files for the tensors and blobs of `wanted`: final names and sizes, all but the data."""

    def remarks(self, wanted: Layout) -> Iterable[str]:  # noqa: ARG002 - most have nothing to say
        """Return in words how what `arrange` makes of `wanted` is of another kind than that."""
        return ()

    def checksum_places(self, made: Layout) -> Iterable[tuple[FileOffset, int]]:  # noqa: ARG002 - most record none
        """Return where CRC-32 stand, in 4 bytes of little endian: the place of each chunk, and offsets in its file."""
        return ()

    def seal(self, made: Layout, checksums: Mapping[FileOffset, int]) -> Iterable[tuple[str, Patch]]:
        """Return what is to be written, by file, when the data is there: `checksums` has the CRC-32 of each chunk."""
        for place, at in self.checksum_places(made):
            if place in checksums:
                yield place[0], (at, checksums[place].to_bytes(4, "little"))

    def check(self, made: Layout) -> None:  # noqa: ARG002 - the library may be the one that is not to be imported
        """Raise `Corrupt` if the format's own library does not see in the files what `made` says is there."""
        return


@runtime_checkable
class EntryWriter(FormatWriter, Protocol):
    """A format with a place for entries that are no tensors, the sizes of which show only while data is written.

    `arrange` has then been given the tensors alone. Each rank leaves its entries, archives of torch.save, one after the
    other in a file of its own.
    """

    def entries_file(self, rank: int) -> str:
        """Return the name of the file for the entries of a rank. One that the format does not own goes in the end."""

    def embed(self, wanted: Layout, options: WriterOptions) -> Iterable[tuple[str, Patch]]:
        """Return what is to be written, by file, for the blobs of `wanted` to be in the checkpoint, before `seal`."""

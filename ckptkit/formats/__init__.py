"""Formats: the protocols that each keeps, the table of all, and the way from a path to its layout.

A format is one file here and one line in `FORMATS`. It imports no other format, and nothing imports it by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast, runtime_checkable

from ckptkit.errors import NotACheckpoint, Report, Unsupported, refuse, translate_os_errors
from ckptkit.layout import Extent, Layout, NewFile, Options, Part, Place

# the word that users type, and the class, imported when first needed; `open_layout` asks in this order
FORMATS = {
    "dcp": "ckptkit.formats.dcp.format:Dcp",
    "hf": "ckptkit.formats.hf.format:HuggingFace",
    "pt": "ckptkit.formats.pt.format:Pt",
}


class Reader(Protocol):
    """A format that can be read. It `is_sharded` if each rank of a job has a file of its own."""

    name: str
    is_sharded: bool
    is_model_only: bool  # it has no place for anything but tensors of a model

    def owns(self, name: str) -> bool:
        """True if a file of this name, in a checkpoint's directory, can only be a part of it or of an older one."""

    def rank_of(self, name: str) -> int | None:
        """The rank that wrote a file of this name, None where names do not tell."""

    def detect(self, path: Path) -> bool:
        """True if `path` looks like mine. Cheap: file names, never data."""

    def is_complete(self, path: Path) -> bool:
        """True if what `detect` saw has been written to its end."""

    def read(self, path: Path, report: Report = refuse) -> Layout:
        """Where every chunk of the checkpoint at `path` lies. Opens no tensor data.

        Reports whatever is missing, too short or contradicts itself; raises what makes it unreadable.
        """

    def locate(self, layout: Layout, report: Report = refuse) -> Layout:
        """The layout with the bytes of each chunk found inside the envelope they may be wrapped in.

        Reports each chunk of which they are not, and leaves it as it is.
        """

    def extents(self, layout: Layout, report: Report = refuse) -> Iterator[Extent]:
        """The bytes of what `read` gave, each run with the CRC-32 that was recorded for it.

        Small runs that have one may be compared right away: those that differ are reported, the others left out.
        """


@runtime_checkable
class Writer(Reader, Protocol):
    """A format that can also be written: by its reader, once its files have been made.

    `suffixes` are those of a file that is a checkpoint by itself, if one can be.
    """

    suffixes: tuple[str, ...]  # of a checkpoint that is one file

    def arrange(self, wanted: Layout, options: Options) -> tuple[NewFile, ...]:
        """The files of a checkpoint with the tensors and blobs of `wanted`: final names and sizes, all but the data."""

    def seal(self, made: Layout, checksums: Mapping[Place, int]) -> Iterable[tuple[str, Part]]:
        """What is to be written, by file, when the data is there: `checksums` gives the CRC-32 of each chunk."""


@cache
def get_format(name: str) -> Reader:
    """The format that users call `name`."""
    module, _, attribute = FORMATS[name].partition(":")
    return cast(Reader, getattr(import_module(module), attribute)())


def get_writer(name: str) -> Writer:
    """The format `name`, to write. Raises `Unsupported` for one that can only be read."""
    found = get_format(name)
    if not isinstance(found, Writer):
        raise Unsupported(f"ckptkit reads `{name}`, but does not write it")
    return found


def describe_formats() -> str:
    """Return what each format is known by, in words."""
    return "DCP's `.metadata`, `*.safetensors` with its index, a file of torch.save"


def detect_format(path: Path) -> Reader | None:
    """The first format that claims `path`, or None."""
    with translate_os_errors(path):
        return next((reader for reader in map(get_format, FORMATS) if reader.detect(path)), None)


def find_format(path: Path) -> Reader:
    """The format of the checkpoint at `path`. Raises `NotACheckpoint` if none claims it."""
    reader = detect_format(path)
    if reader is None:
        what = "no checkpoint in any known format" if path.exists() else "no such file or directory"
        raise NotACheckpoint(what, path=path, hint=f"looked for: {describe_formats()}")
    return reader


def locate(layout: Layout) -> Layout:
    """The layout with every chunk's bytes found; what a plan needs."""
    with translate_os_errors(layout.root):
        return get_format(layout.format).locate(layout)

"""Drafts: conversions thought through, of which nothing has been written. All that a dry run needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ckptkit.files.file import file_size
from ckptkit.files.origin import Origin
from ckptkit.formats import Writer, locate
from ckptkit.layout import Layout, NewFile, Options


@dataclass(frozen=True, slots=True)
class Draft:
    """A conversion thought through: the source with every byte found, and the files to be made of it.

    They will lie in `place`, a directory in the output or, if it is empty, the output itself.
    """

    place: str
    source: Layout
    writer: Writer
    files: tuple[NewFile, ...]


@dataclass(frozen=True, slots=True)
class Drafts:
    """All that an output is made of: a draft for each part of a checkpoint, and other files, given or to be copied.

    All of it comes from `origin`. What a manifest says of where a part comes from is `made_of`, if that is given.
    """

    origin: Origin
    parts: Sequence[Draft]
    given: Mapping[str, bytes] = field(default_factory=dict)
    copied: Mapping[str, Path] = field(default_factory=dict)
    made_of: Mapping[str, str] | None = None

    @property
    def file_sizes(self) -> dict[str, int]:
        """Bytes by file name."""
        sizes = {str(Path(part.place, file.name)): file.nbytes for part in self.parts for file in part.files}
        sizes |= {name: len(content) for name, content in self.given.items()}
        return sizes | {name: file_size(path) for name, path in self.copied.items()}

    def names_in(self, place: str) -> list[str]:
        """The names of the files directly in a directory of the output."""
        return [path.name for path in map(Path, self.file_sizes) if path.parent == Path(place)]


def make_draft(wanted: Layout, writer: Writer, options: Options, place: str = "") -> Draft:
    """Find every byte of `wanted` and arrange the files. Nothing is written, so this is all of a dry run."""
    files = writer.arrange(wanted, options)
    return Draft(place, locate(wanted), writer, files)

"""Archives that are compared with one before them: what is found in one is what reading all of it would find."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from ckptkit.errors import CkptError
from ckptkit.formats.archives.locate import ArchiveTemplates
from ckptkit.formats.archives.zip_entries import Located, locate_single_tensor
from ckptkit.io.file import OpenFiles, ReadAhead
from tests.formats.archives.test_read_archive import reader


def archive(seed: int, numel: int = 3000) -> bytes:
    """Some numbers as torch saves them."""
    file = io.BytesIO()
    torch.save(torch.randn(numel, generator=torch.Generator().manual_seed(seed)), file)
    return file.getvalue()


class Counting(ReadAhead):
    """Reads ahead, and counts what it was asked for."""

    reads = 0

    def buffer_containing(self, name: str, offset: int, length: int) -> tuple[bytearray, int]:
        self.reads += 1
        return super().buffer_containing(name, offset, length)


class Archives:
    """Archives as items of files that are read ahead."""

    def __init__(self, root: Path) -> None:
        self.files = OpenFiles(root)
        self.ahead = Counting(self.files)
        self.templates = ArchiveTemplates()
        self._root = root
        self._count = itertools.count()

    def locate(self, data: bytes) -> Located:
        """Find the tensor of an archive that lies in a file of its own, behind other bytes."""
        name = str(next(self._count))
        (self._root / name).write_bytes(b"before" + data + b"behind")
        return self.templates.locate_tensor(self.ahead, name, len(b"before"), len(data))


@pytest.fixture
def archives(tmp_path: Path) -> Iterator[Archives]:
    found = Archives(tmp_path)
    with found.files:
        yield found


def found_or_said(locate: Callable[[bytes], Located], data: bytes) -> Located | str:
    try:
        return locate(data)
    except CkptError as error:
        return error.message


def locate_anew(data: bytes) -> Located:
    return locate_single_tensor(reader(data), len(data))[0]


def test_archives_of_one_shape_fit_the_first(archives: Archives) -> None:
    for seed in range(5):
        data = archive(seed)
        archives.ahead.reads = 0
        assert archives.locate(data) == locate_anew(data)
        assert archives.ahead.reads == 2 or seed == 0


def test_a_byte_that_differs_is_seen_as_without_the_template(archives: Archives) -> None:
    first, second = archive(0), archive(1)
    place = locate_anew(first)
    around = [*range(place.offset), *range(place.offset + place.length, len(first))]
    seen = set()
    for at in around:
        archives.templates = ArchiveTemplates()
        archives.locate(first)
        damaged = bytearray(second)
        damaged[at] ^= 0x11
        expected = found_or_said(locate_anew, bytes(damaged))
        assert found_or_said(archives.locate, bytes(damaged)) == expected, at
        seen.add(type(expected))
    assert seen == {Located, str}


def test_a_damaged_one_between_does_no_harm(archives: Archives) -> None:
    other = archive(0).replace(b"FloatStorage", b"IntStorage\0\0")
    for data in (archive(1), other, archive(2), archive(3)):
        assert found_or_said(archives.locate, data) == found_or_said(locate_anew, data)


@pytest.mark.parametrize("what", ["a part of a storage", "a parameter"])
def test_what_makes_no_template_is_still_found(archives: Archives, what: str) -> None:
    numbers = torch.arange(4000.0)
    file = io.BytesIO()
    torch.save(numbers[10:20] if what == "a part of a storage" else torch.nn.Parameter(numbers), file)
    data = file.getvalue()
    for _ in range(2):
        assert archives.locate(data) == locate_anew(data)

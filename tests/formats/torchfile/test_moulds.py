"""Archives that are compared with one before them: what is found in one is what reading all of it would find."""

from __future__ import annotations

import io

import pytest
import torch

from ckptkit.errors import CkptError
from ckptkit.formats.torchfile.moulds import Moulds
from ckptkit.formats.torchfile.read_archive import Located, open_archive
from tests.formats.torchfile.test_read_archive import reader


def archive(seed: int, numel: int = 3000) -> bytes:
    """Some numbers as torch saves them."""
    file = io.BytesIO()
    torch.save(torch.randn(numel, generator=torch.Generator().manual_seed(seed)), file)
    return file.getvalue()


def found_or_said(moulds: Moulds | None, data: bytes) -> Located | str:
    try:
        if moulds is None:
            return open_archive(reader(data), len(data))[0]
        return moulds.locate(reader(data), len(data))
    except CkptError as error:
        return str(error)


def test_archives_of_one_shape_fit_the_first() -> None:
    moulds = Moulds()
    for seed in range(5):
        data = archive(seed)
        read: list[int] = []

        def counting(offset: int, length: int, data: bytes = data, read: list[int] = read) -> bytes:
            read.append(length)
            return reader(data)(offset, length)

        assert moulds.locate(counting, len(data)) == open_archive(reader(data), len(data))[0]
        assert len(read) == (4 if seed == 0 else 2)


def test_a_byte_that_differs_is_seen_as_without_the_mould() -> None:
    first, second = archive(0), archive(1)
    place = open_archive(reader(first), len(first))[0]
    around = [*range(place.offset), *range(place.offset + place.length, len(first))]
    seen = set()
    for at in around:
        moulds = Moulds()
        moulds.locate(reader(first), len(first))
        damaged = bytearray(second)
        damaged[at] ^= 0x11
        expected = found_or_said(None, bytes(damaged))
        assert found_or_said(moulds, bytes(damaged)) == expected, at
        seen.add(type(expected))
    assert seen == {Located, str}


def test_a_damaged_one_between_does_no_harm() -> None:
    moulds = Moulds()
    other = archive(0).replace(b"FloatStorage", b"IntStorage\0\0")
    for data in (archive(1), other, archive(2), archive(3)):
        assert found_or_said(moulds, data) == found_or_said(None, data)


@pytest.mark.parametrize("what", ["a part of a storage", "a parameter"])
def test_what_makes_no_mould_is_still_found(what: str) -> None:
    numbers = torch.arange(4000.0)
    file = io.BytesIO()
    torch.save(numbers[10:20] if what == "a part of a storage" else torch.nn.Parameter(numbers), file)
    data = file.getvalue()
    moulds = Moulds()
    for _ in range(2):
        assert found_or_said(moulds, data) == found_or_said(None, data)

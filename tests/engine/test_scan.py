"""Scans: every CRC-32 that is asked for, of files read once, with whatever number of threads."""

from __future__ import annotations

import random
from pathlib import Path
from zlib import crc32

import pytest

from ckptkit.engine.blocks import BLOCK_BYTES
from ckptkit.engine.scan import file_checksum, find_first_zero_page, scan_files
from ckptkit.errors import CkptError
from ckptkit.layout import Extent

SIZES = {"large": 2 * BLOCK_BYTES + 12_345, "small": 700, "empty": 0}


@pytest.fixture
def files(tmp_path: Path) -> dict[str, bytes]:
    made = {name: random.Random(name).randbytes(size) for name, size in SIZES.items()}
    for name, content in made.items():
        (tmp_path / name).write_bytes(content)
    return made


@pytest.mark.parametrize("jobs", [1, 3])
def test_sums_of_extents_and_files(files: dict[str, bytes], tmp_path: Path, jobs: int) -> None:
    extents = [
        Extent("large", 100, BLOCK_BYTES, 1, "across blocks"),
        Extent("large", BLOCK_BYTES + 100, 5, None, "short"),
        Extent("large", BLOCK_BYTES + 105, BLOCK_BYTES, None, "next to it"),
        Extent("small", 0, 700, None, "whole"),
    ]
    told: list[int] = []
    found = scan_files(tmp_path, SIZES, extents, fail, jobs=jobs, progress=told.append)
    assert found.files == {name: crc32(content) for name, content in files.items()}
    for extent in extents:
        content = files[extent.path][extent.offset : extent.offset + extent.length]
        assert found.extents[extent.path, extent.offset] == crc32(content), extent.name
    assert sum(told) == sum(SIZES.values())


def test_what_cannot_be_read_is_reported_and_the_rest_is_read(files: dict[str, bytes], tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(files["large"][: BLOCK_BYTES + 10])
    extents = [Extent("large", 0, 50, None, "there"), Extent("large", BLOCK_BYTES, 50, None, "gone")]
    problems: list[CkptError] = []
    found = scan_files(tmp_path, SIZES, extents, problems.append, jobs=2)
    assert found.extents["large", 0] == crc32(files["large"][:50])
    assert ("large", BLOCK_BYTES) not in found.extents
    assert found.files == {"small": crc32(files["small"]), "empty": 0}
    assert {problem.path for problem in problems} == {tmp_path / "large"}
    assert "gone" in [problem.tensor for problem in problems]


def test_the_sum_of_a_file_from_those_of_its_extents(files: dict[str, bytes], tmp_path: Path) -> None:
    parts = [(0, 10), (10, BLOCK_BYTES), (BLOCK_BYTES + 500, 20)]
    extents = [Extent("large", at, n, crc32(files["large"][at : at + n]), "t") for at, n in parts]
    unknown = Extent("large", 3 * 1000 + BLOCK_BYTES, 8, None, "t")
    assert file_checksum(tmp_path, "large", SIZES["large"], [*extents, unknown]) == crc32(files["large"])
    assert file_checksum(tmp_path, "empty", 0, []) == 0
    lie = Extent("large", 10, 5, 77, "t")
    assert file_checksum(tmp_path, "large", SIZES["large"], [lie]) != crc32(files["large"])


def test_a_page_of_zeros_is_found(files: dict[str, bytes], tmp_path: Path) -> None:
    extent = Extent("large", 1, SIZES["large"] - 1, None, "t")
    assert find_first_zero_page(tmp_path, extent) is None
    with (tmp_path / "large").open("r+b") as file:
        file.seek(BLOCK_BYTES + 8192)
        file.write(bytes(4096))
    found = find_first_zero_page(tmp_path, extent)
    assert found is not None
    assert 0 <= BLOCK_BYTES + 8192 - found <= 8
    assert files


def fail(problem: CkptError) -> None:
    raise AssertionError(problem)

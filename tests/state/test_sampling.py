"""A dry run of a large checkpoint opens a sample of its envelopes, and says so."""

from __future__ import annotations

from pathlib import Path

import pytest

import ckptkit
from ckptkit.checkpoints.checkpoint import open_layout
from ckptkit.errors import Corrupt
from ckptkit.state import draft
from tests.producers import counted, save_alone


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint of 40 chunks, for a ckptkit to which more than 10 are many."""
    monkeypatch.setattr(draft, "_MANY_CHUNKS", 10)
    monkeypatch.setattr(draft, "_SAMPLE", 4)
    save_alone({f"layers.{i}.weight": counted(4, 3) + i for i in range(40)}, tmp_path / "in")
    return tmp_path / "in"


def data_file(root: Path) -> Path:
    (path,) = root.glob("*.distcp")
    return path


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 0xFF
    path.write_bytes(content)


def test_a_sample_is_checked_and_said(large: Path, tmp_path: Path) -> None:
    planned = ckptkit.consolidate(large, tmp_path / "out", dry_run=True)
    assert planned.notes == ["checked the headers of 5 of 40 chunks; the conversion itself checks all"]
    done = ckptkit.consolidate(large, tmp_path / "out")
    assert done.notes == []
    assert (planned.files, planned.nbytes, planned.plan) == (done.files, done.nbytes, done.plan)


def test_few_chunks_are_all_checked(large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft, "_MANY_CHUNKS", 40)
    assert ckptkit.consolidate(large, tmp_path / "out", dry_run=True).notes == []


def test_a_damaged_header_in_the_sample(large: Path, tmp_path: Path) -> None:
    last = max(tensor.chunks[0].offset for tensor in open_layout(large).tensors.values())
    flip(data_file(large), last)
    with pytest.raises(Corrupt):
        ckptkit.consolidate(large, tmp_path / "out", dry_run=True)


def test_a_truncated_file(large: Path, tmp_path: Path) -> None:
    path = data_file(large)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(Corrupt):
        ckptkit.consolidate(large, tmp_path / "out", dry_run=True)


def test_what_the_sample_misses_the_conversion_finds(large: Path, tmp_path: Path) -> None:
    chunks = sorted(tensor.chunks[0].offset for tensor in open_layout(large).tensors.values())
    flip(data_file(large), chunks[1])
    ckptkit.consolidate(large, tmp_path / "out", dry_run=True)
    with pytest.raises(Corrupt):
        ckptkit.consolidate(large, tmp_path / "out")
    assert not (tmp_path / "out").exists()

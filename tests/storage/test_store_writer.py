"""dcp.save straight to S3: what torch reads, absent or whole whatever fails, and the checksums that the store has."""

from __future__ import annotations

import threading
import time
import warnings
from base64 import b64decode
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import Shard, distribute_tensor

import ckptkit
from ckptkit.checkpoints.manifest import read_manifest
from ckptkit.errors import IOFailure, Mismatch, Occupied, Unsafe, Unsupported, Usage
from ckptkit.io import pieces
from ckptkit.io.destination import SENDERS, send_file
from ckptkit.io.path import to_path
from ckptkit.io.pieces import PART_BYTES, cut_into_pieces
from ckptkit.storage import Reader, Writer, find_cause
from ckptkit.training.launch import RankPlace, Report, launch, process_group
from tests.producers import counted
from tests.s3 import CLAIM, Place, forget
from tests.storage.states import LARGE, assert_same_bits, blank, every_kind

DATA = "__0_0.distcp"

pytestmark = pytest.mark.usefixtures("alone")


def two_parts() -> Tensor:
    return torch.arange(PART_BYTES // 4, dtype=torch.float32)


def crc_in_store(place: Place, name: str) -> int:
    key = f"run/ckpt-5/{name}"
    found = place.files.call_s3("head_object", Bucket=place.name, Key=key, ChecksumMode="ENABLED")
    assert found.get("ChecksumType", "FULL_OBJECT") == "FULL_OBJECT"
    return int.from_bytes(b64decode(found["ChecksumCRC32"]))


@pytest.mark.slow
def test_torch_reads_what_was_saved_and_the_store_has_its_checksums(place: Place, tmp_path: Path) -> None:
    tensors = every_kind() | {"large": torch.rand(LARGE), "parts": two_parts(), "deep": counted(3, 4, 5)}
    turned = torch.rand(6, 5)
    state = {**tensors, "turned": turned.t(), "step": 7, "loader": {"at": [1, 2]}}
    dcp.save(state, storage_writer=Writer(place.url, files={"config.json": b"{}"}))
    assert place.names() == {DATA, "__0_1.distcp", "config.json", "ckptkit.json", ".metadata"}
    forget()
    assert all(part.is_ok for part in ckptkit.verify(place.url))
    manifest = read_manifest(to_path(place.url))
    assert manifest is not None
    assert {name: one.crc32 for name, one in manifest.files.items()} == {
        name: crc_in_store(place, name) for name in place.names() - {"ckptkit.json"}
    }
    ckptkit.cp(place.url, tmp_path / "copy")
    expected = tensors | {"turned": turned.t().contiguous()}
    readers: list[dict[str, Any]] = [{"checkpoint_id": tmp_path / "copy"}, {"storage_reader": Reader(place.url)}]
    for how in readers:
        found: dict[str, Any] = {**blank(expected), "step": 0, "loader": {"at": [0, 0]}}
        dcp.load(found, **how)
        assert (found.pop("step"), found.pop("loader")) == (7, {"at": [1, 2]})
        assert_same_bits(found, expected)


def test_a_save_behind_the_training(place: Place) -> None:
    state: dict[str, Any] = {"w": two_parts(), "step": 7}
    saving: Any = dcp.async_save(state, storage_writer=Writer(place.url))
    state["w"].zero_()
    saving.result()
    found: dict[str, Any] = {"w": torch.zeros(PART_BYTES // 4), "step": 0}
    dcp.load(found, storage_reader=Reader(place.url))
    assert torch.equal(found["w"], two_parts())


@pytest.mark.nightly
def test_whatever_request_fails_the_checkpoint_is_absent_or_whole(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "PART_BYTES", 5 << 20)
    state = {"w": torch.rand(3 << 19), "step": 7}
    causes = []
    for skip in count():
        url = f"{place.url}-{skip}"
        writer = Writer(url)
        fault = place.server.fail(".", status=403, skip=skip)
        try:
            dcp.save(state, storage_writer=writer)
        except CheckpointException as error:
            causes.append(find_cause(error))
            assert not any(key.endswith(".metadata") for key in place.files.find(url, refresh=True))
            dcp.save(state, storage_writer=writer)
        if fault.times:  # no request was left to fail
            break
    place.server.faults.clear()
    assert len(causes) > 10
    assert {type(cause) for cause in causes} == {IOFailure}
    names = {key.rpartition("/")[2] for key in place.files.find(place.name, refresh=True)}
    assert names == {DATA, "__0_1.distcp", "ckptkit.json", ".metadata", CLAIM}
    claims = [key for key in place.files.find(place.name, refresh=True) if CLAIM in key]
    assert len(claims) == 2, "of those whose deletion failed"
    assert not place.files.call_s3("list_multipart_uploads", Bucket=place.name).get("Uploads")
    forget()
    for number in range(0, skip, 4):
        assert all(part.is_ok for part in ckptkit.verify(f"{place.url}-{number}"))


class FailingPlanner(DefaultSavePlanner):
    """A planner of a rank whose memory cannot be read any more, once some of it is on its way."""

    def resolve_data(self, write_item: Any) -> Any:
        if write_item.index.fqn == "w2":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return super().resolve_data(write_item)


@pytest.mark.slow
def test_an_error_in_the_middle_leaves_no_half_file_as_torch_does(place: Place) -> None:
    state = {f"w{i}": two_parts() + i for i in range(4)}
    theirs = f"s3://{place.name}/theirs"
    with pytest.raises(CheckpointException):
        dcp.save(state, storage_writer=FsspecWriter(theirs), planner=FailingPlanner())
    with pytest.raises(CheckpointException, match="illegal memory"):
        dcp.save(state, storage_writer=Writer(place.url), planner=FailingPlanner())
    assert place.files.find(f"{place.name}/theirs", refresh=True) == [f"{place.name}/theirs/{DATA}"], "torch is fixed"
    assert place.names() == {CLAIM}


@pytest.mark.slow
def test_what_is_there_is_refused_or_replaced(place: Place) -> None:
    dcp.save({"w": counted(3)}, storage_writer=Writer(place.url))
    with pytest.raises(CheckpointException) as refused:
        dcp.save({"w": counted(4)}, storage_writer=Writer(place.url))
    assert isinstance(find_cause(refused.value), Occupied)
    dcp.save({"w": counted(4), "step": 1}, storage_writer=Writer(place.url, overwrite=True))
    found: dict[str, Any] = {"w": torch.zeros(4), "step": 0}
    dcp.load(found, storage_reader=Reader(place.url))
    assert torch.equal(found["w"], counted(4))
    place.files.pipe_file(f"{place.name}/run/ckpt-5/thesis.tex", b"x")
    with pytest.raises(CheckpointException, match="thesis"):
        dcp.save({"w": counted(4)}, storage_writer=Writer(place.url, overwrite=True))
    assert "thesis.tex" in place.names()


def test_a_writer_that_was_replaced_shows_nothing(place: Place) -> None:
    """A training that hangs while its successor saves the same step finds out when it goes on."""
    first, second = Writer(place.url), Writer(place.url, overwrite=True)
    state = {"w": counted(3)}
    place.server.fail("PUT .*__0_0", status=403)
    with pytest.raises(CheckpointException):
        dcp.save(state, storage_writer=first)
    with pytest.raises(CheckpointException) as refused:
        dcp.save(state, storage_writer=Writer(place.url))
    assert isinstance(find_cause(refused.value), Occupied)
    place.server.fail("PUT .*__0_0", first=lambda: dcp.save({"w": counted(4)}, storage_writer=second))
    with pytest.raises(CheckpointException) as stopped:
        dcp.save(state, storage_writer=first)
    assert isinstance(find_cause(stopped.value), Occupied)
    assert ".metadata" in place.names()


def test_what_cannot_go_to_a_store(place: Place, tmp_path: Path) -> None:
    for to in ("hf", "pt"):
        with pytest.raises(Unsupported, match=f"`{to}` cannot go straight to a store") as refused:
            Writer(place.url, to)
        assert refused.value.hint is not None
        assert f"ckptkit convert {place.url} OUT --to {to}" in refused.value.hint
    with pytest.raises(Usage, match="a whole bucket"):
        Writer(f"s3://{place.name}")
    with pytest.raises(Unsafe):
        Writer(place.url, files={"../config.json": b""})
    with pytest.raises(Usage, match="files of its own"):
        Writer(place.url, files={DATA: b""})
    with pytest.raises(CheckpointException) as caught:
        dcp.save({"w": counted(3).to_sparse()}, storage_writer=Writer(place.url))
    assert type(find_cause(caught.value)) is Unsupported
    assert place.names() <= {CLAIM}
    dcp.save({"w": counted(3)}, checkpoint_id=place.url, storage_writer=Writer(tmp_path / "out", overwrite=True))
    assert ".metadata" in place.names()


def test_a_stream_holds_a_few_pieces(tmp_path: Path) -> None:
    held: set[int] = set()
    most = 0
    changed = threading.Condition()

    class There:
        def put(self, piece: Any, data: bytearray, crc: int) -> None:
            nonlocal most
            with changed:
                held.add(piece.number)
                most = max(most, len(held))
                changed.notify_all()
                changed.wait_for(lambda: most >= SENDERS, timeout=30)
            time.sleep(0.05)  # in which one too many would come
            with changed:
                held.remove(piece.number)

        def finish_file(self, name: str, crc: int) -> None:
            pass

        def stop(self, error: BaseException) -> None:
            pass

    size = 7 * PART_BYTES + 5
    there: Any = There()
    send_file(there, "x", size, (bytes(piece.length) for piece in cut_into_pieces("x", size)))
    assert most == SENDERS
    with pytest.raises(ValueError, match="fewer bytes"):
        send_file(there, "x", 5, [b"1234"])


# -- together ----------------------------------------------------------------------------------------------------------


def save_on_ranks(url: str, place: RankPlace, report: Report) -> None:
    """A failure of one rank shows nothing to anybody; the same writer saves later, and another one behind."""
    warnings.simplefilter("ignore")
    with process_group(place, "cpu") as mesh:
        last = place.rank == place.world_size - 1
        large = two_parts() if place.rank == 0 else counted(1, 3)  # of one rank: few bytes for a slow server
        rows = distribute_tensor(counted(7, 3), mesh, [Shard(0)], src_data_rank=None)
        few = distribute_tensor(counted(1, 3), mesh, [Shard(0)], src_data_rank=None)
        model = {"rows": rows, "few": few, "plain": counted(5)}
        writer = Writer(f"{url}-failed")
        with pytest.raises(CheckpointException) as caught:
            dcp.save({"w0": rows, "w2": few}, storage_writer=writer, planner=FailingPlanner() if last else None)
        report(list(caught.value.failures))
        with pytest.raises(CheckpointException) as caught:
            dcp.save({"w": few.double() if last else few}, storage_writer=writer)
        report(isinstance(find_cause(caught.value), Mismatch))
        dcp.save(model, storage_writer=writer)
        state = {"model": model, f"rank{place.rank}": {"at": place.rank, "large": large}}
        saving: Any = dcp.async_save(state, storage_writer=Writer(url))
        rows.to_local().zero_()
        saving.result()


def load_on_ranks(url: str, place: RankPlace, report: Report) -> None:
    with process_group(place, "cpu") as mesh:
        rows = distribute_tensor(torch.zeros(7, 3), mesh, [Shard(0)], src_data_rank=None)
        model = {"rows": rows, "plain": torch.zeros(5)}
        state: dict[str, Any] = {"model": model, "rank0": blank({"large": two_parts()}), "rank1": {"at": -1}}
        dcp.load(state, storage_reader=Reader(url, unasked="ignore"))
        report(torch.equal(rows.full_tensor(), counted(7, 3)) and torch.equal(model["plain"], counted(5)))
        report(torch.equal(state["rank0"]["large"], two_parts()) and state["rank1"]["at"] == 1)
        rows.to_local().zero_()
        dcp.load(model, storage_reader=Reader(f"{url}-failed"))
        report(torch.equal(rows.full_tensor(), counted(7, 3)))


@pytest.mark.slow
def test_every_rank_sends_its_part(place: Place, tmp_path: Path) -> None:
    heard: list[Any] = []
    launch(partial(save_on_ranks, place.url), 2, heard.append)
    assert sorted(map(str, heard)) == ["True"] * 2 + ["[1]"] * 2
    assert place.names() == {DATA, "__1_0.distcp", "__0_1.distcp", "__1_1.distcp", "ckptkit.json", ".metadata"}
    assert not any(CLAIM in name for name in place.files.find(place.name, refresh=True))
    assert not place.files.call_s3("list_multipart_uploads", Bucket=place.name).get("Uploads")
    assert all(part.is_ok for url in (place.url, f"{place.url}-failed") for part in ckptkit.verify(url))
    heard.clear()
    launch(partial(load_on_ranks, place.url), 3, heard.append)
    assert heard == [True] * 9
    ckptkit.cp(place.url, tmp_path / "copy")
    model = {"rows": torch.zeros(7, 3), "few": torch.zeros(1, 3)}
    found = {"model": model, "rank1": {"large": torch.zeros(1, 3)}}
    dcp.load(found, checkpoint_id=tmp_path / "copy")
    assert torch.equal(model["rows"], counted(7, 3))
    assert torch.equal(model["few"], found["rank1"]["large"])

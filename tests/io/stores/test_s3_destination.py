"""`ckptkit cp` to S3: absent or whole whatever fails, resumed, compared by the store, which may be a simple one."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tracemalloc
from base64 import b64decode
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from typer.testing import CliRunner

import ckptkit
from ckptkit.cli.commands import app
from ckptkit.errors import Corrupt, IOFailure, Occupied, Usage
from ckptkit.io import pieces
from ckptkit.io.crc32 import crc32
from ckptkit.io.destination import to_destination
from ckptkit.io.path import RemotePath
from ckptkit.io.pieces import PART_BYTES as LARGE
from ckptkit.io.pieces import cut_into_pieces, new_piece_buffer
from ckptkit.io.stores.s3_destination import S3Destination
from tests.command import ckptkit as cli
from tests.conftest import Some
from tests.io.contract import PART, damaged
from tests.s3 import CLAIM, S3, Place, forget, is_data, make_place
from tests.tiers import nightly_but

_COMMAND = f"""
from ckptkit.cli import main
from ckptkit.io import pieces
pieces.PART_BYTES = {PART}
main()
"""


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PART_BYTES", PART)


@pytest.fixture
def place(moto_of_small_parts: S3, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    yield make_place(moto_of_small_parts, monkeypatch)
    forget()


@pytest.fixture
def simple(place: Place, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setattr(place.server, "is_simple", True)
    return place


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of DCP, with one file of two parts and a manifest."""
    root = tmp_path_factory.mktemp("run") / "ckpt-5"
    state = {"model": {"w": torch.arange(PART // 4, dtype=torch.float32), "v": torch.ones(1 << 15)}}
    with pytest.warns(UserWarning, match="single process"):
        dcp.save(state, checkpoint_id=root, no_dist=True)
    ckptkit.make_manifest(root)
    (root / "notes.txt").write_text("of the run")
    return root


def is_whole(place: Place, source: Path) -> bool:
    """Whether the copy is there; fails if it can be seen and is not whole."""
    keys = place.names() - {CLAIM}
    if ".metadata" not in keys:
        return False
    assert keys == {path.name for path in source.iterdir()}
    assert all(place.content(path.name) == path.read_bytes() for path in source.iterdir())
    return True


def size_of(source: Path) -> int:
    return sum(path.stat().st_size for path in source.iterdir())


@pytest.mark.slow
def test_a_copy_is_whole_and_has_the_checksums_of_the_source(place: Place, source: Path, tmp_path: Path) -> None:
    done = ckptkit.cp(source, place.url)
    assert is_whole(place, source)
    assert CLAIM not in place.names()
    assert done.notes == ()
    assert done.sent_bytes == place.sent() == size_of(source)
    for path in source.iterdir():
        key = f"run/ckpt-5/{path.name}"
        found = place.files.call_s3("head_object", Bucket=place.name, Key=key, ChecksumMode="ENABLED")
        assert int.from_bytes(b64decode(found["ChecksumCRC32"])) == crc32(path.read_bytes())
    forget()
    assert all(part.is_ok for part in ckptkit.verify(place.url))
    ckptkit.cp(place.url, tmp_path / "back")
    assert {path.name: path.read_bytes() for path in (tmp_path / "back").iterdir()} == {
        path.name: path.read_bytes() for path in source.iterdir()
    }


def test_the_mark_comes_last(place: Place, source: Path) -> None:
    ckptkit.cp(source, place.url)
    changes = [one.what for one in place.server.requests if one.what.split()[0] in ("PUT", "POST", "DELETE")]
    names = [what.split("?")[0].rpartition("/")[2] for what in changes]
    assert names[0] == names[-1] == CLAIM
    assert names[-3:-1] == ["ckptkit.json", ".metadata"]


@pytest.mark.parametrize(("numbers", "parts_of_it"), [(PART // 2 + 77, 3), (PART // 4 + 1, 2)])
def test_the_parts_on_the_wire_are_equal_but_for_the_last(
    place: Place, tmp_path: Path, numbers: int, parts_of_it: int
) -> None:
    save_file({"w": torch.zeros(numbers)}, tmp_path / "model.safetensors")
    ckptkit.cp(tmp_path, place.url)
    asked = ((re.search(r"partNumber=(\d+)", one.what), one.sent) for one in place.server.requests)
    parts = {int(found[1]): sent for found, sent in asked if found}
    *sizes, last = (parts[number] for number in sorted(parts))
    assert sizes == [PART] * (parts_of_it - 1)
    assert 0 < last < PART


@pytest.mark.slow
def test_whatever_request_fails_the_copy_is_absent_or_whole(place: Place, source: Path, some: Some) -> None:
    ckptkit.cp(source, place.url)
    asked = [one.what for one in place.server.requests]
    mark = next(i for i, what in enumerate(asked) if re.match("(PUT|POST) .*metadata", what))
    clear(place)
    points = sorted({mark, *some(len(asked))})
    for skip in points:
        place.server.requests.clear()
        fault = place.server.fail(".", status=403, skip=skip)
        with suppress(IOFailure):
            ckptkit.cp(source, place.url)
        assert fault.times == 0, f"request {skip} did not fail"
        failed = [one for one in place.server.requests[skip : skip + 1] if is_data(one)]
        was_whole = is_whole(place, source)
        if CLAIM in place.names():
            ckptkit.cp(source, place.url)
            assert is_whole(place, source)
            sent = place.sent() - sum(one.sent for one in failed)
            assert sent == size_of(source), "only what was missing is sent"
        assert was_whole or is_whole(place, source) or not place.names()
        assert CLAIM not in place.names()
        clear(place)


def clear(place: Place) -> None:
    """Remove the checkpoint."""
    for key in place.names():
        place.files.rm_file(f"{place.name}/run/ckpt-5/{key}")


KILLED_AT = ["PUT .*partNumber=2", "PUT .*notes", "PUT .*metadata", "POST .*uploadId"]


@pytest.mark.parametrize("where", nightly_but(KILLED_AT[:1], KILLED_AT))
def test_a_killed_copy_is_resumed(place: Place, source: Path, where: str) -> None:
    command = [sys.executable, "-c", _COMMAND, "cp", str(source), place.url, "--jobs", "1"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, env=os.environ.copy()) as client:
        place.server.fail(where, first=lambda: os.kill(client.pid, signal.SIGKILL), status=500)
    assert client.returncode == -signal.SIGKILL
    assert not is_whole(place, source)
    done = ckptkit.cp(source, place.url)
    assert is_whole(place, source)
    assert done.sent_bytes < size_of(source)
    assert any("were there already" in line for line in done.summary())


@pytest.mark.slow
def test_an_answer_that_is_lost_is_no_failure(place: Place, source: Path) -> None:
    for where in ("POST .*uploads", "POST .*uploadId", "PUT .*metadata", f"PUT .*{CLAIM}", f"DELETE .*{CLAIM}"):
        place.server.fail(where, lost=True)
    ckptkit.cp(source, place.url)
    assert is_whole(place, source)
    assert CLAIM not in place.names()
    assert not place.files.call_s3("list_multipart_uploads", Bucket=place.name).get("Uploads")


def test_the_uploads_that_a_claim_names_are_not_begun_again(place: Place, source: Path) -> None:
    place.server.fail(f"PUT .*{CLAIM}", skip=2, lost=True)  # the first has no uploads yet, the second is refused
    ckptkit.cp(source, place.url)
    assert is_whole(place, source)
    assert sum(one.what.endswith("?uploads") for one in place.server.requests) == 1


def test_what_is_read_of_the_store_is_asked_again(place: Place, source: Path) -> None:
    place.server.fail(f"GET .*{CLAIM}", skip=1, cut=True)
    ckptkit.cp(source, place.url)
    assert is_whole(place, source)


@pytest.mark.parametrize("where", nightly_but(["PUT .*metadata"], [f"PUT .*{CLAIM}", "PUT .*metadata"]))
def test_a_conflict_is_tried_again(place: Place, source: Path, where: str) -> None:
    how = {"status": 409, "code": "ConditionalRequestConflict"}
    fault = place.server.fail(where, **how, times=2)
    ckptkit.cp(source, place.url)
    assert fault.times == 0
    assert is_whole(place, source)


CONFLICTS = ["POST .*uploads", "POST .*uploadId", f"PUT .*{CLAIM}", "PUT .*metadata"]


@pytest.mark.parametrize("where", nightly_but(CONFLICTS[:1], CONFLICTS))
def test_a_conflict_that_stays_is_an_error(place: Place, source: Path, where: str) -> None:
    skip = 2 if CLAIM in where else 0
    place.server.fail(where, status=409, code="ConditionalRequestConflict", skip=skip, times=9)
    with pytest.raises(IOFailure, match="another process changes this object at the same moment"):
        ckptkit.cp(source, place.url)
    assert not is_whole(place, source)
    place.server.faults.clear()
    ckptkit.cp(source, place.url)
    assert is_whole(place, source)
    assert not place.files.call_s3("list_multipart_uploads", Bucket=place.name).get("Uploads")


def test_a_store_that_does_not_list_uploads(place: Place, source: Path) -> None:
    place.server.fail(r"GET .*\?(.*&)?uploads", status=403, code="AccessDenied")
    done = ckptkit.cp(source, place.url)
    assert is_whole(place, source)
    (note,) = done.notes
    assert "does not list unfinished uploads" in note


def test_a_file_that_changed_is_sent_again(place: Place, source: Path, tmp_path: Path) -> None:
    root = tmp_path / "ckpt-5"
    root.mkdir()
    content = torch.zeros(PART // 2)
    save_file({"w": content}, root / "model.safetensors")
    (root / "config.json").write_text("{}")
    place.server.fail("POST .*uploadId", status=403)
    with pytest.raises(IOFailure, match="the same command continues the upload"):
        ckptkit.cp(root, place.url)
    content[0] = 1
    save_file({"w": content}, root / "model.safetensors")
    place.server.requests.clear()
    ckptkit.cp(root, place.url)
    assert place.content("model.safetensors") == (root / "model.safetensors").read_bytes()
    assert sum("partNumber" in one.what for one in place.server.requests if one.what.startswith("PUT")) == 1


def test_what_was_sent_before_damage_was_found_is_not_sent_again(place: Place, source: Path, tmp_path: Path) -> None:
    root = damaged(source, tmp_path / "ckpt-5")
    with pytest.raises(Corrupt, match="CRC-32"):
        ckptkit.cp(root, place.url)
    assert ".metadata" not in place.names()
    (root / "__0_0.distcp").write_bytes((source / "__0_0.distcp").read_bytes())
    done = ckptkit.cp(root, place.url)
    assert is_whole(place, source)
    assert done.sent_bytes < PART * 2


def test_only_what_is_replaced_is_deleted(place: Place, source: Path, tmp_path: Path) -> None:
    root = tmp_path / "ckpt-5"
    root.mkdir()
    save_file({"w": torch.zeros(4)}, root / "model.safetensors")
    (root / "config.json").write_text("{}")
    ckptkit.cp(root, place.url)
    place.server.requests.clear()
    ckptkit.cp(source, place.url, overwrite=True)
    assert is_whole(place, source)
    deleted = [one.what.rpartition("/")[2] for one in place.server.requests if one.what.startswith("DELETE")]
    assert set(deleted[:-1]) == {"model.safetensors", "config.json"}


def test_another_upload_is_refused_or_abandoned(place: Place, source: Path, tmp_path: Path) -> None:
    place.server.fail("POST .*uploadId", status=403)
    with pytest.raises(IOFailure):
        ckptkit.cp(source, place.url)
    other = tmp_path / "ckpt-5"
    other.mkdir()
    save_file({"w": torch.zeros(4)}, other / "model.safetensors")
    with pytest.raises(Occupied, match="another upload has been under way since") as refused:
        ckptkit.cp(other, place.url)
    assert refused.value.exit_code == 5
    ckptkit.cp(other, place.url, overwrite=True)
    assert place.names() == {"model.safetensors"}
    uploads = place.files.call_s3("list_multipart_uploads", Bucket=place.name)
    assert not uploads.get("Uploads")


@pytest.mark.slow
def test_a_checkpoint_on_two_disks_becomes_one(place: Place, source: Path, tmp_path: Path) -> None:
    for name, kept in (("one", ".metadata"), ("two", "__0_0.distcp")):
        (tmp_path / name).mkdir()
        shutil.copy(source / kept, tmp_path / name / kept)
        (tmp_path / name / "config.json").write_text("{}")
    assert (
        CliRunner().invoke(app, ["cp", str(tmp_path / "one"), place.url, "--also", str(tmp_path / "two")]).exit_code
        == 0
    )
    assert place.names() == {".metadata", "__0_0.distcp", "config.json"}
    assert ckptkit.diff(place.url, source).is_equal


def test_a_store_without_conditions_and_checksums(simple: Place, source: Path) -> None:
    simple.server.fail("POST .*uploadId", status=403)
    with pytest.raises(IOFailure):
        ckptkit.cp(source, simple.url)
    sent = simple.sent()
    done = ckptkit.cp(source, simple.url)
    assert is_whole(simple, source)
    assert CLAIM not in simple.names()
    assert simple.sent() - sent < PART, "a part is known by its MD5"
    assert len(done.notes) == 2
    assert all(note.startswith("this store does not") for note in done.notes)


def test_errors_name_the_bucket_and_what_to_do(place: Place, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(IOFailure, match="the bucket does not exist") as error:
        ckptkit.cp(source, "s3://nobody-made-this/x")
    assert str(error.value.path) == "s3://nobody-made-this"
    assert error.value.hint is not None
    assert "create the bucket" in error.value.hint
    for slash in ("", "/"):
        with pytest.raises(Usage, match="a whole bucket") as whole:
            ckptkit.cp(source, f"s3://{place.name}{slash}")
        assert whole.value.hint == f"write it like s3://{place.name}/run/ckpt-5"
    with pytest.raises(Usage, match="does not write to"):
        ckptkit.cp(source, "memory://bucket/x")


@pytest.mark.slow
def test_the_command_line(place: Place, source: Path) -> None:
    ran = cli("cp", source, place.url, "--json")
    assert ran.returncode == 0
    said = json.loads(ran.stdout)
    assert said["output"] == place.url
    assert said["nbytes"] == said["sent_bytes"] == size_of(source)
    ran = cli("cp", source, place.url)
    assert ran.returncode == 5
    assert ran.stderr.startswith(f"error: {place.url}: the destination exists")


def test_two_processes_that_claim_one_upload_share_it(place: Place) -> None:
    path = to_destination(place.url)
    assert isinstance(path, RemotePath)
    sizes, data = {"a": PART + 1, "b": PART + 1}, bytearray(PART + 1)
    first = S3Destination(path, sizes, (), "plan")
    second = S3Destination(path, sizes, (), "plan")
    place.server.fail("POST .*uploads", first=lambda: second.claim(overwrite=False, check=tuple))
    first.claim(overwrite=False, check=tuple)
    third = S3Destination(path, {"b": sizes["b"]}, (), "plan")
    third.join_upload()
    for there, name in ((first, "a"), (third, "b")):
        for piece in cut_into_pieces(name, sizes[name]):
            part = memoryview(data)[piece.start : piece.start + piece.length]
            there.put(piece, part, crc32(part))
        there.finish_file(name, crc32(data))
    first.commit()
    assert place.names() == {"a", "b"}
    assert not place.files.call_s3("list_multipart_uploads", Bucket=place.name).get("Uploads")
    with pytest.raises(Occupied, match="should join does not exist"):
        third.join_upload()


def test_a_part_is_sent_without_a_copy_of_it(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{place.server.upstream}")  # the proxy is in our process
    monkeypatch.setattr(pieces, "PART_BYTES", LARGE)
    forget()
    path = to_destination(place.url)
    assert isinstance(path, RemotePath)
    there = S3Destination(path, {"a": LARGE + 1}, (), "plan")
    there.claim(overwrite=False, check=tuple)
    piece, data = next(cut_into_pieces("a", LARGE + 1)), new_piece_buffer(LARGE)
    tracemalloc.start()
    try:
        there.put(piece, data, crc32(data))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < LARGE / 2

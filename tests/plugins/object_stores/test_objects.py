"""Outputs in Google Cloud Storage and Azure: absent or whole whatever fails, resumed by whole files, read back.

Azure is Azurite, Microsoft's emulator. In the place of Google Cloud Storage stands obstore's store in memory: there is
no emulator that knows the uploads in parts that obstore makes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import obstore
import pytest
import torch
import torch.distributed.checkpoint as dcp
from obstore.store import MemoryStore
from safetensors.torch import save_file

import ckptkit
import ckptkit.storage
from ckptkit.errors import IOFailure, Occupied, Unsupported, Usage
from ckptkit.io import pieces
from ckptkit.io.crc32 import crc32
from ckptkit.io.destination import to_destination
from ckptkit.io.path import RemotePath
from ckptkit.io.pieces import PART_BYTES, cut_into_pieces
from ckptkit.plugins.object_stores.calls import open_object_store
from ckptkit.plugins.object_stores.destination import ObjectDestination
from ckptkit.training.launch import launch
from tests.azurite import AZURITE, create_container, env_of, serve_azurite
from tests.directories import files_in
from tests.io.contract import Convert, Output, OutputContract, make_source
from tests.s3 import CLAIM, S3, forget
from tests.storage.test_store_writer import load_on_ranks, save_on_ranks
from tests.tiers import nightly_but

_NUMBERS = count()
_NEEDS_AZURITE = pytest.mark.skipif(AZURITE is None, reason="Azurite is not installed")


@dataclass(slots=True)
class Bucket:
    """A bucket or container that is empty at first; Azurite counts its requests."""

    url: str
    server: S3 | None = None
    store: Any = field(init=False, repr=False)  # it cannot always be shown

    def __post_init__(self) -> None:
        self.store = open_object_store("/".join(self.url.split("/")[:3]))

    def objects(self, prefix: str | None = None) -> dict[str, bytes]:
        """The content of all objects, or of those with a prefix, by their keys."""
        keys = [one["path"] for one in obstore.list(self.store, prefix).collect()]
        return {key: bytes(obstore.get(self.store, key).bytes()) for key in keys}

    def files(self) -> dict[str, bytes]:
        """The objects of the checkpoint, by name."""
        return {key.removeprefix("run/ckpt-5/"): data for key, data in self.objects("run/ckpt-5").items()}

    def put(self, key: str, content: bytes) -> None:
        obstore.put(self.store, key, content)
        forget()

    def delete(self, *names: str) -> None:
        obstore.delete(self.store, [f"run/ckpt-5/{name}" for name in names])
        forget()


@pytest.fixture(scope="module")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    with serve_azurite(tmp_path_factory.mktemp("azurite")) as server:
        yield server


@pytest.fixture
def az(azurite: S3, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    for name, value in env_of(azurite).items():
        monkeypatch.setenv(name, value)
    azurite.faults.clear()
    name = f"container-{next(_NUMBERS)}"
    create_container(azurite, name)
    azurite.requests.clear()
    forget()
    yield Bucket(f"az://{name}/run/ckpt-5", azurite)
    forget()


@pytest.fixture
def gs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    store = MemoryStore()
    monkeypatch.setattr("obstore.store.from_url", lambda *_, **__: store)
    forget()
    yield Bucket(f"gs://bucket-{next(_NUMBERS)}/run/ckpt-5")
    forget()


@pytest.fixture(params=["gs", pytest.param("az", marks=_NEEDS_AZURITE)])
def place(request: pytest.FixtureRequest) -> Bucket:
    found: Bucket = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = make_source(tmp_path_factory.mktemp("run") / "ckpt-5")
    ckptkit.make_manifest(root)
    return root


@pytest.fixture
def two_files(tmp_path: Path) -> Path:
    """A model of two shards, each of two pieces."""
    return make_two_files(tmp_path / "two", PART_BYTES // 2)


def make_two_files(root: Path, numel: int) -> Path:
    root.mkdir()
    names = {f"w{n}": f"model-0000{n}-of-00002.safetensors" for n in (1, 2)}
    for number, (name, file) in enumerate(names.items()):
        save_file({name: torch.full((numel,), float(number))}, root / file)
    (root / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    (root / "config.json").write_text("{}")
    return root


@pytest.fixture
def output(place: Bucket) -> Output:
    return Output(place.url, place.objects, place.put)


class TestOutputs(OutputContract):
    """The outputs in the store in memory, and in Azurite."""


def test_a_copy_there_and_back(place: Bucket, source: Path, tmp_path: Path) -> None:
    done = ckptkit.cp(source, place.url)
    assert place.files() == files_in(source)
    assert done.sent_bytes == done.nbytes
    assert any("compared only the sizes" in note for note in done.notes)
    ckptkit.cp(place.url, tmp_path / "back")
    assert files_in(tmp_path / "back") == files_in(source)
    ckptkit.reshard(place.url, tmp_path / "resharded", to=2)
    assert ckptkit.diff(source, tmp_path / "resharded").is_equal


@_NEEDS_AZURITE
def test_the_marks_come_last_and_are_deleted_first(az: Bucket, source: Path, two_files: Path) -> None:
    ckptkit.consolidate(source, az.url)
    ckptkit.cp(two_files, az.url, overwrite=True)
    assert az.server is not None
    changes = [one.what.split("?")[0].rpartition("/")[2] for one in az.server.requests if changes_files(one.what)]
    first, second = changes.index(CLAIM), len(changes) - 1 - changes[::-1].index(CLAIM)
    assert changes[second - 2 :] == ["model.safetensors.index.json", "config.json", CLAIM] or first < second
    puts = [one.what.split("?")[0].rpartition("/")[2] for one in az.server.requests if is_data(one.what)]
    assert [name for name in puts if not name.endswith((".json.json", "s.json"))][-2:] == [
        "model.safetensors.index.json",
        "config.json",
    ]


def changes_files(what: str) -> bool:
    return what.split(maxsplit=1)[0] in ("PUT", "DELETE", "POST")


def is_data(what: str) -> bool:
    """Whether a file was sent."""
    return what.startswith("PUT") and ".ckptkit-upload" not in what


def test_another_upload_is_refused_or_abandoned(
    place: Bucket, source: Path, two_files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(ObjectDestination, "commit", refuse)
        with pytest.raises(IOFailure):
            ckptkit.cp(two_files, place.url)
    assert CLAIM in place.files()
    with pytest.raises(Occupied, match="another upload has been under way since") as refused:
        ckptkit.cp(source, place.url)
    assert refused.value.exit_code == 5
    ckptkit.cp(source, place.url, overwrite=True)
    assert place.files() == files_in(source)


def refuse(*_: object) -> None:
    raise IOFailure("so it is")


def test_of_two_processes_of_one_upload_the_later_goes_on(place: Bucket) -> None:
    path = to_destination(place.url)
    assert isinstance(path, RemotePath)
    size = PART_BYTES + 1
    data = bytearray(range(256)) * (PART_BYTES // 256) + bytearray(1)
    first, second = (ObjectDestination(path, {"a": size}, ("m",), "plan") for _ in range(2))
    first.claim(overwrite=False, check=tuple)
    second.claim(overwrite=False, check=tuple)
    assert (first.resumed, second.resumed) == (False, True)
    send(second, "a", data)
    with pytest.raises(Occupied, match="another process goes on with this upload"):
        send(first, "a", data)
    with pytest.raises(Occupied, match="another process goes on with this upload"):
        first.put_marker("m", b"x", crc32(b"x"))
    second.put_marker("m", b"x", crc32(b"x"))
    with pytest.raises(Occupied):
        first.commit()
    second.commit()
    assert place.files() == {"a": data, "m": b"x"}
    third = ObjectDestination(path, {"a": size}, ("m",), "plan")
    with pytest.raises(Occupied, match="should join does not exist"):
        third.join_upload()
    with pytest.raises(Occupied, match="the destination exists"):
        third.claim(overwrite=False, check=tuple)


def send(there: ObjectDestination, name: str, data: bytearray) -> None:
    for piece in cut_into_pieces(name, len(data)):
        part = memoryview(data)[piece.start : piece.start + piece.length]
        there.put(piece, part, crc32(part))
    there.finish_file(name, crc32(data))


def test_a_file_that_somebody_changed_is_found_before_the_mark(place: Bucket) -> None:
    path = to_destination(place.url)
    assert isinstance(path, RemotePath)
    there = ObjectDestination(path, {}, ("m",), "plan")
    there.claim(overwrite=False, check=tuple)
    there.put_small_file("a", b"abc", crc32(b"abc"))
    place.put("run/ckpt-5/a", b"abcd")
    with pytest.raises(IOFailure, match="expected 3 bytes, found 4"):
        there.put_marker("m", b"x", crc32(b"x"))
    assert "m" not in place.files()


KILLED_AT = ["PUT .*00002-of.*comp=block", "PUT .*index", "DELETE|POST .*batch"]


@_NEEDS_AZURITE
@pytest.mark.parametrize("where", nightly_but(KILLED_AT[:1], KILLED_AT))
def test_a_killed_copy_is_resumed(az: Bucket, two_files: Path, where: str) -> None:
    assert az.server is not None
    command = [sys.executable, "-m", "ckptkit", "cp", str(two_files), az.url, "--jobs", "1"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, env=os.environ.copy()) as client:
        az.server.fail(where, first=lambda: os.kill(client.pid, signal.SIGKILL), status=500)
    assert client.returncode == -signal.SIGKILL
    done = ckptkit.cp(two_files, az.url)
    assert az.files() == files_in(two_files)
    assert done.sent_bytes < done.nbytes
    assert any("were there already" in line for line in done.summary())


@_NEEDS_AZURITE
def test_a_file_that_changed_is_sent_again(az: Bucket, two_files: Path) -> None:
    assert az.server is not None
    az.server.fail("PUT .*index", status=403)
    with pytest.raises(IOFailure, match="access denied"):
        ckptkit.cp(two_files, az.url)
    shard = two_files / "model-00001-of-00002.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(IOFailure, match="the file that was sent before differs: expected CRC-32"):
        ckptkit.cp(two_files, az.url)
    done = ckptkit.cp(two_files, az.url)
    assert az.files() == files_in(two_files)
    assert done.sent_bytes < done.nbytes


@_NEEDS_AZURITE
def test_whatever_request_fails_the_output_is_absent_or_whole(
    az: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shrink_pieces(monkeypatch)
    source = tmp_path / "ckpt-5"
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"model": {"w": torch.ones(1000), "v": torch.ones(5)}}, checkpoint_id=source, no_dist=True)
    (source / "config.json").write_text('{"model_type": "mine"}')
    ckptkit.consolidate(source, tmp_path / "out")
    fail_each(lambda **more: ckptkit.consolidate(source, az.url, **more), "config.json", az, files_in(tmp_path / "out"))


@pytest.mark.nightly
@_NEEDS_AZURITE
def test_whatever_request_fails_a_copy_is_absent_or_whole(
    az: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shrink_pieces(monkeypatch)
    source = make_two_files(tmp_path / "two", 1000)
    fail_each(lambda **more: ckptkit.cp(source, az.url, **more), "config.json", az, files_in(source))


def shrink_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PART_BYTES", 1 << 10)
    monkeypatch.setattr(pieces, "_MIB", 1)


def fail_each(write: Convert, mark: str, place: Bucket, expected: dict[str, bytes]) -> None:
    """Let each request fail in its turn: the output is absent or whole, and a second attempt makes it whole."""
    assert place.server is not None
    for skip in count():
        place.delete(*place.files())
        fault = place.server.fail(".", skip=skip, status=403)
        try:
            write()
        except IOFailure:
            forget()
            there = place.files()
            assert mark not in there or there.items() >= expected.items()
            write(overwrite=mark in there)
        place.server.faults.clear()
        assert place.files() == expected
        if fault.times:  # no request was left to fail
            break
    assert skip > 10


@_NEEDS_AZURITE
def test_a_dropped_connection_is_no_failure(az: Bucket, two_files: Path) -> None:
    assert az.server is not None
    for where in ("comp=blocklist", "PUT .*config.json", f"PUT .*{CLAIM}", "PUT .*comp=block&"):
        az.server.fail(where, after=0)
    ckptkit.cp(two_files, az.url)
    assert az.files() == files_in(two_files)


def test_shares_are_refused_before_anything_is_written(place: Bucket, source: Path) -> None:
    with pytest.raises(Unsupported, match="several processes cannot write one file") as refused:
        ckptkit.consolidate(source, place.url, part="1/2")
    assert refused.value.hint is not None
    assert "drop --part" in refused.value.hint
    assert not place.files()


def test_a_state_is_saved_there(place: Bucket) -> None:
    state: dict[str, Any] = {"model": {"w": torch.arange(PART_BYTES // 2, dtype=torch.float32)}, "step": 5}
    with pytest.warns(UserWarning, match="single process|compared only the sizes"):
        dcp.save(state, storage_writer=ckptkit.storage.Writer(place.url), no_dist=True)
    assert CLAIM not in place.files()
    found: dict[str, Any] = {"model": {"w": torch.zeros(PART_BYTES // 2)}, "step": 0}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(found, storage_reader=ckptkit.storage.Reader(place.url), no_dist=True)
    assert torch.equal(found["model"]["w"], state["model"]["w"])


@_NEEDS_AZURITE
def test_every_rank_saves_its_shards(az: Bucket) -> None:
    heard: list[Any] = []
    launch(partial(save_on_ranks, az.url), 2, heard.append)
    assert sorted(map(str, heard)) == ["True"] * 2 + ["[1]"] * 2
    names = {"__0_0.distcp", "__1_0.distcp", "__0_1.distcp", "__1_1.distcp", "ckptkit.json", ".metadata"}
    assert az.files().keys() == names
    assert all(part.is_ok for url in (az.url, f"{az.url}-failed") for part in ckptkit.verify(url))
    heard.clear()
    launch(partial(load_on_ranks, az.url), 2, heard.append)
    assert heard == [True] * 6


def test_a_place_is_read_like_a_directory(place: Bucket) -> None:
    for name in ("a", "b/c", "b/d/e"):
        place.put(f"run/ckpt-5/{name}", name.encode())
    root = to_destination(place.url)
    assert sorted(path.name for path in root.iterdir()) == ["a", "b"]
    assert [(root / name).is_dir() for name in ("", "a", "b", "b/d", "no", "b/no")] == [True, False, True, True] + 2 * [
        False
    ]
    assert (root / "b/c").stat().st_size == 3
    assert to_destination(place.url).parent.is_dir()


@_NEEDS_AZURITE
def test_an_object_that_is_replaced_while_it_is_read(az: Bucket, two_files: Path, tmp_path: Path) -> None:
    assert az.server is not None
    ckptkit.cp(two_files, az.url)
    name = "model-00002-of-00002.safetensors"
    az.server.requests.clear()
    az.server.fail(f"GET .*{name}", skip=1, first=lambda: az.put(f"run/ckpt-5/{name}", b"other"), status=500)
    with pytest.raises(IOFailure, match="was replaced"):
        ckptkit.cp(az.url, tmp_path / "back")
    assert not (tmp_path / "back").exists()


@_NEEDS_AZURITE
def test_errors_name_the_container_and_what_to_do(az: Bucket, two_files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asks: list[Convert] = [ckptkit.cp, lambda _, there: ckptkit.verify(there)]
    for ask in asks:
        with pytest.raises(IOFailure, match="the container does not exist") as error:
            ask(two_files, "az://nobody-made-this/x")
        assert str(error.value.path) == "az://nobody-made-this"
        assert "create the container" in str(error.value.hint)
    with pytest.raises(Usage, match="a whole bucket"):
        ckptkit.cp(two_files, "/".join(az.url.split("/")[:3]))
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "Zm9v")
    forget()
    for ask in asks:
        with pytest.raises(IOFailure, match="access denied: Server failed to authenticate") as error:
            ask(two_files, az.url)
        assert "Storage Blob Data" in str(error.value.hint)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "no key!")
    forget()
    with pytest.raises(IOFailure, match="AZURE_STORAGE_ACCOUNT_KEY is not a key"):
        ckptkit.cp(two_files, az.url)
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME")
    forget()
    with pytest.raises(IOFailure, match="no credentials"):
        ckptkit.verify(az.url)

"""Conversions to a store: the same bytes as on a disk, absent or whole, resumed, and shared among processes."""

from __future__ import annotations

import json
import re
from base64 import b64decode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open

import ckptkit
from ckptkit.errors import Incomplete, IOFailure, NotACheckpoint, Occupied, Unsafe, Unsupported
from ckptkit.io import pieces
from tests.conftest import Some
from tests.directories import files_in
from tests.io.contract import PART, WAYS, Output, OutputContract, make_source
from tests.s3 import S3, Place, forget, make_place
from tests.tiers import nightly_but

Convert = Callable[..., Any]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PART_BYTES", PART)


@pytest.fixture
def place(moto_of_small_parts: S3, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    yield make_place(moto_of_small_parts, monkeypatch)
    forget()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_source(tmp_path_factory.mktemp("run") / "ckpt-5")


@pytest.fixture
def output(place: Place) -> Output:
    def objects() -> dict[str, bytes]:
        keys = place.files.find(place.name, refresh=True)
        place.files.invalidate_cache()
        return {key.partition("/")[2]: place.files.cat_file(key) for key in keys}

    def put(key: str, content: bytes) -> None:
        place.files.pipe_file(f"{place.name}/{key}", content)
        forget()

    return Output(place.url, objects, put)


class TestOutputs(OutputContract):
    """The outputs in S3."""


def bytes_at(place: Place) -> dict[str, bytes]:
    place.files.invalidate_cache()
    return {name: place.content(name) for name in place.names()}


@pytest.mark.slow
def test_from_one_prefix_to_another(place: Place, source: Path, tmp_path: Path) -> None:
    ckptkit.cp(source, f"s3://{place.name}/from")
    with pytest.raises(Unsafe, match="inside the source"):
        ckptkit.reshard(f"s3://{place.name}/from", f"s3://{place.name}/from/in", to=4)
    assert not [name for name in place.files.find(f"{place.name}/from", refresh=True) if "/in/" in name]
    ckptkit.reshard(f"s3://{place.name}/from", place.url, to=4)
    ckptkit.reshard(source, tmp_path / "out", to=4)
    there, here = bytes_at(place), files_in(tmp_path / "out")
    del there["ckptkit.json"], here["ckptkit.json"]  # they name the source
    assert there == here


@pytest.mark.slow
@pytest.mark.parametrize("way", ["hf shards", "dcp", "pt"])
def test_several_processes_share_the_work(way: str, place: Place, source: Path, tmp_path: Path) -> None:
    convert, options = WAYS[way]
    convert(source, tmp_path / "out", **options)
    with pytest.raises(Occupied, match="1 of 3 parts are not done: 2/3"):
        for number in (3, 1):
            assert not convert(source, place.url, part=f"{number}/3", **options).is_finished
            forget()
        ckptkit.finalize(place.url)
    assert not place.names() & {".metadata", "model.safetensors.index.json"}
    convert(source, place.url, part="2/3", **options)
    before = place.sent()
    convert(source, place.url, part="2/3", **options)
    assert place.sent() == before
    ckptkit.finalize(place.url)
    assert bytes_at(place) == files_in(tmp_path / "out")
    whole = sum(map(len, bytes_at(place).values()))
    notes = sum(one.sent for one in place.server.requests if ".ckptkit-upload/" in one.what)
    assert place.sent() - notes == whole


MARKS = [("hf", "config.json"), ("dcp", ".metadata")]


@pytest.mark.slow
@pytest.mark.parametrize(("way", "mark"), nightly_but([("hf", "config.json")], MARKS))
def test_whatever_request_fails_the_output_is_absent_or_whole(
    way: str, mark: str, place: Place, some: Some, tmp_path: Path
) -> None:
    convert, options = WAYS[way]
    source = tmp_path / "ckpt-5"
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"model": {"w": torch.ones(1000)}}, checkpoint_id=source, no_dist=True)
    (source / "config.json").write_text('{"model_type": "mine"}')
    convert(source, tmp_path / "out", **options)
    convert(source, place.url, **options)
    changes = [one.what for one in place.server.requests if re.match("PUT|POST|DELETE", one.what)]
    marked = next(i for i, what in enumerate(changes) if mark in what)
    points = sorted({marked, *some(len(changes))})
    for skip in points:
        place.files.rm(f"{place.name}/run", recursive=True)
        forget()
        fault = place.server.fail("PUT|POST|DELETE", skip=skip, times=1, status=403)
        try:
            convert(source, place.url, **options)
        except IOFailure:
            forget()
            assert mark not in place.names() or bytes_at(place).items() >= files_in(tmp_path / "out").items()
            convert(source, place.url, overwrite=mark in place.names(), **options)
        assert bytes_at(place) == files_in(tmp_path / "out")
        assert fault.times == 0, f"request {skip} did not fail"


def test_an_interrupted_output_is_continued(place: Place, source: Path) -> None:
    place.server.fail("POST .*uploadId", status=403)
    with pytest.raises(IOFailure, match="the store keeps the parts that were sent"):
        ckptkit.consolidate(source, place.url)
    sent = place.sent()
    forget()
    with pytest.raises(NotACheckpoint, match="found no complete checkpoint: an upload has been under way since"):
        ckptkit.inspect(place.url)
    forget()
    done = ckptkit.consolidate(source, place.url)
    again = place.sent() - sent
    assert done.resumed_bytes == sum(map(len, bytes_at(place).values())) - again
    assert sent > 2 * PART
    assert again < 2000  # config.json and the manifest
    assert all(part.is_ok for part in ckptkit.verify(place.url))


@pytest.mark.slow
def test_visible_shards_without_their_metadata_are_an_upload(place: Place, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"w": torch.ones(1000)}, checkpoint_id=tmp_path / "ckpt-5", no_dist=True)
    place.server.fail("PUT .*metadata", status=403)
    with pytest.raises(IOFailure):
        ckptkit.cp(tmp_path / "ckpt-5", place.url)
    forget()
    assert any(name.endswith(".distcp") for name in place.names())
    with pytest.raises(Incomplete, match="found no complete checkpoint: an upload has been under way since"):
        ckptkit.inspect(place.url)
    forget()
    (found,) = ckptkit.verify(place.url)
    assert found.problems[0].message.startswith("found no complete checkpoint: an upload")


@pytest.mark.slow
def test_another_output_is_not_mixed_in(place: Place, source: Path) -> None:
    place.server.fail("POST .*uploadId", status=403)
    with pytest.raises(IOFailure):
        ckptkit.consolidate(source, place.url)
    forget()
    with pytest.raises(Occupied, match="another upload has been under way"):
        ckptkit.consolidate(source, place.url, dtype="bfloat16")
    ckptkit.consolidate(source, place.url, dtype="bfloat16", overwrite=True)
    forget()
    with pytest.raises(Occupied, match="the destination exists"):
        ckptkit.consolidate(source, place.url)
    assert not place.files.call_s3("list_multipart_uploads", Bucket=place.name).get("Uploads")
    ckptkit.cp(place.url, source.parent / "back")
    with safe_open(source.parent / "back" / "model.safetensors", "pt") as file:
        assert file.get_tensor("layers.0.w").dtype == torch.bfloat16


@pytest.mark.parametrize("write", [ckptkit.cp, ckptkit.consolidate])
def test_a_directory_of_a_console_is_empty(place: Place, source: Path, write: Convert) -> None:
    place.files.call_s3("put_object", Bucket=place.name, Key="run/ckpt-5/", Body=b"")
    forget()
    write(source, place.url)
    assert all(part.is_ok for part in ckptkit.verify(place.url))


def test_a_dry_run_sends_nothing(place: Place, source: Path) -> None:
    done = ckptkit.consolidate(source, place.url, dry_run=True)
    assert done.free_bytes is None
    assert not [one for one in place.server.requests if one.what.startswith(("PUT", "POST"))]


def test_files_that_repeat_data_are_refused(place: Place, source: Path) -> None:
    with pytest.raises(Unsupported, match="which needs a local disk"):
        ckptkit.convert(source, place.url, to="ranks")
    assert not place.names()


@pytest.mark.slow
def test_the_manifest_has_what_the_store_computed(place: Place, source: Path) -> None:
    ckptkit.consolidate(source, place.url)
    files = json.loads(place.content("ckptkit.json"))["files"]
    for name in place.names() - {"ckptkit.json"}:
        found = place.files.call_s3("head_object", Bucket=place.name, Key=f"run/ckpt-5/{name}", ChecksumMode="ENABLED")
        assert b64decode(found["ChecksumCRC32"]).hex() == files[name]["crc32"]


@pytest.mark.parametrize(("base", "output"), [("base", "base"), ("out/base", "out"), ("base", "base/out")])
def test_a_base_in_the_store_is_not_replaced(source: Path, place: Place, base: str, output: str) -> None:
    place.files.pipe_file(f"{place.name}/run/ckpt-5/{base}/config.json", b"{}")
    forget()
    with pytest.raises(
        Unsafe, match=r"the source is the destination, or inside it|the destination is inside the source"
    ):
        ckptkit.consolidate(source, f"{place.url}/{output}", base=f"{place.url}/{base}", overwrite=True)
    forget()
    assert place.files.cat_file(f"{place.name}/run/ckpt-5/{base}/config.json") == b"{}"

"""`ckptkit prune --uploads`: which uploads to S3 have not ended, and how the dead ones go."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckptkit
from ckptkit.errors import IOFailure, Occupied, Usage
from ckptkit.io.pieces import PART_BYTES
from ckptkit.runs.uploads import PrunedUploads, prune_uploads
from tests.command import ckptkit as cli
from tests.s3 import CLAIM, Place, forget, make_place

NOTE = ".ckptkit-upload/key"


@pytest.fixture(params=["moto", "rclone"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    yield make_place(request.getfixturevalue(request.param), monkeypatch)
    forget()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with one file of two pieces, and small ones."""
    root = tmp_path_factory.mktemp("source") / "model"
    root.mkdir()
    save_file({"w": torch.arange(PART_BYTES // 4 + 1000.0)}, root / "model-00001-of-00002.safetensors")
    save_file({"b": torch.ones(5)}, root / "model-00002-of-00002.safetensors")
    index = {"weight_map": {"w": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (root / "model.safetensors.index.json").write_text(json.dumps(index))
    (root / "config.json").write_text("{}")
    return root


def run_of(place: Place) -> str:
    return f"s3://{place.name}/run"


def let_one_die(place: Place, source: Path) -> None:
    """Leave an upload to step 5 that has sent all but the end of its large file and the marks."""
    place.server.fail("POST .*uploadId", times=9, status=403)
    with pytest.raises(IOFailure):
        ckptkit.cp(source, place.url)
    place.server.faults.clear()
    place.files.pipe_file(f"{place.name}/run/ckpt-5/{NOTE}", b"of another process")


def begin_other(place: Place, key: str) -> str:
    """Begin a multipart upload that no claim names, of one part."""
    upload: str = place.files.call_s3("create_multipart_upload", Bucket=place.name, Key=key)["UploadId"]
    place.files.call_s3("upload_part", Bucket=place.name, Key=key, UploadId=upload, PartNumber=1, Body=b"1234")
    return upload


def open_in(place: Place) -> set[str]:
    """The keys of the multipart uploads that the store knows of."""
    found = place.files.call_s3("list_multipart_uploads", Bucket=place.name)
    return {one["Key"] for one in found.get("Uploads", ())}


def names(done: PrunedUploads) -> set[str]:
    return {str(one.path).removeprefix("s3://").partition("/")[2] for one in done.stale}


@pytest.mark.slow
def test_what_did_not_end_is_listed_and_aborted(place: Place, source: Path) -> None:
    let_one_die(place, source)
    for key in ("run/ckpt-6/__0_0.distcp", "run-2/other.bin"):
        begin_other(place, key)
    place.server.requests.clear()
    young = prune_uploads(run_of(place), yes=True)
    assert (young.stale, len(young.keep), young.freed_bytes) == ((), 2, 0)
    shown = prune_uploads(run_of(place), older=0)
    assert all(one.what.startswith(("GET", "HEAD")) for one in place.server.requests)
    assert (names(shown), shown.keep, shown.aborted) == ({"run/ckpt-5", "run/ckpt-6/__0_0.distcp"}, (), False)
    ours, other = sorted(shown.stale, key=lambda one: one.host is None)
    assert (ours.sent_bytes, len(ours.files), other.sent_bytes) == (source_bytes(source), 1, 4)
    assert ours.claim is not None
    assert 0 < ours.whole_bytes < 10_000
    done = prune_uploads(run_of(place), older=0, yes=True)
    assert (done.stale, done.freed_bytes) == (sorted_like(done, shown), ours.sent_bytes + 4)
    assert open_in(place) == {"run-2/other.bin"}
    assert not any(name in place.names() for name in (CLAIM, NOTE))
    assert place.names() == {"model-00002-of-00002.safetensors"}  # whole, and nothing that makes it visible
    assert prune_uploads(run_of(place), older=0).stale == ()
    assert {str(one.path) for one in prune_uploads(f"s3://{place.name}", older=0).stale} == {
        f"s3://{place.name}/run-2/other.bin"
    }


def source_bytes(source: Path) -> int:
    return (source / "model-00001-of-00002.safetensors").stat().st_size


def sorted_like(done: PrunedUploads, shown: PrunedUploads) -> tuple[object, ...]:
    assert [one.path for one in done.stale] == [one.path for one in shown.stale]
    return done.stale


@pytest.mark.slow
def test_the_claim_goes_last(place: Place, source: Path) -> None:
    """Whatever fails before, the same command finds the upload again."""
    let_one_die(place, source)
    for where in ("DELETE .*uploadId", r"POST .*\?delete", f"DELETE .*{CLAIM}"):
        place.server.fail(where, status=403, code="AccessDenied")
        with pytest.raises(IOFailure, match="access denied"):
            prune_uploads(run_of(place), older=0, yes=True)
        place.server.faults.clear()
        assert CLAIM in place.names()
        assert names(prune_uploads(run_of(place), older=0)) == {"run/ckpt-5"}
    prune_uploads(run_of(place), older=0, yes=True)
    assert CLAIM not in place.names()
    ckptkit.cp(source, place.url, overwrite=True)
    assert ckptkit.diff(source, place.url).is_equal


@pytest.mark.slow
def test_an_upload_that_was_aborted_under_way_shows_nothing(place: Place, source: Path) -> None:
    place.server.fail("PUT .*00002-of", first=lambda: prune_uploads(run_of(place), older=0, yes=True))
    with pytest.raises((IOFailure, Occupied)):  # its parts are gone, or its claim
        ckptkit.cp(source, place.url)
    forget()
    assert not ckptkit.Checkpoint.at(ckptkit.ls(run_of(place)).checkpoints[0].path).is_complete


def test_an_upload_that_took_the_place_goes_on(place: Place, source: Path) -> None:
    let_one_die(place, source)

    def take_over() -> None:
        words = b'{"plan": "x", "started": "now", "host": "there", "uploads": null}'
        place.files.pipe_file(f"{place.name}/run/ckpt-5/{CLAIM}", words)

    place.server.fail(f"GET .*{CLAIM}", skip=1, first=take_over)
    done = prune_uploads(run_of(place), older=0, yes=True)
    assert (done.stale, len(done.keep)) == ((), 1)
    assert CLAIM in place.names()


def test_a_file_is_claimed_beside_it(place: Place, tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(PART_BYTES // 4 + 1000)}, tmp_path / "model.pt")
    url = f"{run_of(place)}/step-7.pt"
    place.server.fail("POST .*uploadId", times=9, status=403)
    with pytest.raises(IOFailure):
        ckptkit.cp(tmp_path / "model.pt", url)
    place.server.faults.clear()
    place.files.pipe_file(f"{place.name}/run/ckpt-1/__0_0.distcp", b"")
    (found,) = (one for one in ckptkit.ls(run_of(place)).checkpoints if one.step == 7)
    assert (found.is_complete, found.claim and found.claim.kind) == (False, "upload")
    for prefix in (run_of(place), url):
        assert names(prune_uploads(prefix, older=0)) == {"run/step-7.pt"}
    done = prune_uploads(url, older=0, yes=True)
    assert done.freed_bytes == (tmp_path / "model.pt").stat().st_size
    assert open_in(place) == set()
    assert place.files.find(f"{place.name}/run", refresh=True) == [f"{place.name}/run/ckpt-1/__0_0.distcp"]


@pytest.mark.slow
def test_the_command_line(place: Place, source: Path, tmp_path: Path) -> None:
    let_one_die(place, source)
    shown = cli("prune", "--uploads", run_of(place), "--older", "0s")
    assert (shown.returncode, "would abort 1 upload" in shown.stdout) == (0, True)
    assert "of complete objects, which ckptkit does not delete" in shown.stderr
    done = json.loads(cli("prune", "--uploads", run_of(place), "--older", "0s", "--yes", "--json").stdout)
    assert done.keys() == {"root", "older", "aborted", "freed_bytes", "stale", "keep"}
    (one,) = done["stale"]
    assert (one["path"], one["claimed"], one["files"]) == (
        place.url,
        True,
        ["run/ckpt-5/model-00001-of-00002.safetensors"],
    )
    assert one["sent_bytes"] == done["freed_bytes"] == source_bytes(source)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--uploads", "."], 2, "this is a local path"),
        (["--uploads", "gs://bucket/run"], 2, "on s3:// only"),
        (["--uploads", "s3://bucket/run", "--keep-last", "1"], 2, "--uploads cannot be combined with --keep-last"),
        (["--uploads", "s3://bucket/run", "--demote"], 2, "--uploads cannot be combined with --demote"),
        (["--uploads", "s3://bucket/run", "--older", "soon"], 2, "expected a time, found `soon`"),
        (["--uploads", "s3://bucket/run", "--older", "-1d"], 2, "expected a time, found `-1d`"),
        (["s3://bucket/run", "--keep-last", "1", "--older", "7d"], 2, "--older works only with --uploads"),
    ],
)
def test_what_cannot_work_is_refused(arguments: list[str], code: int, words: str) -> None:
    refused = cli("prune", *arguments)
    assert (refused.returncode, words in refused.stderr) == (code, True)
    with pytest.raises(Usage):
        prune_uploads("s3://bucket/run", older=-1)

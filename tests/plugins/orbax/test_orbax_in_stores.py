"""Trees of orbax in stores: what a local tree becomes, and one error for all that is wrong there."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

import ckptkit
from ckptkit.errors import CkptError
from tests.plugins.orbax.trees import save_tree
from tests.s3 import Bucket, forget

pytest.importorskip("tensorstore", reason="tensorstore is not installed")


def save_step(step: Path, *, driver: str = "zarr", is_ocdbt: bool = True) -> Path:
    """A step as orbax leaves it in a bucket."""
    tree = save_tree(step / "items", driver=driver, is_ocdbt=is_ocdbt)
    (step / "_CHECKPOINT_METADATA").write_text('{"init_timestamp_nsecs": 1, "commit_timestamp_nsecs": null}')
    (step / "commit_success.txt").write_text("Checkpoint commit was successful")
    return tree


@pytest.mark.parametrize(("driver", "is_ocdbt"), [("zarr", True), ("zarr3", False)], ids=["ocdbt", "files"])
def test_it_becomes_what_a_local_one_becomes(bucket: Bucket, tmp_path: Path, driver: str, is_ocdbt: bool) -> None:
    local, url = bucket.root / "run/3", f"{bucket.url}/run"
    save_step(local, driver=driver, is_ocdbt=is_ocdbt)
    (bucket.root / "run/4").mkdir()
    (bucket.root / "run/4/_CHECKPOINT_METADATA").write_text('{"init_timestamp_nsecs": 1}')
    assert ckptkit.inspect(f"{url}/3").layout.tensors.keys() == ckptkit.inspect(local).layout.tensors.keys()
    (verified,) = ckptkit.verify(f"{url}/3")
    assert (verified.problems, verified.tensors) == ((), 3)
    made = ckptkit.convert(url, tmp_path / "from-s3", to="dcp")
    assert str(made.source) == f"{url}/3"
    ckptkit.convert(local, tmp_path / "from-disk", to="dcp")
    assert files_of(tmp_path / "from-s3") == files_of(tmp_path / "from-disk")
    assert not {path.name for path in (tmp_path / "from-s3").iterdir()} & {"commit_success.txt", "_CHECKPOINT_METADATA"}
    assert ckptkit.consolidate(url, tmp_path / "none", dry_run=True).tensors == 2


def files_of(root: Path) -> dict[str, bytes]:
    files = (path for path in root.rglob("*") if path.is_file() and path.name != "ckptkit.json")
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


def without_marker(step: Path) -> None:
    (step / "commit_success.txt").unlink()


def without_manifest(step: Path) -> None:
    (step / "items/manifest.ocdbt").unlink()


def without_data(step: Path) -> None:
    largest_file(step).unlink()


def with_short_data(step: Path) -> None:
    for path in (step / "items/d").iterdir():  # tensorstore may leave values in one of them that no manifest names
        os.truncate(path, 100)


def with_other_data(step: Path) -> None:
    path = largest_file(step)
    path.write_bytes(b"\xff" * path.stat().st_size)


def largest_file(step: Path) -> Path:
    return max((step / "items/d").iterdir(), key=lambda path: path.stat().st_size)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (without_marker, "orbax did not finish this save"),
        (without_manifest, "manifest.ocdbt: the file is missing"),
        (without_data, "items/d/.*: the file is missing"),
        (with_short_data, "expected at least .* bytes, found 100: the file is truncated"),
        (with_other_data, r"params\.w.*tensorstore cannot read it"),
    ],
)
def test_damage_is_one_error(bucket: Bucket, tmp_path: Path, harm: Callable[[Path], None], message: str) -> None:
    save_step(bucket.root / "run/3")
    harm(bucket.root / "run/3")
    with pytest.raises(CkptError, match=rf"{bucket.url}/run/3.*{message}") as raised:
        ckptkit.consolidate(f"{bucket.url}/run/3", tmp_path / "out")
    assert raised.value.exit_code == 3
    assert not (tmp_path / "out").exists()
    assert ckptkit.verify(f"{bucket.url}/run/3")[0].problems


def test_a_refusal_is_one_error(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    save_step(bucket.root / "run/3")
    with pytest.raises(CkptError, match="the bucket does not exist") as missing:
        ckptkit.open("s3://no-such-bucket/run/3")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    forget()
    with pytest.raises(CkptError) as denied:
        ckptkit.open(f"{bucket.url}/run/3")
    assert (missing.value.exit_code, denied.value.exit_code) == (4, 4)
    monkeypatch.undo()


def test_from_google_cloud_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By obstore, with its store in memory in the place of the bucket."""
    obstore = pytest.importorskip("obstore", reason="obstore is not installed")
    from obstore.store import MemoryStore

    store = MemoryStore()
    monkeypatch.setattr("obstore.store.from_url", lambda *_, **__: store)
    forget()
    save_step(tmp_path / "run/3")
    for path in (tmp_path / "run").rglob("*"):
        if path.is_file():
            obstore.put(store, str(path.relative_to(tmp_path)), path.read_bytes())
    ckptkit.convert("gs://bucket/run", tmp_path / "from-gs", to="dcp")
    ckptkit.convert(tmp_path / "run", tmp_path / "from-disk", to="dcp")
    assert files_of(tmp_path / "from-gs") == files_of(tmp_path / "from-disk")
    forget()

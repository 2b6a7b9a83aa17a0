"""The Hub's cache: links to its own blobs are files, and a link to anywhere else stays refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptkit
from ckptkit.errors import CkptError, Unsafe
from ckptkit.io.file import read_small

_COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """What the Hub's client keeps of a repository: a file beside others, and one in a folder."""
    root = tmp_path / "hub" / "models--org--model"
    (root / "blobs").mkdir(parents=True)
    (root / "snapshots" / _COMMIT / "sub").mkdir(parents=True)
    for name, up in (("file", "../.."), ("sub/file", "../../..")):
        (root / "blobs" / name.replace("/", "-")).write_bytes(name.encode())
        (root / "snapshots" / _COMMIT / name).symlink_to(f"{up}/blobs/{name.replace('/', '-')}")
    return root


def test_a_link_to_a_blob_is_the_blob(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = cache / "snapshots" / _COMMIT
    assert read_small(snapshot / "file", 99) == b"file"
    assert read_small(snapshot / "sub" / "file", 99) == b"sub/file"
    (snapshot / "absolute").symlink_to(cache / "blobs" / "file")
    assert read_small(snapshot / "absolute", 99) == b"file"
    (cache.parent.parent / "home").symlink_to(cache.parent)  # the cache on another disk
    assert read_small(cache.parent.parent / "home" / cache.name / "snapshots" / _COMMIT / "file", 99) == b"file"
    monkeypatch.chdir(snapshot)
    assert read_small(Path("file"), 99) == b"file"
    assert read_small(Path(f"../../../{cache.name}/snapshots/{_COMMIT}/file"), 99) == b"file"


def link_blob(cache: Path, secret: Path) -> None:
    (cache / "blobs" / "file").unlink()
    (cache / "blobs" / "file").symlink_to(secret)


def link_blobs(cache: Path, secret: Path) -> None:
    (cache / "blobs").rename(cache / "old")
    (cache / "blobs").symlink_to(secret.parent)


def link_snapshot(cache: Path, secret: Path) -> None:
    """A folder of the cache that is one of another cache."""
    other = secret.parent / "models--other--one"
    (other / "snapshots" / _COMMIT).mkdir(parents=True)
    (other / "blobs").mkdir()
    (other / "blobs" / "file").write_bytes(b"secret")
    (other / "snapshots" / _COMMIT / "file").symlink_to("../../blobs/file")
    (cache / "snapshots" / _COMMIT).rename(cache / "old")
    (cache / "snapshots" / _COMMIT).symlink_to(other / "snapshots" / _COMMIT)


def link_to(target: str) -> Callable[[Path, Path], None]:
    def link(cache: Path, secret: Path) -> None:
        (cache / "snapshots" / _COMMIT / "file").unlink()
        (cache / "snapshots" / _COMMIT / "file").symlink_to(target)

    return link


@pytest.mark.parametrize(
    "spoil",
    [
        link_blob,
        link_blobs,
        link_snapshot,
        link_to("../../../../secret/file"),
        link_to("../../blobs/../../../secret/file"),
        link_to("../../blobs/deep/file"),
        link_to("../../blobs/.."),
        link_to("../../blobs"),
        link_to("../../refs/main"),
        link_to("sub/file"),
        link_to("file"),
    ],
)
def test_a_link_that_leaves_the_cache_is_refused(
    spoil: Callable[[Path, Path], None], cache: Path, tmp_path: Path
) -> None:
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "file").write_bytes(b"secret")
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(_COMMIT)
    (cache / "blobs" / "deep").mkdir()
    (cache / "blobs" / "deep" / "file").write_bytes(b"secret")
    spoil(cache, tmp_path / "secret" / "file")
    with pytest.raises(Unsafe):
        read_small(cache / "snapshots" / _COMMIT / "file", 99)


@pytest.mark.parametrize("place", ["models/snapshots/rev", "models--org--name/copies/rev", "models--org--name", "run"])
def test_a_link_elsewhere_is_refused(place: str, tmp_path: Path) -> None:
    folder = tmp_path / place
    folder.mkdir(parents=True)
    blobs = tmp_path / Path(place).parts[0] / "blobs"
    blobs.mkdir()
    (blobs / "file").write_bytes(b"secret")
    (folder / "file").symlink_to(os.path.relpath(blobs / "file", folder))
    with pytest.raises(Unsafe, match="symbolic link"):
        read_small(folder / "file", 99)


def test_a_snapshot_is_a_source(cache: Path, tmp_path: Path) -> None:
    snapshot = cache / "snapshots" / _COMMIT
    save_file({"t": torch.arange(3.0)}, cache / "blobs" / "weights", metadata={"format": "pt"})
    (snapshot / "model.safetensors").symlink_to("../../blobs/weights")
    (cache / "blobs" / "config").write_text('{"model_type": "strange", "architectures": ["Strange"]}')
    (snapshot / "config.json").symlink_to("../../blobs/config")
    (cache / "blobs" / "words").write_text("{}")
    (snapshot / "tokenizer.json").symlink_to("../../blobs/words")
    (verified,) = ckptkit.verify(snapshot)
    assert verified.is_ok
    done = ckptkit.consolidate(snapshot, tmp_path / "out")
    assert load_file(tmp_path / "out/model.safetensors")["t"].equal(torch.arange(3.0))
    assert {"config.json", "tokenizer.json"} <= {path.name for path in (tmp_path / "out").iterdir()}
    assert not any(path.is_symlink() for path in (tmp_path / "out").rglob("*"))
    assert not any("link" in note for note in done.notes)
    ckptkit.convert(snapshot, tmp_path / "dcp", to="dcp")
    assert not any(path.is_symlink() for path in (tmp_path / "dcp").rglob("*"))
    (tmp_path / "secret").write_text("{}")
    (snapshot / "tokenizer.json").unlink()
    (snapshot / "tokenizer.json").symlink_to(tmp_path / "secret")
    with pytest.raises(CkptError, match="symbolic link"):
        ckptkit.consolidate(snapshot, tmp_path / "again")

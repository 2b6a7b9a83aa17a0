"""Results inside the source: made where nothing of it is touched and it stays what it is, refused anywhere else."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckptkit
from ckptkit import Checkpoint, consolidate, convert, reshard, verify
from ckptkit.checks.diff import diff
from ckptkit.errors import CkptError, NoRoom, Unsafe
from tests import producers
from tests.conftest import Produce
from tests.producers import counted, save_alone


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkpoint in shards, with another file beside them."""
    state = {"model": {"w": counted(7, 3), "b": counted(3)}, "optim": {"state": {"w": {"exp_avg": counted(7, 3)}}}}
    save_alone(state, tmp_path / "run" / "ckpt-5")
    (tmp_path / "run" / "ckpt-5" / "trainer_state.json").write_text("{}")
    return tmp_path / "run" / "ckpt-5"


def facts(root: Path) -> Any:
    """What a checkpoint is, as far as anyone asks."""
    found = Checkpoint.open(root)
    parts = [(part.place, part.reader.name) for part in found.components]
    return parts, found.trainer, found.world_size, found.step, found.layout.specs, found.is_complete


@pytest.mark.parametrize(
    ("to", "place"),
    [("pt", "model.pt"), ("pt", "as-pt"), ("hf", "consolidated"), ("dcp", "exports/shards"), ("hf", "step-7")],
)
def test_the_source_stays_what_it_is(source: Path, to: str, place: str) -> None:
    before = facts(source)
    names = {path.name for path in source.iterdir()}
    for _ in range(2):
        convert(source, source / place, to=to, overwrite=True)
        assert facts(source) == before
        assert {path.name for path in source.iterdir()} == names | {place.split("/", maxsplit=1)[0]}
        assert not diff(source, source / place, include=["model.*"] if to != "hf" else []).different
        assert [problem for part in verify(source) for problem in part.problems] == []
    consolidate(source.parent, source.parent.parent / "again")
    assert ckptkit.open(source.parent.parent / "again").keys() == {"w", "b"}


def test_a_result_is_not_carried_into_itself(source: Path) -> None:
    for _ in range(2):
        done = reshard(source, source / "for-2", to=2, overwrite=True)
        assert set(done.files) == {".metadata", "__0_0.distcp", "__1_0.distcp", "trainer_state.json"}


def test_by_its_own_command(source: Path) -> None:
    """Relative paths, and the link that a run has to its latest checkpoint."""
    (source.parent / "latest").symlink_to("ckpt-5")
    done = consolidate(source.parent / "latest", source / "consolidated")
    assert sorted(done.files) == ["model.safetensors"]
    assert facts(source)[0] == [("", "dcp")]


@pytest.mark.parametrize(
    ("to", "place", "said"),
    [
        ("hf", "training", "is inside the source"),
        ("dcp", ".", "the source is the destination"),
        ("dcp", "..", "or inside it"),
    ],
)
def test_what_would_change_the_source_is_refused(source: Path, to: str, place: str, said: str) -> None:
    before = sorted(source.rglob("*"))
    with pytest.raises(Unsafe, match=said):
        convert(source, source / place, to=to, overwrite=True)
    assert sorted(source.rglob("*")) == before


def test_no_file_of_the_source_is_replaced(tmp_path: Path) -> None:
    torch.save({"w": counted(3)}, tmp_path / "model.pt")
    whole = tmp_path / "in"
    whole.mkdir()
    torch.save({"w": counted(3)}, whole / "mine.pth")
    for name, said in (
        ("mine.pth", "a file of the source"),
        ("other.pt", "read as a part of the source"),
        ("state.pt", "a file"),
    ):
        with pytest.raises(Unsafe, match=said):
            convert(whole, whole / name, to="pt", overwrite=True)
    with pytest.raises(Unsafe):
        convert(tmp_path / "model.pt", tmp_path / "model.pt", to="pt", overwrite=True)
    assert [path.name for path in whole.iterdir()] == ["mine.pth"]
    convert(whole, whole / "shards", to="dcp")
    assert Checkpoint.open(whole).layout.format == "pt"


def test_a_checkpoint_in_directories_takes_none_more(produce: Produce, tmp_path: Path) -> None:
    source = Path(shutil.copytree(produce(producers.accelerate).root, tmp_path / "checkpoint-3"))
    before = sorted(source.rglob("*"))
    for name in ("consolidated", "model.pt", "checkpoint-4", Checkpoint.open(source).model_component.place):
        with pytest.raises(CkptError):
            convert(source, source / name, to="pt" if name == "model.pt" else "hf", overwrite=True)
    assert sorted(source.rglob("*")) == before
    places = [part.place for part in Checkpoint.open(source).components]
    consolidate(source, source / places[0] / "consolidated")
    assert [part.place for part in Checkpoint.open(source).components] == places
    assert sorted(source.iterdir()) == [path for path in before if path.parent == source]


@pytest.mark.parametrize("options", [{"base": "out"}, {"dtype": ["like:out"]}, {"dtype": ["a*=like:out"]}], ids=str)
def test_a_model_that_another_option_names_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    save_alone({"model": {"a": counted(4)}}, tmp_path / "in")
    consolidate("in", "out")
    with pytest.raises(Unsafe, match="the source is the destination, or inside it"):
        consolidate("in", "out", overwrite=True, **options)


@pytest.mark.parametrize(
    ("write", "place"),
    [
        (lambda old, _new, out: ckptkit.cp(old, out), "out"),  # the notes for a later call are the first file
        (lambda old, _new, out: ckptkit.cp(old, out), "out/model.safetensors"),
        (lambda old, new, out: ckptkit.delta(old, new, out, force=True), "out/delta-00001-of-00001.safetensors"),
        (lambda old, _new, out: convert(old, out, to="dcp"), "out/__0_0.distcp"),
        (lambda old, _new, _out: convert(old, "out.pt", to="pt"), "out.pt"),
        (lambda *_: ckptkit.Run("out").save(1, torch.nn.Linear(2, 2)), "out/ckpt-1/__0_0.distcp"),
    ],
    ids=["notes", "cp", "delta", "dcp", "pt", "Run"],
)
def test_a_full_disk_is_said_of_the_destination(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Any, place: str
) -> None:
    allocate = os.posix_fallocate

    def fail(fd: int, offset: int, length: int) -> None:
        if "key" in os.readlink(f"/proc/self/fd/{fd}") and place != "out":
            allocate(fd, offset, length)
        else:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.chdir(tmp_path)
    for name, value in (("old", 0.0), ("new", 1.0)):
        Path(name).mkdir()
        save_file({"a": torch.full((4,), value)}, Path(name, "model.safetensors"))
    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(NoRoom) as full:
        write("old", "new", "out")
    assert full.value.path == Path(place)
    assert [file for file in Path().rglob("*") if file.is_file()] == list(Path().glob("*/model.safetensors"))

"""Verify: whole checkpoints of every producer are whole, and of damaged ones every problem is named."""

from __future__ import annotations

import errno
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import ckptkit
from ckptkit import consolidate, convert, finalize, ls, make_manifest, reshard, storage, verify
from ckptkit.checkpoints.checkpoint import Checkpoint, open_layout
from ckptkit.checkpoints.manifest import NAME, FileSum, Manifest, read_manifest
from ckptkit.checks.verify import Verified
from ckptkit.errors import CkptError, Corrupt, Incomplete, NotACheckpoint, Occupied, Usage
from ckptkit.formats import locate_all_chunks, require_known_format
from ckptkit.io.crc32 import crc32
from tests import producers
from tests.conftest import Produce
from tests.producers import READABLE, Producer
from tests.trainers import produced_ranks

WITHOUT_SUMS = {"no_crc", "hf_shards", "hf_shards_in_parts", "hf_alone"}


@pytest.fixture
def checkpoint(produce: Produce, tmp_path: Path) -> Path:
    """DCP of three ranks, without a manifest."""
    return Path(shutil.copytree(produce(producers.fsdp2).root, tmp_path / "checkpoint"))


@pytest.fixture
def model(checkpoint: Path, tmp_path: Path) -> Path:
    """Safetensors in several files, with a manifest."""
    consolidate(checkpoint, tmp_path / "model", max_shard_size=500)
    return tmp_path / "model"


def flip(path: Path, at: int, mask: int = 4) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ mask]))


def one(path: Path, *, fast: bool = False) -> Verified:
    (found,) = verify(path, fast=fast)
    return found


def places(root: Path) -> dict[str, tuple[Path, int, int]]:
    """File, offset and length of the first chunk of every tensor that has bytes."""
    layout = locate_all_chunks(open_layout(root))
    return {
        name: (root / chunk.path, chunk.offset, chunk.length)
        for name, tensor in layout.tensors.items()
        for chunk in tensor.chunks[:1]
        if chunk.box.numel
    }


@pytest.mark.parametrize("producer", READABLE, ids=lambda producer: producer.__name__)
def test_what_was_written_well_is_well(produce: Produce, producer: Producer) -> None:
    root = produce(producer).root
    for fast in (True, False):
        found = one(root, fast=fast)
        assert found.is_ok, found.problems
        assert found.notes == (() if producer is not producers.leftovers else found.notes)
    content = found.checked_bytes + found.unchecked_bytes
    assert found.unchecked_bytes == (content if producer.__name__ in WITHOUT_SUMS else 0)
    assert content >= open_layout(root).nbytes if content else not open_layout(root).nbytes


def test_of_an_older_save_files_may_lie_there(produce: Produce) -> None:
    (note,) = one(produce(producers.leftovers).root).notes
    assert "do not belong to this checkpoint: __" in note


def test_every_problem_is_named(checkpoint: Path) -> None:
    damaged = random.Random(1).sample(sorted(places(checkpoint)), 5)
    for name in damaged:
        path, offset, length = places(checkpoint)[name]
        flip(path, offset + length // 2)
    found = one(checkpoint)
    assert sorted(problem.tensor or "" for problem in found.problems) == sorted(damaged)
    assert all(isinstance(problem, Corrupt) and problem.offset is not None for problem in found.problems)
    assert {problem.path for problem in found.problems} == {places(checkpoint)[name][0] for name in damaged}


def test_a_shard_that_may_not_be_read_is_one_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in `ls`, which reads the parameter groups."""
    weights = {f"layers.{n}.weight": torch.ones(2, 2) for n in range(5)}
    groups = [{"lr": 0.1, "params": list(weights)}]
    state = {name: {"exp_avg": weight, "step": torch.ones(())} for name, weight in weights.items()}
    for name in ("ckpt-1", "ckpt-2"):
        saved = {"model": weights, "optim": {"state": state, "param_groups": groups}}
        producers.save_alone(saved, tmp_path / name)
    shard = tmp_path / "ckpt-2" / "__0_0.distcp"
    really = os.open

    def refuse(path: str | Path, *options: Any, **more: Any) -> int:
        if Path(path) == shard:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return really(path, *options, **more)

    monkeypatch.setattr(os, "open", refuse)
    (problem,) = one(shard.parent).problems
    assert (problem.path, problem.message, problem.hint) == (shard, "permission denied", None)
    assert [listed.problem for listed in ls(tmp_path).checkpoints] == [None, "__0_0.distcp: permission denied"]


def test_damage_of_several_kinds(checkpoint: Path) -> None:
    (checkpoint / "__2_0.distcp").unlink()
    os.truncate(checkpoint / "__1_0.distcp", 20_000)
    name, (path, offset, _) = min(places_in(checkpoint, "__0_0.distcp").items())
    flip(path, offset)
    found = one(checkpoint)
    messages = [problem.message for problem in found.problems]
    assert len(messages) == 3
    assert messages[0] == "1 of 3 files are missing: __2_0.distcp"
    assert "bytes (metadata), found 20000" in messages[1]
    assert "damaged" in messages[2]
    assert found.problems[2].tensor == name


def places_in(root: Path, file: str) -> dict[str, tuple[Path, int, int]]:
    """Of a damaged checkpoint, the places in a file that is not."""
    reader = require_known_format(root)
    ignored: list[CkptError] = []
    layout = locate_all_chunks(reader.read(root, ignored.append), ignored.append)
    return {
        name: (root / chunk.path, chunk.offset, chunk.length)
        for name, tensor in layout.tensors.items()
        for chunk in tensor.chunks
        if chunk.path == file and chunk.crc32 is not None
    }


def test_a_page_of_zeros_is_said(tmp_path: Path) -> None:
    torch.save({"weight": torch.randn(100_000)}, tmp_path / "model.pt")
    with (tmp_path / "model.pt").open("r+b") as file:
        file.seek(40_960)
        file.write(bytes(4096))
    (problem,) = one(tmp_path / "model.pt").problems
    assert problem.tensor == "weight"
    assert problem.hint is not None
    assert "all zeros" in problem.hint


def test_of_one_file_every_storage_is_compared(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(3000), "b": torch.ones(3000)[10:20], "n": [1, 2]}, tmp_path / "model.pt")
    assert one(tmp_path / "model.pt").unchecked_bytes == 0
    data = (tmp_path / "model.pt").read_bytes()
    second = data.index(b"\0\0\x80?" * 100, data.index(b"\0\0\x80?" * 100) + 12_000)
    flip(tmp_path / "model.pt", second + 8000)  # of the second storage what no tensor shows
    flip(tmp_path / "model.pt", data.index(b"\0\0\x80?" * 100) + 5)
    assert [problem.tensor for problem in one(tmp_path / "model.pt").problems] == ["a", None]


def test_what_no_checksum_is_recorded_of_is_said(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(10, 10), "b": torch.zeros(0), "c": torch.tensor(True)}
    save_file(tensors, tmp_path / "model.safetensors")
    torch.save(tensors, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    for name in ("model.safetensors", "old.pt"):
        found = one(tmp_path / name)
        assert (found.is_ok, found.checked_bytes, found.unchecked_bytes) == (True, 0, 401)


# -- with a manifest ---------------------------------------------------------------------------------------------------


WRITES: dict[str, Callable[[Path, Path], object]] = {
    "consolidate": consolidate,
    "in files": lambda src, dst: consolidate(src, dst, max_shard_size=500),
    "reshard": lambda src, dst: reshard(src, dst, to=5),
    "dcp": lambda src, dst: convert(src, dst, to="dcp"),
    "pt": lambda src, dst: convert(src, dst, to="pt"),
    "cast": lambda src, dst: consolidate(src, dst, dtype="bf16"),
}


@pytest.mark.parametrize("name", WRITES)
def test_what_a_conversion_writes_has_a_manifest(name: str, checkpoint: Path, tmp_path: Path) -> None:
    WRITES[name](checkpoint, tmp_path / "out")
    found = one(tmp_path / "out")
    assert found.has_manifest
    assert found.is_ok, found.problems
    assert found.unchecked_bytes == 0
    made = read_manifest(tmp_path / "out")
    make_manifest(tmp_path / "out", overwrite=True)  # now from what was read, not from what was written
    again = read_manifest(tmp_path / "out")
    assert made is not None
    assert again is not None
    assert made.files == again.files


@pytest.mark.parametrize("what", ["model-00001-of-", "model.safetensors.index.json"])
def test_any_flip_is_found(what: str, model: Path) -> None:
    path = next(path for path in sorted(model.iterdir()) if path.name.startswith(what))
    rng = random.Random(what)
    for at in rng.sample(range(path.stat().st_size), 60):
        mask = 1 << rng.randrange(8)
        flip(path, at, mask)
        found = one(model)
        assert not found.is_ok, (at, mask)
        assert path in {problem.path for problem in found.problems}
        flip(path, at, mask)
    assert one(model).is_ok


def test_a_damaged_tensor_of_safetensors_is_named(model: Path) -> None:
    damaged = sorted(places(model))[::3]
    for name in damaged:
        path, offset, length = places(model)[name]
        flip(path, offset + length - 1)
    assert sorted(problem.tensor or "" for problem in one(model).problems) == damaged


@pytest.mark.parametrize("fast", [True, False])
def test_a_shard_of_another_step_is_found(checkpoint: Path, tmp_path: Path, fast: bool) -> None:
    make_manifest(checkpoint)
    other = tmp_path / "other"
    shutil.copytree(checkpoint, other)
    reseal(other / "__1_0.distcp")
    assert one(checkpoint, fast=fast).is_ok
    shutil.copy(other / "__1_0.distcp", checkpoint / "__1_0.distcp")
    (problem,) = one(checkpoint, fast=fast).problems
    assert problem.path == checkpoint / "__1_0.distcp"
    assert "manifest" in problem.message


def reseal(path: Path) -> None:
    """Make a shard what it would have been a step later: other numbers, and checksums that are right."""
    data = path.read_bytes()
    root = path.parent
    changed = bytearray(data)
    for chunk in [
        c for t in locate_all_chunks(open_layout(root)).tensors.values() for c in t.chunks if c.path == path.name
    ]:
        if chunk.crc32 is None:
            continue
        end = chunk.offset + chunk.length
        changed[chunk.offset] ^= 1
        new = crc32(changed[chunk.offset : end]).to_bytes(4, "little")
        old = chunk.crc32.to_bytes(4, "little")
        for at in (end + 4, data.index(old, end + 8)):
            changed[at : at + 4] = new
    path.write_bytes(changed)


def test_shards_that_were_swapped(checkpoint: Path) -> None:
    make_manifest(checkpoint)
    one_, other = checkpoint / "__1_0.distcp", checkpoint / "__2_0.distcp"
    one_.rename(checkpoint / "aside")
    other.rename(one_)
    (checkpoint / "aside").rename(other)
    assert not one(checkpoint).is_ok


def test_a_file_that_came_from_elsewhere(checkpoint: Path) -> None:
    make_manifest(checkpoint)
    shutil.copy(checkpoint / "__1_0.distcp", checkpoint / "__7_0.distcp")
    (checkpoint / "notes.txt").write_text("not a part of any checkpoint")
    (problem,) = one(checkpoint).problems
    assert problem.path == checkpoint / "__7_0.distcp"


def test_files_beside_the_weights_are_known_too(model: Path) -> None:
    (model / "config.json").write_text("{}")
    make_manifest(model, overwrite=True)
    assert one(model).is_ok
    (model / "config.json").write_text("[]")
    (problem,) = one(model).problems
    assert problem.path == model / "config.json"
    (model / "config.json").unlink()
    (problem,) = one(model).problems
    assert "missing" in problem.message


@pytest.mark.parametrize("kind", ["model", "optim"])
@pytest.mark.parametrize("how", ["missing", "cut"])
def test_the_file_of_a_rank_is_one_problem(produce: Produce, tmp_path: Path, kind: str, how: str) -> None:
    """Not one for each tensor that has a part in it, and another for the gap in that tensor."""
    root = Path(shutil.copytree(produce(produced_ranks.three_ranks).root / "groups", tmp_path / "ckpt-3"))
    file = root / f"{kind}_world_size_3_rank_1.pt"
    if how == "missing":
        file.unlink()
    else:
        os.truncate(file, 1000)
    (problem,) = one(root).problems
    (finding,) = ckptkit.doctor(root).findings
    assert problem.tensor is finding.tensor is None
    assert finding.code == problem.code == ("incomplete" if how == "missing" else "corrupt")
    found = re.search(r"; (\d+) tensors are incomplete: (\S+), \S+, \S+, \.\.\.$", problem.message)
    assert found, problem.message
    assert int(found[1]) == (13 if kind == "model" else 26)
    assert found[2] == ("model.embed.weight" if kind == "model" else "optimizer.state.embed.weight.exp_avg")
    assert found[0] in finding.message


@pytest.mark.parametrize("kind", ["dcp", "hf"])
def test_a_missing_file_has_the_code_that_doctor_gives_it(produce: Produce, tmp_path: Path, kind: str) -> None:
    made = produce(producers.fsdp2).root
    root = tmp_path / "ckpt-3"
    if kind == "dcp":
        shutil.copytree(made, root)
        (root / "__1_0.distcp").unlink()
    else:
        consolidate(made, root, max_shard_size=500)
        (root / "model-00002-of-00003.safetensors").unlink()
    assert {problem.code for problem in one(root).problems} == {"incomplete"}
    assert {finding.code for finding in ckptkit.doctor(root).findings} == {"incomplete"}
    with pytest.raises(Incomplete) as raised:
        convert(root, tmp_path / "out", to="pt")
    assert (raised.value.code, raised.value.exit_code) == ("incomplete", 3)


def test_all_files_of_a_rank_are_named(produce: Produce, tmp_path: Path) -> None:
    root = Path(shutil.copytree(produce(produced_ranks.three_ranks).root / "groups", tmp_path / "ckpt-3"))
    for kind in ("model", "optim"):
        (root / f"{kind}_world_size_3_rank_1.pt").unlink()
    findings = ckptkit.doctor(root).findings
    for messages in ([problem.message for problem in one(root).problems], [finding.message for finding in findings]):
        assert len(messages) == 2
        assert "like `model_world_size_3_rank_0.pt` are missing, for rank 1; 13 tensors" in messages[0]
        assert "like `optim_world_size_3_rank_0.pt` are missing, for rank 1; 26 tensors" in messages[1]


def test_of_a_last_rank_only_the_tensors_tell(produce: Produce, tmp_path: Path) -> None:
    """Accelerate's names do not say how many ranks there were."""
    source = produce(produced_ranks.by_accelerate).root / "fsdp2" / "checkpoint-7"
    root = Path(shutil.copytree(source, tmp_path / "ckpt-7"))
    files = [root / f"{kind}_0_rank1.bin" for kind in ("pytorch_model_fsdp", "optimizer")]
    for file in files:
        file.unlink()
    problems = one(root).problems
    assert [problem.path for problem in problems] == files
    assert all("tensors lack the shard of rank 1: " in problem.message for problem in problems)
    assert {finding.code for finding in ckptkit.doctor(root).findings} == {"incomplete"}


def test_a_damaged_manifest_is_named(model: Path) -> None:
    size = (model / NAME).stat().st_size
    rng = random.Random(0)
    for at in rng.sample(range(size), 80):
        flip(model / NAME, at)
        assert [problem.path for problem in one(model).problems] == [model / NAME], at
        flip(model / NAME, at)
    assert one(model).is_ok


def test_a_manifest_that_leads_out_of_the_directory(model: Path) -> None:
    (model / NAME).write_bytes(Manifest({"../secret": FileSum(1, 0)}).to_bytes())
    (problem,) = one(model).problems
    assert problem.code == "unsafe"


def test_one_file_of_a_directory_is_known_by_the_manifest(model: Path) -> None:
    path = next(path for path in sorted(model.iterdir()) if path.suffix == ".safetensors")
    assert one(path).unchecked_bytes == 0
    flip(path, path.stat().st_size - 1)
    assert not one(path).is_ok


# -- making one --------------------------------------------------------------------------------------------------------


def test_a_manifest_is_made_of_nothing_damaged(checkpoint: Path) -> None:
    name, (path, offset, _) = min(places(checkpoint).items())
    flip(path, offset)
    with pytest.raises(Corrupt) as caught:
        make_manifest(checkpoint)
    assert caught.value.tensor == name
    assert not (checkpoint / NAME).exists()


def test_a_manifest_is_not_replaced_unasked(checkpoint: Path) -> None:
    make_manifest(checkpoint)
    with pytest.raises(Occupied):
        make_manifest(checkpoint)
    names = sorted(os.listdir(checkpoint))
    make_manifest(checkpoint, overwrite=True)
    assert sorted(os.listdir(checkpoint)) == names


def test_a_manifest_is_of_a_directory(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "model.pt")
    with pytest.raises(Usage):
        make_manifest(tmp_path / "model.pt")


# -- runs --------------------------------------------------------------------------------------------------------------


def test_every_checkpoint_of_a_run(checkpoint: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in (1, 2, 3):
        shutil.copytree(checkpoint, run / f"ckpt-{step}")
    (run / "ckpt-2" / ".metadata").unlink()
    (run / "ckpt-10").mkdir()
    found = verify(run)
    assert [(part.path.name, part.is_ok) for part in found] == [
        ("ckpt-1", True),
        ("ckpt-2", False),
        ("ckpt-3", True),
        ("ckpt-10", False),
    ]


def test_a_checkpoint_without_a_step_in_its_name_hides_no_others(checkpoint: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for name in ("ckpt-1", "ckpt-2", "ckpt-2-to4"):
        shutil.copytree(checkpoint, run / name)
    (run / "ckpt-1" / ".metadata").unlink()
    found = {part.path.name: part.is_ok for part in verify(run)}
    assert found == {"ckpt-1": False, "ckpt-2": True, "ckpt-2-to4": True}


@pytest.mark.parametrize(("step", "stray"), [("ckpt-5", "norm_stats.pt"), ("epoch_0", "stats.safetensors")])
def test_a_stray_file_in_a_run_hides_no_checkpoint(checkpoint: Path, tmp_path: Path, step: str, stray: str) -> None:
    run = tmp_path / "run"
    shutil.copytree(checkpoint, run / step)
    statistics = {"mean": torch.zeros(3)}
    (save_file if stray.endswith(".safetensors") else torch.save)(statistics, run / stray)
    found = verify(run)
    assert [(part.path, part.is_ok, part.left_behind) for part in found] == [(run / step, True, ()), (run, True, ())]
    (run / step / ".metadata").unlink()
    assert [part.is_ok for part in verify(run)] == [False, True]
    with pytest.raises(NotACheckpoint, match=f"the run has no complete checkpoint; unfinished: {step}"):
        Checkpoint.open(run)


def test_nothing_to_verify(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(NotACheckpoint):
            verify(path)


def test_bytes_read_are_told(checkpoint: Path) -> None:
    told: list[tuple[int, int]] = []
    verify(checkpoint, progress=lambda nbytes, total: told.append((nbytes, total)))
    assert sum(nbytes for nbytes, _ in told) == told[0][1] == sum(p.stat().st_size for p in checkpoint.iterdir())


@pytest.mark.parametrize("write", [consolidate, lambda src, dst: convert(src, dst, to="dcp", world_size=2)])
def test_a_conversion_compares_safetensors_with_their_manifest(
    write: Callable[[Path, Path], object], model: Path, tmp_path: Path
) -> None:
    assert getattr(write(model, tmp_path / "sound"), "unchecked_bytes", None) == 0
    name, (path, offset, _) = min(places(model).items())
    flip(path, offset)
    with pytest.raises(Corrupt) as caught:
        write(model, tmp_path / "out")
    assert caught.value.tensor is not None
    assert name in caught.value.tensor
    assert caught.value.path == path
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", sorted(WITHOUT_SUMS - {"no_crc"}))
def test_a_conversion_compares_every_chunk_with_a_manifest_made_later(
    name: str, produce: Produce, tmp_path: Path
) -> None:
    root = Path(shutil.copytree(produce(getattr(producers, name)).root, tmp_path / "model"))
    make_manifest(root)
    assert convert(root, tmp_path / "sound", to="dcp").unchecked_bytes == 0
    for tensor, (path, offset, length) in places(root).items():
        flip(path, offset + length - 1)
        with pytest.raises(Corrupt) as caught:
            convert(root, tmp_path / "out", to="dcp")
        assert (caught.value.path, caught.value.tensor) == (path, tensor)
        flip(path, offset + length - 1)


# -- a manifest of files alone -----------------------------------------------------------------------------------------


def with_files_only(root: Path) -> Path:
    """A manifest as older versions made it: it has the CRC-32 of files, and of no tensor."""
    make_manifest(root, overwrite=True)
    known = read_manifest(root)
    assert known is not None
    files = {name: FileSum(found.nbytes, found.crc32) for name, found in known.files.items()}
    (root / NAME).write_bytes(Manifest(files).to_bytes())
    return root


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """Safetensors of three tensors, in one file, with a manifest of files alone."""
    (tmp_path / "old").mkdir()
    weights = {f"layers.{i}.weight": torch.full((300, 100), float(i + 2)) for i in range(3)}
    save_file(weights, tmp_path / "old" / "model.safetensors")
    return with_files_only(tmp_path / "old")


@pytest.mark.parametrize("to", ["dcp", "hf", "pt"])
@pytest.mark.parametrize("dtype", [(), ("bf16",)])
def test_a_conversion_compares_whole_files(old: Path, tmp_path: Path, to: str, dtype: tuple[str, ...]) -> None:
    done = convert(old, tmp_path / "sound", to=to, dtype=dtype)
    assert (done.checked_bytes, done.unchecked_bytes) == (360_000, 0)
    size = (old / "model.safetensors").stat().st_size
    for at in (size - 1, size // 2, 30):  # 30 lies in the header
        flip(old / "model.safetensors", at)
        with pytest.raises(Corrupt) as caught:
            convert(old, tmp_path / "out", to=to, dtype=dtype)
        assert caught.value.path == old / "model.safetensors"
        assert not (tmp_path / "out").exists()
        flip(old / "model.safetensors", at)


def test_a_conversion_in_parts_compares_whole_files(old: Path, tmp_path: Path) -> None:
    flip(old / "model.safetensors", (old / "model.safetensors").stat().st_size - 1)
    for number in (1, 2):
        convert(old, tmp_path / "out", to="dcp", part=f"{number}/2")
    with pytest.raises(Corrupt):
        finalize(tmp_path / "out")


def test_files_that_are_not_compared_are_said(old: Path, tmp_path: Path) -> None:
    done = convert(old, tmp_path / "out", to="dcp", include=["layers.0.*"])
    assert (done.checked_bytes, done.unchecked_bytes) == (0, 120_000)
    (note,) = done.notes
    assert note.startswith("not compared with the manifest: 1 file of the source")
    assert f"`ckptkit verify {old}`" in note


def test_the_manifest_of_a_model_says_nothing_of_a_file_beside_it(model: Path, tmp_path: Path) -> None:
    weights = load_file(min(model.glob("*.safetensors")))
    save_file({name: tensor + 1 for name, tensor in weights.items()}, model / "model_1.safetensors")
    assert one(model / "model_1.safetensors").is_ok
    assert convert(model / "model_1.safetensors", tmp_path / "out", to="pt").unchecked_bytes


def test_metadata_that_the_manifest_does_not_know_are_not_loaded(checkpoint: Path, tmp_path: Path) -> None:
    make_manifest(checkpoint)
    content = (checkpoint / ".metadata").read_bytes()
    for at in range(0, len(content), 211):
        flip(checkpoint / ".metadata", at)
        with pytest.raises(CkptError):
            _ = Checkpoint.open(checkpoint).layout
        flip(checkpoint / ".metadata", at)
    reader = storage.Reader(checkpoint)
    assert reader.read_metadata().state_dict_metadata
    flip(checkpoint / ".metadata", content.index(b"1.0.0"))
    reader.read_metadata()
    with pytest.raises(Corrupt, match="damaged"):
        reader.set_up_storage_reader()
    account = consolidate(checkpoint, tmp_path / "salvaged", salvage=True).salvaged
    assert account is not None
    assert [(lost.name, lost.path) for lost in account.lost] == [("", checkpoint / ".metadata")]


def test_a_header_that_the_manifest_does_not_know_is_not_read(old: Path, tmp_path: Path) -> None:
    made = convert(old, tmp_path / "made", to="hf").output / "model.safetensors"
    flip(made, made.read_bytes().index(b'"pt"') + 1)
    with pytest.raises(Corrupt):
        _ = Checkpoint.open(made.parent).layout


def test_an_empty_tensor_where_another_begins_is_not_damaged(tmp_path: Path) -> None:
    torch.save({"a.empty": torch.zeros(0, 3), "b": torch.ones(4)}, tmp_path / "model.pt")
    consolidate(tmp_path / "model.pt", tmp_path / "out")
    assert all(part.is_ok for part in verify(tmp_path / "out"))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_directory_of_checkpoints_without_steps_is_verified_with_all_their_components(tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(64)}, "optimizer": {"state": {"w": {"exp_avg": torch.ones(64)}}}}
    for name in ("first", "second"):
        dcp.save(state, storage_writer=storage.Writer(tmp_path / name), no_dist=True)
    assert len(verify(tmp_path)) == 4
    (shard,) = (tmp_path / "second/training").glob("*.distcp")
    flip(shard, shard.read_bytes().index(torch.ones(2).numpy().tobytes()) + 3)
    assert [part.path for part in verify(tmp_path) if not part.is_ok] == [tmp_path / "second/training"]
    shard.unlink()
    assert [part.path for part in verify(tmp_path, fast=True) if not part.is_ok] == [tmp_path / "second/training"]
    (tmp_path / "first/optimizer.pt").write_bytes(b"garbage")
    assert tmp_path / "first/optimizer.pt" in [part.path for part in verify(tmp_path) if not part.is_ok]


def test_a_truncated_shard_is_one_problem(checkpoint: Path) -> None:
    """There were two: one of the metadata, and one of the manifest."""
    make_manifest(checkpoint)
    os.truncate(checkpoint / "__1_0.distcp", 100)
    (problem,) = one(checkpoint).problems
    assert problem.path == checkpoint / "__1_0.distcp"

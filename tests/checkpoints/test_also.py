"""A checkpoint that lies in several directories, each node having had a disk of its own: equal to the whole."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from typer.testing import CliRunner

import ckptkit
from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.checkpoints.several_disks import join_directories
from ckptkit.cli.commands import app
from ckptkit.errors import CkptError, Corrupt, Occupied, Unsafe, Usage
from ckptkit.storage import Reader
from tests import producers
from tests.conftest import Produce
from tests.producers import Producer
from tests.storage.states import of_a_model
from tests.trainers import produced_unused, produced_zero


def rank_of(name: str) -> int:
    """Return the rank in the name of a file, by its last number but one or so; 0 for what the first rank writes."""
    for mark in ("_rank_", "__", "shard-"):
        digits = name.partition(mark)[2][:5].partition("_")[0].partition(".")[0].partition("-")[0]
        if digits.isdecimal():
            return int(digits)
    return 0


def split_into_files(source: Path, home: Path, name: str = "ckpt-500") -> list[Path]:
    """Copy a checkpoint to two directories: what ranks above 0 wrote to one, and all else to another."""
    places = [home / f"node-{i}" / name for i in range(2)]
    for place in places:
        place.mkdir(parents=True)
    for file in sorted(path for path in source.rglob("*") if path.is_file()):
        there = places[rank_of(file.name) > (file.name.startswith("shard-"))] / file.relative_to(source)
        there.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, there)
    assert all(any(place.rglob("*")) for place in places)
    return places


CASES: list[tuple[Producer, str]] = [
    (producers.fsdp2, ""),
    (producers.accelerate, ""),
    (producers.hf_shards, ""),
    (produced_unused.unused, "ranks"),
    (produced_zero.on_two, "zero1"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("producer", "place"), CASES, ids=lambda case: getattr(case, "__name__", case))
def test_it_is_the_whole(producer: Producer, place: str, produce: Produce, tmp_path: Path) -> None:
    source = produce(producer).root / place
    first, second = split_into_files(source, tmp_path)
    for one, other in ((first, second), (second, first)):
        found = Checkpoint.open(one, also=[other])
        assert ckptkit.diff(found, source).is_equal
        assert all(verified.is_ok for verified in ckptkit.verify(found))
        whole = Checkpoint.open(source)
        assert found.step in (500, whole.step)
        assert (found.world_size, found.trainer) == (whole.world_size, whole.trainer)
        assert found.layout.world_size == whole.layout.world_size
        if producer is not producers.hf_shards:  # of which nothing tells how many there were
            with pytest.raises(CkptError):
                _ = Checkpoint.open(one).layout.nbytes
    ckptkit.consolidate(Checkpoint.open(first, second), tmp_path / "joined")
    ckptkit.consolidate(source, tmp_path / "whole")
    assert same_files(tmp_path / "joined", tmp_path / "whole")


def same_files(one: Path, other: Path) -> bool:
    """Return whether directories have the same files, but for manifests, which say what they were made of."""
    names = {path.name for path in one.iterdir()} - {"ckptkit.json"}
    assert names == {path.name for path in other.iterdir()} - {"ckptkit.json"}
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in names)


def test_what_a_missing_rank_is_said(produce: Produce, tmp_path: Path) -> None:
    first, second = split_into_files(produce(producers.fsdp2).root, tmp_path)
    for place in (first, second):
        with pytest.raises(Corrupt) as caught:
            _ = Checkpoint.open(place).layout
        assert "--also" in str(caught.value.hint)


def test_shares_of_the_work(produce: Produce, tmp_path: Path) -> None:
    source = produce(producers.fsdp2).root
    first, second = split_into_files(source, tmp_path)
    ckptkit.reshard(source, tmp_path / "whole", to=2)
    for part in ("1/2", "2/2"):
        ckptkit.reshard(Checkpoint.open(first, second), tmp_path / "joined", to=2, part=part)
    ckptkit.finalize(tmp_path / "joined")
    assert same_files(tmp_path / "joined", tmp_path / "whole")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_from_python(produce: Produce, tmp_path: Path) -> None:
    made = produce(producers.fsdp2)
    first, second = split_into_files(made.root, tmp_path)
    opened = ckptkit.open(second, also=first)
    assert all(torch.equal(opened[name].torch(), one) for name, one in made.truth.items() if name in opened)
    model = {name: torch.ones_like(one) for name, one in of_a_model(made.truth).items()}
    dcp.load({"model": model}, storage_reader=Reader(first, [second]))
    assert all(torch.equal(model[name], one) for name, one in of_a_model(made.truth).items())


def run(*words: object) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


def test_on_the_command_line(produce: Produce, tmp_path: Path) -> None:
    source = produce(producers.fsdp2).root
    first, second = split_into_files(source, tmp_path)
    also = ("--also", second)
    assert run("verify", first, *also).exit_code == 0
    assert run("inspect", first, *also, "--chunks").exit_code == 0
    assert run("stats", first, *also).exit_code == 0
    assert run("diff", first, source, *also).exit_code == 0
    assert run("consolidate", first.parent, tmp_path / "hf", "--also", second.parent).exit_code == 0  # two runs
    assert run("convert", second, tmp_path / "state.pt", "--to", "pt", "--also", first).exit_code == 0
    assert run("reshard", first, tmp_path / "five", "--to", 5, *also).exit_code == 0
    assert ckptkit.diff(tmp_path / "five", source).is_equal
    assert ckptkit.diff(tmp_path / "state.pt", source).is_equal
    assert isinstance(run("verify", first, source, *also).exception, Usage)


def test_a_copy_is_one_directory(produce: Produce, tmp_path: Path) -> None:
    source = produce(producers.fsdp2).root
    first, second = split_into_files(source, tmp_path)
    copied = run("cp", first.parent, tmp_path / "whole", "--also", second.parent)  # two runs
    assert copied.exit_code == 0, copied.output
    assert {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()} == {
        path.name: path.read_bytes() for path in source.iterdir()
    }
    for inside in (first / "copy", second / "copy"):
        assert isinstance(run("cp", second, inside, "--also", first).exception, Unsafe)
    (second / "__1_0.distcp").unlink()
    assert isinstance(run("cp", first, tmp_path / "less", "--also", second).exception, CkptError)
    assert not (tmp_path / "less").exists()


def test_a_run_on_two_disks(produce: Produce, tmp_path: Path) -> None:
    source = produce(producers.fsdp2).root
    (_, there), (first, second) = (split_into_files(source, tmp_path, f"ckpt-{step}") for step in (400, 500))
    (listed, latest) = ckptkit.ls(join_directories(first.parent, second.parent)).checkpoints
    assert (listed.nbytes, latest.path.name, latest.world_size) == (size(source), "ckpt-500", 3)
    assert run("report", first.parent, "--also", second.parent, "--fast").exit_code == 0
    assert (first.parent / "report.html").is_file()
    means = run("average", second.parent, tmp_path / "mean", "--last", 2, "--also", first.parent)
    assert means.exit_code == 0
    prune = ("prune", second.parent, "--also", first.parent, "--keep-last", 1)
    (first.parent / "latest").write_text("ckpt-400")  # keeps it on the other disk too
    assert "every checkpoint stays" in run(*prune, "--yes").stdout
    (first.parent / "latest").unlink()
    assert "demoted" in str(run(*prune, "--demote").exception)
    assert "deleted 1 checkpoint" in run(*prune, "--yes").stdout
    assert [path.name for place in (first, second) for path in place.parent.glob("*ckpt-*")] == ["ckpt-500"] * 2
    assert not there.exists()


def test_what_is_not_whole_on_all_disks_is_not_pruned(produce: Produce, tmp_path: Path) -> None:
    source = produce(producers.fsdp2).root
    (_, there), (first, _) = (split_into_files(source, tmp_path, f"ckpt-{step}") for step in (400, 500))
    (there / "__1_0.distcp").unlink()
    done = ckptkit.prune(join_directories(first.parent, there.parent), keep_last=1, yes=True)
    assert [entry.path.name for entry in done.other] == ["ckpt-400"]
    assert done.delete == ()


def size(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file() and path.name != "ckptkit.json")


def test_one_source_only(tmp_path: Path) -> None:
    for words in (("average", "a", "b"), ("merge", "base", "a", "b")):
        assert "also: expected one" in str(run(*words, tmp_path / "out", "--also", "c").exception)


def test_a_manifest_is_of_all(produce: Produce, tmp_path: Path) -> None:
    first, second = split_into_files(produce(producers.fsdp2).root, tmp_path)
    assert run("manifest", second, "--also", first).exit_code == 0
    assert (second / "ckptkit.json").exists()
    (verified,) = ckptkit.verify(Checkpoint.open(first, second))
    assert verified.is_ok
    assert verified.has_manifest
    with pytest.raises(Occupied):
        ckptkit.make_manifest(Checkpoint.open(first, second))
    ckptkit.make_manifest(Checkpoint.open(first, second), overwrite=True)
    data = second / "__1_0.distcp"
    data.write_bytes(data.read_bytes()[:-200] + bytes(200))
    (verified,) = ckptkit.verify(Checkpoint.open(first, second))
    assert not verified.is_ok


# -- what does not belong together -------------------------------------------------------------------------------------


def test_the_same_twice_is_no_harm(produce: Produce, tmp_path: Path) -> None:
    source = produce(producers.fsdp2).root
    first, second = split_into_files(source, tmp_path)
    shutil.copytree(source, tmp_path / "all")
    found = Checkpoint.open(first, [second, tmp_path / "all", first])
    assert ckptkit.diff(found, source).is_equal


def test_other_steps_by_name(produce: Produce, tmp_path: Path) -> None:
    first, second = split_into_files(produce(producers.fsdp2).root, tmp_path)
    other = second.rename(second.with_name("ckpt-400"))
    with pytest.raises(Corrupt, match=r"expected step 500 .*, found step 400"):
        Checkpoint.open(first, other)
    (tmp_path / "global_step_7").mkdir()
    inside = Path(shutil.move(other, tmp_path / "global_step_7" / "actor"))
    with pytest.raises(Corrupt, match=r"expected step 500 .*, found step 7"):
        Checkpoint.open(first, inside)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_other_saves_by_what_both_have(name: str, produce: Produce, tmp_path: Path) -> None:
    first, second = split_into_files(produce(producers.fsdp2).root, tmp_path)
    content = bytearray((first / name).read_bytes())
    content[-1 if name == ".metadata" else 700] ^= 1
    (second / name).write_bytes(content)
    found = Checkpoint.open(first, second)
    (verified,) = ckptkit.verify(found)
    assert [problem.path for problem in verified.problems] == [first / name]
    assert "other bytes" in verified.problems[0].message
    with pytest.raises(Corrupt, match="differs: other bytes"):
        ckptkit.consolidate(found, tmp_path / "out")
    (second / name).write_bytes(content + b"more")
    with pytest.raises(Corrupt, match="differs: "):
        ckptkit.consolidate(found, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_files_of_another_number_of_ranks(produce: Produce, tmp_path: Path) -> None:
    source = produce(produced_unused.unused).root / "ranks"
    first, second = split_into_files(source, tmp_path)
    ckptkit.reshard(source, tmp_path / "four", to=4)
    shutil.copy(tmp_path / "four" / "model_world_size_4_rank_1.pt", second)
    with pytest.raises(Corrupt, match="files of runs with 2 and 4 ranks"):
        _ = Checkpoint.open(first, second).layout


def test_what_is_no_directory(produce: Produce, tmp_path: Path) -> None:
    first, _ = split_into_files(produce(producers.fsdp2).root, tmp_path)
    for other in (tmp_path / "absent", first / ".metadata"):
        with pytest.raises(Usage):
            join_directories(first, [other])


def test_no_result_takes_the_place_of_one_of_them(produce: Produce, tmp_path: Path) -> None:
    first, second = split_into_files(produce(producers.fsdp2).root, tmp_path)
    found = Checkpoint.open(first, second)
    for place in (first, second, second.parent):
        with pytest.raises(Unsafe):
            ckptkit.consolidate(found, place, overwrite=True)
    with pytest.raises(Unsafe):
        ckptkit.reshard(found, second, to=2, overwrite=True)

"""Copies of one tensor that ranks saved: equal ones are one tensor, different ones never."""

from __future__ import annotations

import json
import shutil
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import ckptkit
from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.checkpoints.salvage_account import NAME as ACCOUNT
from ckptkit.errors import Corrupt
from ckptkit.storage import Reader
from ckptkit.training.launch import RankPlace, Report, launch, process_group
from tests.producers import counted
from tests.storage.states import flip

STEPS = ("equal", "different")
FORMATS = ("dcp", "ranks")


def save_all(root: Path, place: RankPlace, report: Report) -> None:
    """Save HSDP's shards in both formats with and without CRC-32; in half of them one rank is out of step."""
    warnings.simplefilter("ignore")
    with process_group(place, "cpu"):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
        for step in STEPS:
            for has_sums in (True, False):
                torch.serialization.set_crc32_options(has_sums)
                model = make_model(mesh, is_behind=step == "different" and place.rank == 3)
                name = f"{step}-{has_sums}"
                (root / "ranks" / name).mkdir(parents=True, exist_ok=True)
                torch.save(model, root / "ranks" / name / f"model_world_size_4_rank_{place.rank}.pt")
                own = {"rng": torch.full((4,), place.rank, dtype=torch.uint8), "loader": {"at": place.rank, "epoch": 1}}
                norm = {"running_mean": torch.full((2,), float(place.rank))}
                state = {"model": model | norm, **own}
                dcp.save(state, storage_writer=FileSystemWriter(root / "dcp" / name), use_collectives=False)
        plain = {"model": {"weight": counted(2, 2), "bias": torch.full((2,), float(place.rank))}}
        dcp.save(plain, storage_writer=FileSystemWriter(root / "plain"), use_collectives=False)
        report(load_all(root / "dcp" / "equal-True", mesh, place.rank))


def make_model(mesh: Any, *, is_behind: bool = False) -> dict[str, Any]:
    """A weight whose last shard is shorter, so that its tensor is a part of a storage, and a replicated bias."""
    weight: DTensor = distribute_tensor(counted(5, 3), mesh, [Replicate(), Shard(0)])
    if is_behind:
        weight.to_local()[0, 0] += 1
    return {"weight": weight, "bias": torch.ones(2)}


def load_all(path: Path, mesh: Any, rank: int) -> tuple[int, list[Any]]:
    """What a rank gets by torch's reader, and by ours."""
    got: list[Any] = []
    for reader in (FileSystemReader(path), Reader(path)):
        weight = distribute_tensor(torch.zeros(5, 3), mesh, [Replicate(), Shard(0)])
        model = {"weight": weight, "bias": torch.zeros(2), "running_mean": torch.zeros(2)}
        own: dict[str, Any] = {"rng": torch.zeros(4, dtype=torch.uint8), "loader": {"at": -1, "epoch": 0}}
        dcp.load({"model": model, **own}, storage_reader=reader)
        whole = torch.equal(weight.full_tensor(), counted(5, 3))
        got.append((whole, own["rng"].tolist(), own["loader"], *(model[n].tolist() for n in ("running_mean", "bias"))))
    return rank, got


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, list[Any]]]:
    root = tmp_path_factory.mktemp("replicas")
    heard: list[tuple[int, list[Any]]] = []
    launch(partial(save_all, root), 4, heard.append)
    return root, dict(heard)


@pytest.mark.parametrize("has_sums", [True, False])
@pytest.mark.parametrize("kind", FORMATS)
def test_copies_that_differ_are_no_tensor(made: tuple[Path, Any], tmp_path: Path, kind: str, has_sums: bool) -> None:
    equal, different = (made[0] / kind / f"{step}-{has_sums}" for step in STEPS)
    assert ckptkit.verify(equal)[0].is_ok
    assert ckptkit.open(equal)["model.weight"].shape == (5, 3)
    with pytest.raises(Corrupt, match=r"the replica in `.*3.*` at \[3, 0\]") as caught:
        _ = Checkpoint.open(different).layout
    assert caught.value.tensor == "model.weight"
    assert "rank_1" in str(caught.value.path) or "__1_0" in str(caught.value.path)
    (problem,) = ckptkit.verify(different)[0].problems
    assert problem.line == caught.value.line
    can_tell = has_sums and kind == "dcp"  # elsewhere the shard is a part of a storage, whose CRC-32 does not tell
    assert ckptkit.verify(different, fast=True)[0].is_ok == (not can_tell)
    with pytest.raises(CheckpointException), warnings.catch_warnings(action="ignore"):
        dcp.load({"model": {"weight": torch.zeros(5, 3)}}, storage_reader=Reader(different))


@pytest.mark.parametrize("kind", FORMATS)
def test_salvage_writes_one_of_the_copies_and_says_so(made: tuple[Path, Any], tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    ckptkit.consolidate(made[0] / kind / "different-True", out, salvage=True)
    (lost,) = json.loads((out / ACCOUNT).read_text())["lost"]
    assert lost["name"] == "model.weight"
    assert "has other bytes" in lost["why"]
    assert torch.equal(ckptkit.open(out)["weight"].torch(), counted(5, 3))


def test_damage_in_a_copy_is_found(made: tuple[Path, Any], tmp_path: Path) -> None:
    root = Path(shutil.copytree(made[0] / "dcp" / "equal-True", tmp_path / "checkpoint"))
    data = (root / "__3_0.distcp").read_bytes()
    flip(root / "__3_0.distcp", data.index(counted(5, 3)[3:].numpy().tobytes()))
    (problem,) = ckptkit.verify(root)[0].problems
    assert problem.path == root / "__3_0.distcp"
    assert problem.tensor == "model.weight"


def test_copies_stay_with_a_checkpoint_of_several_directories(made: tuple[Path, Any], tmp_path: Path) -> None:
    for place in ("model", "optimizer"):
        shutil.copytree(made[0] / "dcp" / "equal-True", tmp_path / place)
    alone = Checkpoint.open(tmp_path / "model").layout
    joined = Checkpoint.open(tmp_path).layout
    assert alone.spares
    assert joined.spares.keys() == {name for own in alone.spares for name in (own, f"optimizer.{own}")}
    assert {chunk.path for _, chunk in joined.replica_chunks} == {
        f"{place}/{chunk.path}" for place in ("model", "optimizer") for _, chunk in alone.replica_chunks
    }


# -- saved without talking to each other -------------------------------------------------------------------------------


def test_each_rank_reads_what_it_saved_as_with_torch(made: tuple[Path, dict[int, list[Any]]]) -> None:
    for rank, (by_torch, by_us) in made[1].items():
        assert by_us == by_torch
        assert by_us == (True, [rank] * 4, {"at": rank, "epoch": 1}, [float(rank)] * 2, [1.0, 1.0])


def test_what_differs_between_ranks_stays_apart(made: tuple[Path, Any], tmp_path: Path) -> None:
    root = made[0] / "dcp" / "equal-True"
    layout = Checkpoint.open(root).layout
    own = {f"own_state.rank_{rank}.{name}" for rank in range(4) for name in ("rng", "loader.at", "model.running_mean")}
    assert set(layout.names) == {*own, "model.weight", "model.bias", "model.running_mean", "loader.epoch"}
    done = ckptkit.reshard(root, tmp_path / "4", to=4)
    assert "12 entries differ between ranks: each rank has its own under `own_state.rank_N`" in done.notes
    again = Checkpoint.open(tmp_path / "4").layout
    assert set(again.names) == set(layout.names)
    assert ckptkit.open(tmp_path / "4")["own_state.rank_2.rng"].torch().tolist() == [2] * 4
    done = ckptkit.reshard(root, tmp_path / "2", to=2)
    assert any(note.startswith("dropped `own_state` (") and "state of 4 ranks" in note for note in done.notes)


def test_weights_that_differ_between_ranks_are_no_model(made: tuple[Path, Any], tmp_path: Path) -> None:
    root = Path(shutil.copytree(made[0] / "plain", tmp_path / "checkpoint"))
    with pytest.raises(Corrupt, match="the ranks saved different values") as caught:
        ckptkit.consolidate(root, tmp_path / "out")
    assert caught.value.tensor == "model.bias"
    assert not (tmp_path / "out").exists()
    for rank in range(1, 4):
        (root / f"__{rank}.metadata").unlink()
    ckptkit.consolidate(root, tmp_path / "out")
    assert ckptkit.open(tmp_path / "out")["bias"].torch().tolist() == [0.0, 0.0]

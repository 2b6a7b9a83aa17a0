"""State of single ranks: kept for as many ranks as there were, else dropped and said; never passed on in silence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckptkit import convert, reshard
from ckptkit.state.draft_checkpoint import rank_files_of_other_world_size
from tests.faults.meaning_sources import FORMATS
from tests.producers import counted, save_alone, spawn
from tests.test_matrix import load_dcp


def save_titan(root: Path, loaders: int, world_size: int) -> Path:
    """A checkpoint like torchtitan's: a loader's state for each of the data-parallel ranks, and how many there were."""
    spawn(world_size, _save_titan, root, loaders)
    return root


def _save_titan(root: Path, loaders: int) -> None:
    rank = torch.distributed.get_rank()
    loader = {f"dp_rank_{rank}": bytes([rank]) * 9, "world_size": loaders} if rank < loaders else {}
    dcp.save({"w": counted(7), "dataloader": loader, "train_state": 3}, checkpoint_id=root)


def test_loaders_of_torchtitan(tmp_path: Path) -> None:
    source = save_titan(tmp_path / "in", 2, 2)
    done = reshard(source, tmp_path / "same", to=2)
    assert load_dcp(tmp_path / "same") == load_dcp(source) | {"w": pytest.approx(counted(7))}
    assert (done.dropped, done.notes) == ([], [])
    done = reshard(source, tmp_path / "other", to=3)
    assert load_dcp(tmp_path / "other").keys() == {"w", "train_state"}
    assert done.notes == ["dropped `dataloader`: state of 2 ranks, which 3 cannot use"]
    assert [(left.name, left.entries) for left in done.dropped] == [("dataloader", 3)]


def test_fewer_loaders_than_ranks(tmp_path: Path) -> None:
    """As with tensor parallelism: they are kept for as many ranks as there were, and for as many loaders."""
    source = save_titan(tmp_path / "in", 2, 3)
    for size, is_kept in ((3, True), (2, True), (4, False)):
        reshard(source, tmp_path / str(size), to=size)
        assert ("dataloader" in load_dcp(tmp_path / str(size))) == is_kept


def test_generators_of_composer(tmp_path: Path) -> None:
    seeds = [{"torch": counted(5, dtype=torch.uint8), "python": (3, (1, 2), None)} for _ in range(3)]
    state: dict[str, Any] = {"state": {"model": {"w": counted(7)}}, "rng": seeds}
    save_alone(state, tmp_path / "in")
    reshard(tmp_path / "in", tmp_path / "same", to=3)
    assert len(load_dcp(tmp_path / "same")["rng"]) == 3
    done = reshard(tmp_path / "in", tmp_path / "other", to=2)
    assert len(load_dcp(tmp_path / "other")["rng"]) == 3  # Composer counts them, and needs at least one
    assert done.notes == []


def test_what_each_rank_had_of_its_own_is_named(tmp_path: Path) -> None:
    FORMATS["megatron"].make(tmp_path / "in", {"disc": {"w": counted(7)}, "sampler": {"seen": counted(3)}})
    done = reshard(tmp_path / "in", tmp_path / "out", to=3)
    assert done.notes == ["dropped `rank_state` (disc, sampler): state of 2 ranks, which 3 cannot use"]


def test_a_generator_of_all_ranks_is_kept(tmp_path: Path) -> None:
    save_alone({"model": {"w": counted(7)}, "rng": {"torch": counted(5, dtype=torch.uint8)}}, tmp_path / "in")
    done = reshard(tmp_path / "in", tmp_path / "out", to=4)
    assert "torch" in load_dcp(tmp_path / "out")["rng"]
    assert done.notes == []


def test_files_of_ranks(tmp_path: Path) -> None:
    source = save_titan(tmp_path / "in", 0, 2)
    names = {"rng_state_0.pth", "rng_state_1.pth", "scheduler.pt", "trainer_state.json"}
    for name in names:
        (source / name).write_text(name)

    def beside(root: Path) -> set[str]:
        return {path.name for path in root.iterdir()} - {".metadata", "ckptkit.json"} - set(data)

    data = [f"__{rank}_0.distcp" for rank in range(3)]
    reshard(source, tmp_path / "same", to=2)
    assert beside(tmp_path / "same") == names
    done = reshard(source, tmp_path / "other", to=3)
    assert beside(tmp_path / "other") == {"scheduler.pt", "trainer_state.json"}
    assert done.notes == ["skipped `rng_state_0.pth` and similar files: state of 2 ranks, which 3 cannot use"]
    assert not done.files.keys() & {"rng_state_0.pth", "rng_state_1.pth"}


def test_one_file_is_for_any_number_of_ranks(tmp_path: Path) -> None:
    source = save_titan(tmp_path / "in", 2, 2)
    (source / "rng_state_0.pth").touch()
    (source / "rng_state_2.pth").touch()
    done = convert(source, tmp_path / "pt", to="pt")
    assert {path.name for path in (tmp_path / "pt").glob("rng*")} == {"rng_state_0.pth", "rng_state_2.pth"}
    assert (done.notes, done.dropped) == ([], [])
    done = convert(tmp_path / "pt", tmp_path / "back", to="dcp", world_size=4)
    assert load_dcp(tmp_path / "back").keys() == {"w", "train_state"}
    assert len(done.notes) == 2


@pytest.mark.parametrize("pattern", ["rng_state_{}.pth", "random_states_{}.pkl"])
def test_what_files_are_called(pattern: str) -> None:
    names = [pattern.format(rank) for rank in range(4)]
    assert rank_files_of_other_world_size([*names, "scheduler.pt"], 3)[0] == set(names)
    assert rank_files_of_other_world_size([*names, "scheduler.pt"], 4) == (set(), [])
    assert rank_files_of_other_world_size(["rng_state.pth", "x_rng_state_0.pth", "rng_state_0.pth.bak"], 9) == (
        set(),
        [],
    )

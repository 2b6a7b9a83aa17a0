"""Checkpoints of torch_checkpointing that ckptkit writes, loaded by the package itself on other numbers of ranks."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.checks.diff import diff
from ckptkit.checks.verify import verify
from ckptkit.conversion.convert import convert, reshard
from ckptkit.errors import Unsupported
from tests.conftest import Produce
from tests.producers import spawn
from tests.trainers import produced_packages as produced
from tests.trainers.produced_ranks import adamw, sharded, train, truth_of

pytest.importorskip("torch_checkpointing", reason="torch_checkpointing is not installed")


def _load(path: Path, truth: Path) -> None:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
    from torch_checkpointing import CheckpointManager, ItemSpec
    from torch_checkpointing.config import SyncCheckpointSaverConfig
    from torch_checkpointing.default_resharder import DefaultResharder

    os.O_DIRECT = 0  # type: ignore[misc]  # tiny files fail under O_DIRECT
    model = sharded()
    optimizer = adamw(model)
    train(model, optimizer)
    states: Any = get_optimizer_state_dict(model, optimizer)["state"]
    with torch.no_grad():
        for tensor in (*model.state_dict().values(), *(one for state in states.values() for one in state.values())):
            tensor.zero_()
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer), "step": 0}
    items = {name: ItemSpec(resharder=DefaultResharder()) for name in ("model", "optimizer")}
    manager = CheckpointManager(CheckpointManager.Config(save=SyncCheckpointSaverConfig(), items=items))
    loaded = manager.load(str(path), state, strict=True)
    assert loaded["step"] == 3
    assert loaded["optimizer"]["param_groups"][0]["lr"] == pytest.approx(0.01)
    found = truth_of("any", model, optimizer)
    whole = {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in found.items()}
    if dist.get_rank() == 0:
        expected = torch.load(truth)
        assert whole.keys() == expected.keys()
        assert [name for name, one in expected.items() if not torch.equal(whole[name], one)] == []


@pytest.mark.slow
def test_its_own_loader_reads_them_on_other_ranks(produce: Produce, tmp_path: Path) -> None:
    """On 3 ranks one of them has no row of the smallest tensors."""
    made = produce(produced.by_torch_checkpointing)
    torch.save(made.truth, tmp_path / "truth.pt")
    reshard(made.root / "torch", tmp_path / "three", to=3)
    for ranks in (1, 2, 3):
        spawn(ranks, _load, tmp_path / "three", tmp_path / "truth.pt")


def test_files_are_those_of_the_package(produce: Produce, tmp_path: Path) -> None:
    made = produce(produced.by_torch_checkpointing)
    reshard(made.root / "torch", tmp_path / "same", to=2)
    names = {path.name for path in (made.root / "torch").iterdir()}
    assert {path.name for path in (tmp_path / "same").iterdir()} == {*names, "ckptkit.json"}
    assert diff(made.root / "torch", tmp_path / "same").is_equal
    assert all(part.is_ok for part in verify(tmp_path / "same"))


def test_from_dcp_and_back(produce: Produce, tmp_path: Path) -> None:
    made = produce(produced.by_torch_checkpointing)
    convert(made.root / "safetensors", tmp_path / "dcp", to="dcp")
    convert(tmp_path / "dcp", tmp_path / "back", to="torch_checkpointing", world_size=4)
    assert Checkpoint.open(tmp_path / "back").world_size == 4
    assert diff(tmp_path / "dcp", tmp_path / "back").is_equal


def test_a_name_that_is_a_path_is_refused(tmp_path: Path) -> None:
    torch.save({"a/b": torch.ones(2)}, tmp_path / "state.pt")
    with pytest.raises(Unsupported, match="`a/b` has no file name in this format"):
        convert(tmp_path / "state.pt", tmp_path / "out", to="torch_checkpointing")
    assert not (tmp_path / "out").exists()


def test_a_file_lost_from_the_output_is_noticed(produce: Produce, tmp_path: Path) -> None:
    made = produce(produced.by_torch_checkpointing)
    reshard(made.root / "torch", tmp_path / "three", to=3)
    shutil.move(tmp_path / "three/optimizer_2.pt", tmp_path)
    assert not Checkpoint.at(tmp_path / "three").is_complete

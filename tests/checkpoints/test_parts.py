"""Checkpoints in several directories, looked at as one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import ckptkit
from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.checks.stats import stats
from ckptkit.errors import Corrupt
from tests.producers import save_alone


def save(root: Path) -> dict[str, Tensor]:
    """A model with two optimizers that know a parameter by the same name; what there is, by the names of the whole."""
    weight, one, two = torch.arange(6.0), torch.full((6,), 0.5), torch.full((6,), 0.25)
    save_alone({"model": {"w": weight}}, root / "pytorch_model_fsdp_0")
    save_alone({"optimizer": {"state": {"w": one}, "lr": 0.1}}, root / "optimizer_0")
    save_alone({"optimizer": {"state": {"w": two}, "lr": 0.2}}, root / "optimizer_1")
    return {"model.w": weight, "optimizer.state.w": one, "optimizer_1.optimizer.state.w": two}


def test_names_that_two_parts_have_are_told_apart(tmp_path: Path) -> None:
    truth = save(tmp_path)
    opened = ckptkit.open(tmp_path)
    assert opened.path == tmp_path
    assert {name: lazy.torch().tolist() for name, lazy in opened.items()} == {n: t.tolist() for n, t in truth.items()}
    assert list(opened.select("optimizer_1.*")) == ["optimizer_1.optimizer.state.w"]
    layout = Checkpoint.open(tmp_path).layout
    assert set(layout.blobs) == {"optimizer.lr", "optimizer_1.optimizer.lr"}
    assert all((tmp_path / blob.path).is_file() for blob in layout.blobs.values())
    assert all((tmp_path / path).is_file() for path in layout.descriptions)


def test_statistics_are_of_all_parts(tmp_path: Path) -> None:
    truth = save(tmp_path)
    found = {tensor.name: tensor for tensor in stats(tmp_path).tensors}
    assert {name: one.moments.mean for name, one in found.items()} == {n: t.mean().item() for n, t in truth.items()}
    (chosen,) = stats(tmp_path, include=["optimizer_1.*"]).tensors
    assert chosen == found["optimizer_1.optimizer.state.w"]


def test_a_directory_of_that_name_is_no_part(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "notes.txt").write_text("mine")
    assert list(ckptkit.open(tmp_path)) == ["w"]
    assert [tensor.name for tensor in stats(tmp_path).tensors] == ["w"]
    found = ckptkit.inspect(tmp_path)
    assert (found.layout.names, found.unread) == (("w",), ())


def test_a_part_that_cannot_be_read_is_an_error_unless_asked_for(tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / "optimizer_1" / "__0_0.distcp").unlink()
    with pytest.raises(Corrupt, match="missing"):
        _ = Checkpoint.open(tmp_path).layout
    readable, unread = Checkpoint.open(tmp_path).with_readable_components()
    assert [part.place for part in readable.components] == ["pytorch_model_fsdp_0", "optimizer_0"]
    assert [fault.partition(":")[0] for fault in unread] == ["optimizer_1"]

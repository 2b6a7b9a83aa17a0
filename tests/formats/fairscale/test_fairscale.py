"""Shards of fairscale, held against the live state."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import ckptkit
from ckptkit.checkpoints.checkpoint import Checkpoint, open_layout
from ckptkit.errors import CkptError
from ckptkit.formats.archives.values import load_value
from tests.conftest import Produce
from tests.formats.ranks.test_ranks import assert_is
from tests.trainers import produced_packages as produced

pytest.importorskip("fairscale", reason="fairscale is not installed")


def test_holds_the_live_state(produce: Produce) -> None:
    made = produce(produced.by_fairscale)
    checkpoint = Checkpoint.open(made.root)
    assert (checkpoint.layout.format, checkpoint.world_size, checkpoint.problems()) == ("fairscale", 3, [])
    assert "num_updates" in checkpoint.layout.blobs
    assert_is(checkpoint.layout, made.truth)


def test_the_optimizer_is_named_and_goes_anywhere(produce: Produce, tmp_path: Path) -> None:
    root = produce(produced.by_fairscale).root
    layout = open_layout(root)
    names = load_value(root, layout.blobs["optimizer.param_groups.0.params"])
    assert {f"optimizer.state.{name}.step" for name in names} == {n for n in layout.tensors if n.endswith(".step")}
    ckptkit.convert(root, tmp_path / "out", to="dcp", world_size=2)
    assert ckptkit.diff(root, tmp_path / "out").is_equal


def test_steps_may_be_numbers_but_the_same_on_all_ranks(produce: Produce, tmp_path: Path) -> None:
    root = Path(shutil.copytree(produce(produced.by_fairscale).root, tmp_path / "there"))

    def set_steps(*steps: int) -> list[str]:
        for path, step in zip(sorted(root.iterdir()), steps, strict=True):
            state = torch.load(path, weights_only=False)
            for one in state["last_optimizer_state"]["state"].values():
                one["step"] = step
            torch.save(state, path)
        return [name for name in open_layout(root).names if name.startswith("optimizer.") and name.endswith(".step")]

    assert set_steps(1, 1, 1)
    assert not set_steps(1, 1, 2)


def test_numbers_that_do_not_fit_are_carried_as_they_are(produce: Produce, tmp_path: Path) -> None:
    root = Path(shutil.copytree(produce(produced.by_fairscale).root, tmp_path / "there"))
    for path in root.iterdir():
        state = torch.load(path, weights_only=False)
        first, second = (state["last_optimizer_state"]["state"].pop(i) for i in (0, 1))
        state["last_optimizer_state"]["state"] |= {0: second, 1: first}
        torch.save(state, path)
    layout = open_layout(root)
    assert {"own_state.rank_1.last_optimizer_state.state.0.exp_avg"} <= layout.tensors.keys()
    assert not any(name.startswith("optimizer.") for name in layout.names)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_missing_shard_is_never_overlooked(produce: Produce, tmp_path: Path, rank: int) -> None:
    root = Path(shutil.copytree(produce(produced.by_fairscale).root, tmp_path / "there"))
    file = root / f"checkpoint_best-shard{rank}.pt"
    file.unlink()
    with pytest.raises(CkptError, match="the file is missing") as raised:
        open_layout(root)
    assert (raised.value.code, raised.value.path) == ("incomplete", file)


def test_shards_of_two_checkpoints_are_refused(produce: Produce, tmp_path: Path) -> None:
    root = Path(shutil.copytree(produce(produced.by_fairscale).root, tmp_path / "there"))
    shutil.copy(root / "checkpoint_best-shard0.pt", root / "checkpoint_last-shard0.pt")
    with pytest.raises(CkptError, match="expected shards of one checkpoint, found 2"):
        open_layout(root)

"""VeOmni: DCP with the states of all ranks in a directory, made with torch as its dcp_checkpointer.py does it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint as dcp

import ckptkit

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def save(root: Path) -> None:
    weight = torch.arange(8.0).reshape(4, 2)
    state = {
        "model": {"a.weight": weight},
        "optimizer": {"state.a.weight.exp_avg": weight, "param_groups.a.weight.lr": 1},
    }
    dcp.save(state, checkpoint_id=root)
    (root / "extra_state").mkdir()
    for rank in range(2):
        torch.save({"global_step": 4}, root / "extra_state" / f"extra_state_rank_{rank}.pt")


def test_the_states_of_ranks_are_known_and_kept(tmp_path: Path) -> None:
    root = tmp_path / "global_step_4"
    save(root)
    found = ckptkit.inspect(root)
    assert (found.trainer, found.step) == ("VeOmni", 4)
    assert {left.name for left in found.left_behind if left.is_expected} == {"extra_state"}
    done = ckptkit.reshard(root, tmp_path / "global_step_5", to=1)
    assert {"extra_state/extra_state_rank_0.pt", "extra_state/extra_state_rank_1.pt"} <= done.files.keys()

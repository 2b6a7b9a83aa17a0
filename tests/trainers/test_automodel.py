"""NeMo Automodel: model and optimizer apart, files of ranks beside them, and the mark of an unfinished save."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
)

import ckptkit
from ckptkit.errors import Incomplete
from ckptkit.runs.ls import ls
from tests.trainers.produced_lightning import Net

pytestmark = pytest.mark.filterwarnings("ignore:.*single process")


def save(place: Path) -> dict[str, Tensor]:
    """A step as `save_checkpoint` of recipes/base_recipe.py leaves it, by one rank; the export has other numbers."""
    torch.manual_seed(6)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    weights: dict[str, Tensor] = model.state_dict()
    writer = HuggingFaceStorageWriter(
        str(place / "model"), fqn_to_index_mapping=dict.fromkeys(weights, 1), save_distributed=True
    )
    dcp.save(weights, storage_writer=writer)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    states = get_optimizer_state_dict(model, optimizer, options=options)
    dcp.save({"optim": states, "sched": {"num_steps": 3}}, checkpoint_id=place / "optim")
    for folder in ("model/.hf_metadata", "model/consolidated", "dataloader", "rng"):
        (place / folder).mkdir()
    (place / "model" / ".hf_metadata" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (place / "model" / "consolidate.sh").write_text("exit")
    save_file({name: tensor + 1 for name, tensor in weights.items()}, place / "model/consolidated/model.safetensors")
    torch.save({"rows": 0}, place / "dataloader" / "dataloader_dp_rank_0.pt")
    torch.save({"torch": torch.get_rng_state()}, place / "rng" / "rng_global_rank_0.pt")
    torch.save({"step": 20, "epoch": 0}, place / "step_scheduler.pt")
    (place / "config.yaml").write_text("seed: 1")
    (place / "losses.json").write_text(json.dumps({"train_loss": 1.5}))
    return {name: tensor.clone() for name, tensor in weights.items()}


def test_model_and_optimizer_are_found(tmp_path: Path) -> None:
    weights = save(tmp_path / "run" / "epoch_0_step_20")
    found = ckptkit.inspect(tmp_path / "run")
    assert (found.trainer, found.step, found.optimizer_keys) == ("NeMo Automodel", 20, "names")
    assert (found.groups["model"].entries, found.unread) == (len(weights), ())
    done = ckptkit.consolidate(tmp_path / "run", tmp_path / "hf")
    assert {name: lazy.torch().tolist() for name, lazy in ckptkit.open(tmp_path / "hf").items()} == {
        name: tensor.tolist() for name, tensor in weights.items()
    }
    assert (tmp_path / "hf" / "config.json").is_file()
    assert "model/consolidated/model.safetensors" in {left.name for left in done.left_behind if left.is_expected}
    done = ckptkit.reshard(tmp_path / "run", tmp_path / "epoch_0_step_20", to=2)
    of_rank = {"dataloader/dataloader_dp_rank_0.pt", "rng/rng_global_rank_0.pt"}  # without them it does not resume
    assert {"optim/.metadata", "step_scheduler.pt", *of_rank} <= done.files.keys()
    assert not done.left_behind
    assert len(ckptkit.open(tmp_path / "epoch_0_step_20")) == len(ckptkit.open(tmp_path / "run"))


@pytest.mark.parametrize("place", ["epoch_0_step_20", "epoch_0_step_20/model", "renamed"])
def test_an_unfinished_one_is_refused(tmp_path: Path, place: str) -> None:
    root = tmp_path / place.partition("/")[0]
    save(root)
    (root / ".incomplete").touch()
    assert [one.is_complete for one in ls(root).checkpoints] == [False]
    with pytest.raises(Incomplete, match=r"its trainer left the file `\.incomplete`"):
        ckptkit.inspect(tmp_path / place)
    assert not all(part.is_ok for part in ckptkit.verify(tmp_path / place))

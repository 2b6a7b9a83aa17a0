"""What a directory is, is decided by its content: components under any names, dot files, files of states."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import ckptkit
from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.errors import Unsupported, Usage

WEIGHT = torch.arange(32.0).reshape(8, 4)
STATE = {"net.q.weight": {"exp_avg": WEIGHT * 2, "step": torch.tensor(3.0)}}
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
COMPONENTS: dict[str, dict[str, object]] = {
    "model": {"net.q.weight": WEIGHT},
    "optim": {"optim": {"state": STATE, "param_groups": [{"lr": 0.1, "params": ["net.q.weight"]}]}},
    "scheduler": {"scheduler": {"last_epoch": 5}},
}
BESIDE: dict[str, dict[str, object]] = {
    "trainer": {"grad_scaler": {"scale": 1.0}, "iteration": 200},  # Cosmos; prime-rl calls its whole checkpoint so
    "state": {"rng_state": torch.zeros(16, dtype=torch.uint8), "step": torch.tensor(3)},
    "loader": {"epoch": 1, "position": 4},
}


def save(state: dict[str, object], place: Path) -> None:
    place.mkdir(parents=True)
    dcp.save(state, checkpoint_id=str(place), no_dist=True)


def lay(step: Path, more: str) -> Path:
    for name, state in {**COMPONENTS, more: BESIDE[more]}.items():
        save(state, step / name)
    return step


def load(place: Path) -> torch.Tensor:
    found = {"net.q.weight": torch.zeros(8, 4)}
    dcp.load(found, checkpoint_id=str(place), no_dist=True)
    return found["net.q.weight"]


@pytest.mark.parametrize("more", BESIDE)
def test_directories_of_one_step_are_one_checkpoint(tmp_path: Path, more: str) -> None:
    step = lay(tmp_path / "iter_000000200", more)
    assert {part.place for part in Checkpoint.open(step).components} == {*COMPONENTS, more}
    ckptkit.reshard(step, tmp_path / "reshard", to=2)
    ckptkit.cp(step, tmp_path / "cp")
    for copy in ("reshard", "cp"):
        assert torch.equal(load(tmp_path / copy / "model"), WEIGHT)
        assert (tmp_path / copy / more / ".metadata").exists()
    ckptkit.consolidate(step, tmp_path / "hf", names="keep")
    assert torch.equal(load_file(tmp_path / "hf" / "model.safetensors")["net.q.weight"], WEIGHT)
    with pytest.raises(Usage, match="the checkpoint has 4 parts"):
        ckptkit.convert(step, tmp_path / "one.pt", to="pt")


@pytest.mark.parametrize("name", ["trainer", "global_step200"])
def test_a_directory_with_all_is_the_checkpoint_whatever_lies_beside(tmp_path: Path, name: str) -> None:
    step = tmp_path / "step_200"
    save({"app": {"model": {"net.q.weight": WEIGHT}, "progress": {"step": 200}}}, step / name)
    (step / "hf").mkdir()
    save_file({"net.q.weight": WEIGHT + 1}, step / "hf" / "model.safetensors")
    (step / "orchestrator").mkdir()
    torch.save({"step": 200}, step / "orchestrator" / "progress.pt")
    (part,) = Checkpoint.open(step).components
    assert part.place == name
    assert part.has_all
    ckptkit.convert(step, tmp_path / "one.pt", to="pt")
    saved = torch.load(tmp_path / "one.pt", weights_only=True)
    assert torch.equal(saved["app"]["model"]["net.q.weight"], WEIGHT)


def test_two_models_of_one_step_are_refused(tmp_path: Path) -> None:
    step = lay(tmp_path / "step_200", "trainer")
    save({"critic.weight": WEIGHT}, step / "critic")
    with pytest.raises(Unsupported, match="several checkpoints are in this directory: critic, model"):
        ckptkit.consolidate(step, tmp_path / "hf")


@pytest.mark.parametrize("name", ["quantizers", ".quantizers"])
def test_files_that_make_their_neighbors_readable_are_copied_or_named(tmp_path: Path, name: str) -> None:
    step = tmp_path / "step-200"
    save({"model": {"net.q.weight": WEIGHT}}, step)
    save({"amax": WEIGHT}, step / name)
    copied = ckptkit.cp(step, tmp_path / "cp")
    made = ckptkit.reshard(step, tmp_path / "reshard", to=2)
    for output, left in ((tmp_path / "cp", copied.left_behind), (tmp_path / "reshard", made.left_behind)):
        there = {file.name for file in (output / name).iterdir()} if (output / name).exists() else set()
        assert there in (set(), {".metadata", "__0_0.distcp"})
        assert there or any(one.name == name for one in left)


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_files_of_states_are_entries_beside_the_model(tmp_path: Path, suffix: str) -> None:
    step = tmp_path / "run" / "010000"
    (step / "pretrained_model").mkdir(parents=True)
    (step / "training_state").mkdir()
    save_file({"w": WEIGHT}, step / "pretrained_model" / "model.safetensors")
    states = {"optimizer_state": {"state/0/exp_avg": WEIGHT}, "rng_state": {"torch_rng_state": torch.zeros(9)}}
    for name, state in states.items():
        file = step / "training_state" / f"{name}.{suffix}"
        save_file(state, file) if suffix == "safetensors" else torch.save(state, file)
    (step / "training_state" / "training_step.json").write_text(json.dumps({"step": 10000}))
    (listed,) = ckptkit.ls(step.parent).checkpoints
    assert listed.is_complete
    assert listed.problem is None
    ckptkit.cp(step, tmp_path / "cp")
    ckptkit.convert(step, tmp_path / "pt", to="pt")
    state = torch.load(next((tmp_path / "pt").rglob("state.pt")), weights_only=True)
    assert torch.equal(state.get("model", state)["w"], WEIGHT)
    assert torch.equal(ckptkit.open(step)["w"].torch(), WEIGHT)

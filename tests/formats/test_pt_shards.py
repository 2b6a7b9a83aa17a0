"""Several files of torch.save with an index: a model as transformers saves it, an optimizer as ColossalAI does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import ckptkit
from ckptkit.checkpoints.checkpoint import open_layout
from ckptkit.errors import CkptError
from tests.formats.contract import assert_holds

INDEX = "pytorch_model.bin.index.json"


def model() -> dict[str, Tensor]:
    return {f"{i}.weight": torch.randn(3, 4 + i) for i in range(4)}


def save_files(root: Path, state: dict[str, Tensor]) -> Path:
    root.mkdir(parents=True)
    places = {name: f"pytorch_model-{i // 2 + 1:05d}-of-00002.bin" for i, name in enumerate(state)}
    for file in set(places.values()):
        torch.save({name: state[name] for name in state if places[name] == file}, root / file)
    (root / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}))
    return root


def test_a_model_becomes_safetensors(tmp_path: Path) -> None:
    state = model()
    root = save_files(tmp_path / "m", state)
    assert_holds(open_layout(root), state)
    checkpoint = ckptkit.Checkpoint.open(root)
    assert (checkpoint.layout.format, checkpoint.problems()) == ("pt_shards", [])
    done = ckptkit.consolidate(root, tmp_path / "out")
    assert done.unchecked_bytes == 0
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
    (verified,) = ckptkit.verify(root)
    assert verified.is_ok


def test_an_optimizer_beside_a_model_gets_its_names(tmp_path: Path) -> None:
    """As `save_sharded_optimizer` lays it out: numbered states in several files, and the groups in one of their own."""
    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    optimizer = torch.optim.AdamW(network.parameters())
    network(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    root = tmp_path / "epoch-0_step-7"
    save_files(root / "modeling", network.state_dict())
    (root / "optimizer").mkdir()
    saved = optimizer.state_dict()
    places = {number: f"pytorch_optim-{number // 2 + 1:05d}.bin" for number in saved["state"]}
    for file in set(places.values()):
        states = {number: state for number, state in saved["state"].items() if places[number] == file}
        torch.save(states, root / "optimizer" / file)
    torch.save(saved["param_groups"], root / "optimizer" / "pytorch_optim_group.bin")
    index = {"metadata": {"param_groups": "pytorch_optim_group.bin"}, "weight_map": places}
    (root / "optimizer" / "pytorch_optim.bin.index.json").write_text(json.dumps(index))
    assert "optimizer.state.3.exp_avg" in open_layout(root).tensors
    done = ckptkit.convert(root, tmp_path / "out", to="dcp", optimizer_keys="names")
    opened = ckptkit.open(tmp_path / "out")
    for i, (name, _) in enumerate(network.named_parameters()):
        for moment, value in saved["state"][i].items():
            assert torch.equal(opened[f"optimizer.state.{name}.{moment}"].torch(), value)
    assert any("got names for its 4 parameters" in note for note in done.notes)


def change(root: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    index = json.loads((root / INDEX).read_text())
    edit(index["weight_map"])
    (root / INDEX).write_text(json.dumps(index))


FIRST, SECOND = "pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"
BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a file is missing": (lambda root: (root / SECOND).unlink(), "the file is missing"),
    "a file is cut": (lambda root: (root / SECOND).write_bytes((root / SECOND).read_bytes()[:99]), "end is missing"),
    "a name that is not there": (lambda root: change(root, lambda p: p.update(more=FIRST)), "does not have it"),
    "a name too few": (lambda root: change(root, lambda p: p.pop("3.weight")), "does not list it"),
    "a name elsewhere": (lambda root: change(root, lambda p: p.update({"3.weight": FIRST})), "does not have it"),
    "a name outside": (lambda root: change(root, lambda p: p.update(more="../x.bin")), "plain file name"),
    "two indices": (
        lambda root: (root / "other.bin.index.json").write_text("{}"),
        "expected one index of torch.save files, found 2",
    ),
    "no index": (lambda root: (root / INDEX).write_text("[]"), "does not have `weight_map`"),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_does_not_fit_is_an_error(tmp_path: Path, kind: str) -> None:
    damage, words = BAD[kind]
    root = save_files(tmp_path / "m", model())
    damage(root)
    with pytest.raises(CkptError, match=words) as raised:
        ckptkit.consolidate(root, tmp_path / "out")
    assert raised.value.exit_code in (3, 5)
    assert not (tmp_path / "out").exists()

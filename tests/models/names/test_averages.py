"""Averages of a model beside it, as the modules save them that keep them: torch, timm, ema_pytorch, diffusers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import ckptkit
from ckptkit.errors import SeveralModels, Unsupported


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def as_timm(model: nn.Module) -> dict[str, Tensor]:
    """ModelEmaV2 and V3 of timm/utils/model_ema.py: a module that keeps a copy as `module`."""
    return nn.ModuleDict({"module": model}).state_dict()


def as_ema_pytorch(model: nn.Module, *, has_online: bool) -> dict[str, Tensor]:
    """EMA of ema_pytorch/ema_pytorch.py: buffers, the average, and by default the model itself too."""
    holder = nn.ModuleDict({"ema_model": model, **({"online_model": network()} if has_online else {})})
    holder.register_buffer("initted", torch.tensor(True))
    holder.register_buffer("step", torch.tensor(5))
    return holder.state_dict()


AVERAGES: dict[str, Any] = {
    "torch": lambda model: AveragedModel(model).state_dict(),
    "torch, over DDP": lambda model: AveragedModel(nn.ModuleDict({"module": model})).state_dict(),
    "torch, compiled": lambda model: {f"_orig_mod.{k}": v for k, v in AveragedModel(model).state_dict().items()},
    "timm": as_timm,
    "ema_pytorch": lambda model: as_ema_pytorch(model, has_online=False),
}


@pytest.mark.parametrize("is_alone", [True, False])
@pytest.mark.parametrize("kind", AVERAGES)
def test_an_average_has_the_names_of_its_model(tmp_path: Path, kind: str, is_alone: bool) -> None:
    model = network()
    with torch.no_grad():
        model[0].weight.fill_(3)  # type: ignore[index]
    average = AVERAGES[kind](model)
    torch.save(average if is_alone else {"model": network().state_dict(), "ema": average}, tmp_path / "state.pt")
    ckptkit.consolidate(tmp_path / "state.pt", tmp_path / "out", include=[] if is_alone else ["ema.*"])
    found, truth = load_file(tmp_path / "out" / "model.safetensors"), model.state_dict()
    assert found.keys() == truth.keys()
    assert all(torch.equal(found[name], one) for name, one in truth.items())
    model.load_state_dict(found)


def test_an_average_beside_its_model_is_chosen_by_a_glob(tmp_path: Path) -> None:
    model = network()
    torch.save({"ema": as_ema_pytorch(model, has_online=True)}, tmp_path / "state.pt")
    with pytest.raises(SeveralModels, match=r"the average \(`ema_model\.`\) and its model") as raised:
        ckptkit.consolidate(tmp_path / "state.pt", tmp_path / "out")
    assert raised.value.hint == "choose with --include 'ema.ema_model.*'"
    ckptkit.consolidate(tmp_path / "state.pt", tmp_path / "out", include="ema.ema_model.*")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == model.state_dict().keys()


def test_a_model_may_have_such_names_itself(tmp_path: Path) -> None:
    """A module that is called `module`, and a counter with no average."""
    state = {"module.weight": torch.ones(2), "head.weight": torch.ones(3), "n_averaged": torch.tensor(2)}
    torch.save(state, tmp_path / "state.pt")
    ckptkit.consolidate(tmp_path / "state.pt", tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == state.keys()


def test_an_average_without_names_is_refused(tmp_path: Path) -> None:
    """EMAModel of diffusers/training_utils.py lists its parameters; as a state it is copied unchanged."""
    model = network()
    ema = {"decay": 0.999, "optimization_step": 5, "shadow_params": [one.detach() for one in model.parameters()]}
    torch.save({"model": model.state_dict(), "ema": ema}, tmp_path / "state.pt")
    with pytest.raises(Unsupported, match=r"`ema\.shadow_params` lists 6 tensors without names"):
        ckptkit.consolidate(tmp_path / "state.pt", tmp_path / "out", include="ema.*")
    ckptkit.convert(tmp_path / "state.pt", tmp_path / "dcp", to="dcp")
    assert "ema.shadow_params.0" in ckptkit.open(tmp_path / "dcp")

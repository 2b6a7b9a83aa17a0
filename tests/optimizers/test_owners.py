"""Which of several models an optimizer with numbers belongs to: known where one can be meant, else numbers stay."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim.swa_utils import AveragedModel

import ckptkit
from ckptkit.errors import Unsupported, Usage

DOUBT = "no file says which of them it trains"


class Disc(nn.Module):
    """A model whose first layers have the shapes of another model, and other names."""

    def __init__(self, *more: nn.Module) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 4)
        self.more = nn.Sequential(*more)

    def forward(self, value: Tensor) -> Tensor:
        return self.more(self.b(self.a(value)))


def gen() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))


def trained(model: nn.Module) -> torch.optim.Adam:
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(3, 4)).square().sum().backward()
    optimizer.step()
    return optimizer


def named_in(source: Mapping[str, Any], tmp_path: Path) -> tuple[dict[str, set[str]], tuple[str, ...]]:
    """The parameters of each optimizer as ckptkit calls them in shards, and what it says."""
    torch.save(source, tmp_path / "saved.pt")
    done = ckptkit.convert(tmp_path / "saved.pt", tmp_path / "dcp", to="dcp")
    found: dict[str, set[str]] = {}
    for name in ckptkit.open(tmp_path / "dcp"):
        above, state, rest = name.partition(".state.")
        if state:
            found.setdefault(above, set()).add(rest.rpartition(".")[0])
    return found, tuple(done.notes)


def parameters(model: nn.Module) -> set[str]:
    return {name for name, _ in model.named_parameters()}


NUMBERS = {"0", "1", "2", "3"}


def test_two_models_of_the_same_shapes_leave_numbers(tmp_path: Path) -> None:
    one, two = gen(), Disc()
    opt_g, opt_d = trained(one), trained(two)
    source = {
        "model": one.state_dict(),
        "disc": two.state_dict(),
        "opt_g": opt_g.state_dict(),
        "opt_d": opt_d.state_dict(),
    }
    found, notes = named_in(source, tmp_path)
    assert found == {"opt_g": NUMBERS, "opt_d": NUMBERS}
    assert [note for note in notes if DOUBT in note and "`model` and `disc`" in note] == list(notes)
    with pytest.raises(Unsupported, match=DOUBT):
        ckptkit.convert(tmp_path / "saved.pt", tmp_path / "no", to="dcp", optimizer_keys="names")
    with pytest.raises(Unsupported, match=DOUBT):
        ckptkit.convert(tmp_path / "saved.pt", tmp_path / "no", to="universal")
    ckptkit.convert(tmp_path / "saved.pt", tmp_path / "alone.pt", to="pt", include=["disc.*", "opt_d.*"])
    ckptkit.convert(tmp_path / "alone.pt", tmp_path / "named", to="dcp", optimizer_keys="names")
    loaded: dict[str, Any] = {"opt_d": get_optimizer_state_dict(two, trained(two))}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(loaded, checkpoint_id=tmp_path / "named")
    for name, one_of in two.named_parameters():
        torch.testing.assert_close(loaded["opt_d"]["state"][name], opt_d.state[one_of], rtol=0, atol=0)


@pytest.mark.parametrize("nest", ["keys", "lists"])
def test_shapes_that_one_model_has_name_its_optimizer(tmp_path: Path, nest: str) -> None:
    """Also where the keys tell lies: what is called first is not the first model's."""
    one, two = gen(), Disc(nn.Linear(4, 1))
    states = [trained(two).state_dict(), trained(one).state_dict()]
    models = [one.state_dict(), two.state_dict()]
    if nest == "keys":
        source: dict[str, Any] = {"model": models[0], "disc": models[1], "opt_g": states[0], "opt_d": states[1]}
    else:
        source = {"nets": models, "optimizers": states}
    found, notes = named_in(source, tmp_path)
    second, first = found.values()
    assert second == parameters(two)
    assert first == NUMBERS  # the discriminator has these shapes, too: a part of it may have been trained
    assert len([note for note in notes if DOUBT in note]) == 1
    assert any("of no other model" in note for note in notes)


def test_models_of_the_same_names_are_no_doubt(tmp_path: Path) -> None:
    """Averaged weights and a target network: the names are the same, whichever of them it is."""
    model = gen()
    averaged = AveragedModel(model)
    optimizer = trained(model)
    source = {
        "model": model.state_dict(),
        "ema": averaged.state_dict(),
        "target": gen().state_dict(),
        "optimizer": optimizer.state_dict(),
    }
    found, _ = named_in(source, tmp_path)
    assert found == {"optimizer": parameters(model)}


def test_one_optimizer_of_two_models_keeps_numbers(tmp_path: Path) -> None:
    one, two = gen(), Disc()
    optimizer = torch.optim.Adam([*one.parameters(), *two.parameters()])
    two(one(torch.randn(3, 4))).sum().backward()
    optimizer.step()
    source = {"gen": one.state_dict(), "disc": two.state_dict(), "optimizer": optimizer.state_dict()}
    found, notes = named_in(source, tmp_path)
    assert found == {"optimizer": {str(number) for number in range(8)}}
    assert any("fits none of the 2 models: `gen`: expected" in note for note in notes)


def test_zeros_have_the_shapes_of_the_optimizers_own_model(tmp_path: Path) -> None:
    """Both models have a parameter of the name that has no state yet."""
    one, two = Disc(nn.Linear(4, 4)), Disc(nn.Linear(4, 2))
    state: dict[str, Any] = get_optimizer_state_dict(two, trained(two))
    del state["state"]["more.0.bias"]
    torch.save({"model": one.state_dict(), "disc": two.state_dict(), "opt_d": state}, tmp_path / "saved.pt")
    ckptkit.convert(tmp_path / "saved.pt", tmp_path / "out.pt", to="pt", complete_optimizer=True)
    made = torch.load(tmp_path / "out.pt", weights_only=True)["opt_d"]["state"]["more.0.bias"]
    assert made["exp_avg"].shape == (2,)


def test_a_rename_leaves_the_optimizer_of_another_model(tmp_path: Path) -> None:
    one, two = gen(), Disc()
    states = {
        "opt_g": get_optimizer_state_dict(one, trained(one)),
        "opt_d": get_optimizer_state_dict(two, trained(two)),
    }
    torch.save({"model": one.state_dict(), "disc": two.state_dict(), **states}, tmp_path / "saved.pt")
    ckptkit.convert(tmp_path / "saved.pt", tmp_path / "out.pt", to="pt", rename=r"^=>net.")
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    named = {f"net.{name}" for name in parameters(one)}
    assert found["model"].keys() == found["opt_g"]["state"].keys() == named
    assert found["disc"].keys() == found["opt_d"]["state"].keys() == parameters(two)
    assert set(found["opt_d"]["param_groups"][0]["params"]) == parameters(two)
    with pytest.raises(Usage, match="matches no tensor"):
        ckptkit.convert(tmp_path / "saved.pt", tmp_path / "no.pt", to="pt", rename=r"^b\.=>c.")

"""The names that torch's optimizers record since 2.6, held against real optimizers in another order than the model."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import ckptkit
from ckptkit.errors import Mismatch, Unsupported

LAYERS = 12
Change = Callable[[dict[str, Any]], object]


def shuffled(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    named = list(model.named_parameters())
    random.Random(5).shuffle(named)
    return named


def make(
    module: Callable[[nn.Module], nn.Module] = nn.Sequential, *, groups: int = 1, seed: int = 3
) -> tuple[nn.Module, Any]:
    """A model of equal layers, and an optimizer that was given them in another order and has made two steps."""
    torch.manual_seed(seed)
    model = module(nn.Sequential(*(nn.Linear(4, 4) for _ in range(LAYERS))))
    named = shuffled(model)
    lists: Any = [{"params": named[i::groups], "lr": 0.01 * (i + 1)} for i in range(groups)]
    optimizer = torch.optim.AdamW(lists)
    for _ in range(2):
        model(torch.randn(2, 4)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def moments(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """The first moment of each parameter of a live model."""
    return {name: optimizer.state[one]["exp_avg"].clone() for name, one in model.named_parameters()}


def save(path: Path, model: nn.Module, optimizer: Any, change: Change | None = None) -> Path:
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    if change is not None:
        change(saved["optimizer"])
    torch.save(saved, path)
    return path


def first_moments(path: Path) -> Iterator[tuple[str, Tensor]]:
    for name, lazy in ckptkit.open(path).items():
        if name.endswith(".exp_avg"):
            yield name.removeprefix("optimizer.state.").removesuffix(".exp_avg"), lazy.torch()


@pytest.mark.parametrize("groups", [1, 2])
def test_recorded_names_name_the_states(tmp_path: Path, groups: int) -> None:
    """Twelve equal layers in another order: shapes tell nothing, and the model's order tells lies."""
    model, optimizer = make(groups=groups)
    done = ckptkit.convert(save(tmp_path / "saved.pt", model, optimizer), tmp_path / "dcp", to="dcp", world_size=2)
    assert any("its `param_names` lists them" in note for note in done.notes)
    fresh, other = make(groups=groups, seed=4)
    state: dict[str, Any] = {"optimizer": get_optimizer_state_dict(fresh, other)}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(state, checkpoint_id=tmp_path / "dcp")
    set_optimizer_state_dict(fresh, other, state["optimizer"])
    torch.testing.assert_close(moments(fresh, other), moments(model, optimizer), rtol=0, atol=0)
    assert [group["lr"] for group in other.param_groups] == [group["lr"] for group in optimizer.param_groups]


def test_numbers_come_back_with_the_names(tmp_path: Path) -> None:
    model, optimizer = make(groups=2)
    ckptkit.convert(save(tmp_path / "saved.pt", model, optimizer), tmp_path / "dcp", to="dcp")
    ckptkit.convert(tmp_path / "dcp", tmp_path / "back.pt", to="pt", optimizer_keys="ids")
    found = torch.load(tmp_path / "back.pt", weights_only=True)["optimizer"]
    assert found["param_groups"] == optimizer.state_dict()["param_groups"]
    torch.testing.assert_close(found["state"], optimizer.state_dict()["state"], rtol=0, atol=0)


class Wrapped(nn.Module):
    """A trainer's module that has the model below a name of its own."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, value: Tensor) -> Tensor:
        return self.module(value)


def test_prefixes_of_wrappers_are_no_other_names(tmp_path: Path) -> None:
    """DDP's prefix is in the recorded names, and not in the model that was saved."""
    model, optimizer = make(Wrapped)
    saved = {"model": model.get_submodule("module").state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(saved, tmp_path / "saved.pt")
    ckptkit.convert(tmp_path / "saved.pt", tmp_path / "named.pt", to="pt", optimizer_keys="names")
    truth = {name.removeprefix("module."): one for name, one in moments(model, optimizer).items()}
    torch.testing.assert_close(dict(first_moments(tmp_path / "named.pt")), truth, rtol=0, atol=0)
    rename = r"^0\.=>first."
    ckptkit.convert(tmp_path / "saved.pt", tmp_path / "other.pt", to="pt", rename=rename)
    other = torch.load(tmp_path / "other.pt", weights_only=True)
    assert "first.weight" in other["optimizer"]["param_groups"][0]["param_names"]
    ckptkit.convert(tmp_path / "saved.pt", tmp_path / "both.pt", to="pt", optimizer_keys="names", rename=rename)
    group = torch.load(tmp_path / "both.pt", weights_only=True)["optimizer"]["param_groups"][0]
    assert [name.removeprefix("module.") for name in group["param_names"]] == group["params"]


class Lit(nn.Module):
    """A module with two models, as Lightning's are, of which each has its own optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.G = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.D = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))


def test_a_part_of_a_model_is_found_by_its_names_and_shapes(tmp_path: Path) -> None:
    lit = Lit()
    optimizers = [torch.optim.Adam(one.named_parameters()) for one in (lit.G, lit.D)]
    lit.D(lit.G(torch.ones(1, 4))).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    states = [optimizer.state_dict() for optimizer in optimizers]
    torch.save({"state_dict": lit.state_dict(), "optimizer_states": states}, tmp_path / "saved.pt")
    done = ckptkit.convert(tmp_path / "saved.pt", tmp_path / "named", to="dcp")
    named = set(ckptkit.open(tmp_path / "named"))
    assert "optimizer_states.1.state.D.2.weight.exp_avg" in named
    assert "optimizer_states.0.state.0.exp_avg" in named
    assert any("can mean several parameters: `G.0.weight`, `D.0.weight`" in note for note in done.notes)


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (lambda names: names.pop(), Unsupported, "group 0: expected 24 names, found 23"),
        (lambda names: names.__setitem__(0, names[1]), Unsupported, "expected 24 different names, found 23"),
        (lambda names: names.__setitem__(0, "other"), Mismatch, r"does not have it \(1 of 24 names are unknown\)"),
        (lambda names: names.insert(0, names.pop()), Mismatch, r"expected a state of shape \[4(, 4)?\], found \[4"),
    ],
)
def test_names_that_cannot_be_right_name_nothing(tmp_path: Path, change: Change, kind: Any, words: str) -> None:
    model, optimizer = make()
    saved = save(tmp_path / "saved.pt", model, optimizer, lambda one: change(one["param_groups"][0]["param_names"]))
    with pytest.raises(kind, match=words):
        ckptkit.convert(saved, tmp_path / "no", to="dcp", optimizer_keys="names")
    done = ckptkit.convert(saved, tmp_path / "dcp", to="dcp")
    assert any("keeps its parameter indices" in note for note in done.notes)
    assert ckptkit.inspect(tmp_path / "dcp").optimizer_keys == "ids"


@pytest.mark.parametrize("flatten", [False, True])
def test_a_rename_reaches_recorded_names_in_dcp(tmp_path: Path, flatten: bool) -> None:
    model, optimizer = make()
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer, options=options)}
    with pytest.warns(UserWarning, match="single process"):
        dcp.save(state, checkpoint_id=tmp_path / "in")
    ckptkit.convert(tmp_path / "in", tmp_path / "out", to="dcp", rename=r"^0\.=>layers.")
    renamed = nn.Module()
    renamed.layers = model.get_submodule("0")
    live = torch.optim.AdamW([(f"layers.{name.removeprefix('0.')}", one) for name, one in shuffled(model)])
    wanted = get_optimizer_state_dict(renamed, live, options=options)
    lists = {key: value for key, value in wanted.items() if key.endswith("param_names")} if flatten else None
    loaded: dict[str, Any] = {"optimizer": wanted}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(loaded, checkpoint_id=tmp_path / "out")
    truth = [f"layers.{name.removeprefix('0.')}" for name, _ in shuffled(model)]
    if lists is None:
        assert loaded["optimizer"]["param_groups"][0]["param_names"] == truth
    else:
        assert [loaded["optimizer"][key] for key in lists] == [truth] * len(lists)


def test_a_file_that_keeps_its_names_is_said(tmp_path: Path) -> None:
    """An optimizer beside a model of the wanted format stays the file that it is."""
    model, optimizer = make()
    (tmp_path / "checkpoint-5").mkdir()
    torch.save(model.state_dict(), tmp_path / "checkpoint-5" / "pytorch_model.bin")
    torch.save(optimizer.state_dict(), tmp_path / "checkpoint-5" / "optimizer.pt")
    done = ckptkit.convert(tmp_path / "checkpoint-5", tmp_path / "out", to="pt", rename=r"^0\.=>layers.")
    assert any("copied `optimizer.pt` unchanged, with the old names" in note for note in done.notes)
    done = ckptkit.convert(tmp_path / "checkpoint-5", tmp_path / "dcp", to="dcp", rename=r"^0\.=>layers.")
    assert not any("copied unchanged" in note for note in done.notes)
    assert "optimizer.state.layers.0.weight.exp_avg" in ckptkit.open(tmp_path / "dcp")


def test_recorded_names_need_no_shapes_and_no_order(tmp_path: Path) -> None:
    """Adafactor's factors have other shapes than the parameter, and DCP has no order."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))
    optimizer = torch.optim.Adafactor(reversed(list(model.named_parameters())))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    with pytest.warns(UserWarning, match="single process"):
        dcp.save(state, checkpoint_id=tmp_path / "in")
    ckptkit.convert(tmp_path / "in", tmp_path / "named.pt", to="pt", optimizer_keys="names")
    found = torch.load(tmp_path / "named.pt", weights_only=True)["optimizer"]["state"]
    for name, one in model.named_parameters():
        torch.testing.assert_close(found[name], optimizer.state[one], rtol=0, atol=0)

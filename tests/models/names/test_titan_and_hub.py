"""One model in torchtitan and in transformers: equal logits, equal third steps, the same when compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import ckptkit
from ckptkit.errors import Mismatch
from ckptkit.storage import Reader
from tests.models.names.titan_model import Titan, Widths

transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]
OF = Widths()
TOKENS = torch.arange(24).view(2, 12) % OF.vocabulary


def hub_config() -> Any:
    return transformers.LlamaConfig(
        hidden_size=OF.hidden,
        num_hidden_layers=OF.layers,
        num_attention_heads=OF.heads,
        num_key_value_heads=OF.key_heads,
        head_dim=OF.head,
        intermediate_size=OF.inner,
        vocab_size=OF.vocabulary,
        tie_word_embeddings=False,
        rope_theta=OF.theta,
    )


def logits_of(model: nn.Module) -> torch.Tensor:
    found = model(TOKENS)
    logits: torch.Tensor = found if isinstance(found, torch.Tensor) else found.logits
    return logits


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    logits = logits_of(model)
    nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten()).backward()
    optimizer.step()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def save(model: nn.Module, optimizer: torch.optim.Optimizer, place: Path) -> None:
    """Save as torchtitan does: the model's names at the top, the optimizer below `optimizer`."""
    weights, states = get_state_dict(model, optimizer)
    dcp.save({**weights, "optimizer": states}, checkpoint_id=place)


def load(model: nn.Module, optimizer: torch.optim.Optimizer, place: Path) -> None:
    take_step(model, optimizer)  # so that there is a state to be loaded into
    weights, states = get_state_dict(model, optimizer)
    dcp.load({**weights, "optimizer": states}, checkpoint_id=place)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the config.json alone."""
    place = tmp_path_factory.mktemp("base")
    hub_config().save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Titan, torch.optim.Optimizer, Path]:
    """A Titan after two steps, and what it saved then."""
    torch.manual_seed(0)
    model = Titan(OF)
    optimizer = adamw(model)
    for _ in range(2):
        take_step(model, optimizer)
    place = tmp_path_factory.mktemp("titan") / "step-2"
    save(model, optimizer, place)
    return model, optimizer, place


Trained = tuple[Titan, torch.optim.Optimizer, Path]


def test_consolidate_gives_the_same_logits(trained: Trained, base: Path, tmp_path: Path) -> None:
    model, _, place = trained
    ckptkit.consolidate(place, tmp_path / "hf", base=base)
    with torch.no_grad():
        found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
        assert torch.allclose(logits_of(found), logits_of(model), atol=1e-6)
    ckptkit.convert(tmp_path / "hf", tmp_path / "start", to="dcp", names="torchtitan")
    again = Titan(OF)
    dcp.load(state := again.state_dict(), checkpoint_id=tmp_path / "start")
    assert all(torch.equal(one, model.state_dict()[name]) for name, one in state.items())


def test_the_third_step_is_the_same(trained: Trained, base: Path, tmp_path: Path) -> None:
    _, _, place = trained
    ckptkit.convert(place, tmp_path / "hub", to="dcp", names="hub", base=base)
    there = transformers.LlamaForCausalLM(hub_config())
    optimizer = adamw(there)
    load(there, optimizer, tmp_path / "hub")
    take_step(there, optimizer)
    here = Titan(OF)
    own = adamw(here)
    load(here, own, place)
    take_step(here, own)
    save(here, own, tmp_path / "three")
    ckptkit.consolidate(tmp_path / "three", tmp_path / "hf", base=base)
    saved = ckptkit.open(tmp_path / "hf")
    state = there.state_dict()
    assert state.keys() == saved.keys()
    assert all(torch.allclose(state[name], saved[name].torch(), atol=1e-5) for name in state)
    (tmp_path / "hub" / "config.json").write_text(json.dumps(hub_config().to_dict()))
    ckptkit.convert(tmp_path / "hub", tmp_path / "back", to="dcp", names="torchtitan")
    assert ckptkit.diff(tmp_path / "back", place).is_equal


def test_a_reader_by_other_names(trained: Trained, base: Path, tmp_path: Path) -> None:
    model, _, place = trained
    ckptkit.consolidate(place, tmp_path / "hf", base=base)
    again = Titan(OF)
    dcp.load(state := again.state_dict(), storage_reader=Reader(tmp_path / "hf", names="torchtitan"))
    assert all(torch.equal(one, model.state_dict()[name]) for name, one in state.items())


def test_diff_sees_that_they_are_the_same(trained: Trained, base: Path, tmp_path: Path) -> None:
    _, _, place = trained
    ckptkit.consolidate(place, tmp_path / "hf", base=base)
    found = ckptkit.diff(place, tmp_path / "hf")
    assert found.is_equal
    assert any("from the names of torchtitan" in note for note in found.notes)


def test_names_without_a_config_are_refused(trained: Trained, tmp_path: Path) -> None:
    with pytest.raises(Mismatch, match="torchtitan") as caught:
        ckptkit.consolidate(trained[2], tmp_path / "hf")
    assert "--base" in str(caught.value.hint)
    assert not (tmp_path / "hf").exists()
    ckptkit.consolidate(trained[2], tmp_path / "hf", names="keep")
    assert "tok_embeddings.weight" in ckptkit.open(tmp_path / "hf")


def test_a_wrapper_before_all_names(trained: Trained, base: Path, tmp_path: Path) -> None:
    model, _, place = trained
    wrapped = {f"net.{name}": tensor for name, tensor in model.state_dict().items()}
    torch.save({"state_dict": wrapped}, tmp_path / "wrapped.pt")
    done = ckptkit.consolidate(tmp_path / "wrapped.pt", tmp_path / "hf", base=base)
    assert any("removed the prefix `net.` from all names" in note for note in done.notes)
    assert ckptkit.diff(tmp_path / "hf", place).is_equal


def test_a_config_of_another_model(trained: Trained, base: Path, tmp_path: Path) -> None:
    config = json.loads((base / "config.json").read_text()) | {"num_attention_heads": 8}
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    with pytest.raises(Mismatch, match=r"expected 8 heads of 8"):
        ckptkit.consolidate(trained[2], tmp_path / "hf", base=tmp_path / "base")

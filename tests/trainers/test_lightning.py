"""Lightning and Fabric: a `.ckpt` that is a directory or a file, with the rest of the training in it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ckptkit
from ckptkit.errors import Mismatch
from ckptkit.runs.ls import ls
from tests.conftest import Produce
from tests.conversion.judges import raw
from tests.producers import Producer, spawn
from tests.trainers import produced_lightning
from tests.trainers.produced_lightning import batches, be_torchrun, make_module, make_trainer
from tests.trainers.produced_plain import live_state

pytest.importorskip("lightning")

PREFIXES = {"model": "state_dict", "optimizer": "optimizer_0"}  # as Lightning's Trainer calls them


def read(path: Path) -> dict[str, Tensor]:
    return {name: lazy.torch() for name, lazy in ckptkit.open(path).items()}


def as_saved(truth: dict[str, Tensor], optimizer: str) -> dict[str, bytes]:
    """The truth by the keys of Lightning's Trainer."""
    places = {"model": "state_dict", "optimizer": optimizer}
    split = {name: name.partition(".") for name in truth}
    return {f"{places[first]}.{rest}": raw(truth[name]) for name, (first, _, rest) in split.items()}


def without_callbacks(found: dict[str, Tensor]) -> dict[str, bytes]:
    return {name: raw(tensor) for name, tensor in found.items() if not name.startswith("callbacks.")}


@pytest.mark.slow
def test_a_sharded_one_is_a_directory_with_everything(produce: Produce) -> None:
    made = produce(produced_lightning.lightning_sharded)
    found = ckptkit.inspect(made.root)
    assert (found.whole.name, found.step, found.world_size) == ("epoch=0-step=2.ckpt", 2, 2)
    assert (found.trainer, found.optimizer_keys) == ("Lightning", "names")
    assert {"epoch", "global_step", "loops", "hyper_parameters"} <= set(found.groups["rest"].under)
    (listed,) = ls(made.root).checkpoints
    assert (listed.step, listed.is_complete, listed.trainer) == (2, True, "Lightning")
    assert all(part.is_ok for part in ckptkit.verify(made.root))
    assert without_callbacks(read(made.root)) == as_saved(made.truth, "optimizer_0")


@pytest.mark.slow
def test_resharded_it_is_lightnings_still(produce: Produce, tmp_path: Path) -> None:
    """Lightning itself goes on from it on another number of ranks, with the state that it had."""
    made = produce(produced_lightning.lightning_sharded)
    done = ckptkit.reshard(made.root, tmp_path / "epoch=0-step=2.ckpt", to=3)
    assert "meta.pt" in done.files
    torch.save(made.truth, tmp_path / "truth.pt")
    spawn(3, go_on, tmp_path)


def go_on(home: Path) -> None:
    be_torchrun()
    truth = torch.load(home / "truth.pt")
    trainer, module = make_trainer(home / "run", steps=3, is_sharded=True), make_module(is_sharded=True)

    from lightning import Callback

    class Witness(Callback):
        def on_train_start(self, trainer: Any, module: nn.Module) -> None:
            state = live_state(module, trainer.optimizers[0])
            whole = {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in state.items()}
            assert whole.keys() == truth.keys()
            assert [name for name in truth if not torch.equal(whole[name], truth[name])] == []

    trainer.callbacks.append(Witness())
    trainer.fit(module, batches(), ckpt_path=str(home / "epoch=0-step=2.ckpt"))
    assert trainer.global_step == 3


def test_a_whole_one_gets_names_as_shards(produce: Produce, tmp_path: Path) -> None:
    made = produce(produced_lightning.lightning_whole)
    found = ckptkit.inspect(made.root)
    assert (found.step, found.trainer, found.optimizer_keys) == (2, "Lightning", "ids")
    ckptkit.convert(made.root, tmp_path / "dcp", to="dcp", world_size=2)
    assert without_callbacks(read(tmp_path / "dcp")) == as_saved(made.truth, "optimizer_states.0")
    ckptkit.convert(tmp_path / "dcp", tmp_path / "back.ckpt", to="pt", optimizer_keys="ids")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer, module = make_trainer(tmp_path, steps=3, is_sharded=False), make_module(is_sharded=False)
        trainer.fit(module, batches(), ckpt_path=tmp_path / "back.ckpt", weights_only=False)
    assert trainer.global_step == 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sharded.ckpt", "whole.ckpt"])
def test_fabric_has_the_users_keys(produce: Produce, name: str) -> None:
    made = produce(produced_lightning.fabric)
    found = ckptkit.inspect(made.root / name)
    assert (found.step, found.optimizer_keys, found.groups["rest"].under) == (1, "names", ("step", "hparams"))
    assert {n: raw(t) for n, t in read(made.root / name).items()} == {n: raw(t) for n, t in made.truth.items()}


@pytest.mark.parametrize("producer", [produced_lightning.lightning_sharded, produced_lightning.lightning_whole])
def test_the_model_comes_out(produce: Produce, producer: Producer, tmp_path: Path) -> None:
    made = produce(producer)
    ckptkit.consolidate(made.root, tmp_path / "hf", rename=r"^net\.=>")
    wanted = {n.removeprefix("model.net."): raw(t) for n, t in made.truth.items() if n.startswith("model.")}
    assert {name: raw(tensor) for name, tensor in read(tmp_path / "hf").items()} == wanted


def test_a_modules_prefix_goes_if_the_config_says_so(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, tie_word_embeddings=False, **sizes))
    model.config.save_pretrained(tmp_path)
    state = {f"net.{name}": tensor for name, tensor in model.state_dict().items()}
    saved = {"state_dict": state, "pytorch-lightning_version": "2.6", "epoch": 0}
    torch.save(saved, tmp_path / "epoch=0-step=7.ckpt")
    done = ckptkit.consolidate(tmp_path / "epoch=0-step=7.ckpt", tmp_path / "hf")
    assert any("removed the prefix `net.`" in note for note in done.notes)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "hf").state_dict()
    assert {n: raw(t) for n, t in loaded.items()} == {n: raw(t) for n, t in model.state_dict().items()}
    state["loss.weight"] = torch.ones(3)  # another module beside the model: not all have the prefix
    torch.save(saved, tmp_path / "epoch=0-step=7.ckpt")
    with pytest.raises(Mismatch) as raised:
        ckptkit.consolidate(tmp_path / "epoch=0-step=7.ckpt", tmp_path / "no")
    assert raised.value.hint == r"--rename '^net\.=>'"

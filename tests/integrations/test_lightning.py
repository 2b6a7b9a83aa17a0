"""The plugin in Lightning's own Trainer: what it saves, that a training goes on from it, and what the commands make."""

from __future__ import annotations

import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.checks.verify import verify
from ckptkit.conversion.convert import convert
from ckptkit.errors import CkptError, Corrupt, Unsupported
from ckptkit.runs.pin import pin
from tests.producers import spawn
from tests.s3 import Place
from tests.trainers.produced_lightning import batches, be_torchrun, make_module, make_trainer

pytest.importorskip("lightning")


def train(
    home: str | Path, steps: int, *, with_plugin: bool = True, resume: str | Path | None = None, **options: Any
) -> Any:
    """Train with Lightning's Trainer, which saves after each second step."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    from ckptkit.integrations.lightning import CkptkitIO

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=1,
            max_steps=steps,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[ModelCheckpoint(dirpath=home, every_n_train_steps=2, **options)],
            plugins=[CkptkitIO()] if with_plugin else [],
        )
        module = make_module(is_sharded=False)
        trainer.fit(module, batches(), ckpt_path=resume)
    return trainer


def same(one: Any, two: Any) -> bool:
    """Whether two trees are equal: tensors by their bits, types of dicts and keys too."""
    if isinstance(one, torch.Tensor):
        return isinstance(two, torch.Tensor) and one.dtype == two.dtype and torch.equal(one, two)
    if isinstance(one, dict):
        return type(one) is type(two) and list(one) == list(two) and all(same(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(two) and len(one) == len(two) and all(map(same, one, two))
    return bool(one == two)


def test_what_is_loaded_is_what_lightning_would_have_saved(tmp_path: Path) -> None:
    from ckptkit.integrations.lightning import CkptkitIO

    train(tmp_path / "ours", 2)
    train(tmp_path / "theirs", 2, with_plugin=False)
    ours = CkptkitIO().load_checkpoint(tmp_path / "ours" / "epoch=0-step=2.ckpt")
    theirs = torch.load(tmp_path / "theirs" / "epoch=0-step=2.ckpt", weights_only=True)
    assert ours.keys() == theirs.keys()
    for key in theirs.keys() - {"callbacks"}:  # which have the directory in them
        assert same(ours[key], theirs[key]), key


def test_a_training_goes_on_as_it_would_from_a_file_of_lightnings(tmp_path: Path) -> None:
    resumed = []
    for with_plugin in (True, False):
        home = tmp_path / str(with_plugin)
        train(home, 2, with_plugin=with_plugin)
        resumed.append(train(home, 4, with_plugin=with_plugin, resume=home / "epoch=0-step=2.ckpt"))
    ours, theirs = resumed
    assert ours.global_step == 4
    assert same(dict(ours.model.state_dict()), dict(theirs.model.state_dict()))
    assert same(ours.optimizers[0].state_dict(), theirs.optimizers[0].state_dict())


def test_files_of_lightning_itself_are_loaded(tmp_path: Path) -> None:
    train(tmp_path / "first", 2, with_plugin=False)
    assert train(tmp_path / "second", 4, resume=tmp_path / "first" / "epoch=0-step=2.ckpt").global_step == 4


def test_a_module_is_loaded_without_a_trainer(tmp_path: Path) -> None:
    """`load_from_checkpoint` asks no plugin: it takes the checkpoint as a file in memory."""
    import lightning

    from ckptkit.integrations.lightning import CkptkitIO, as_file

    class Scaled(lightning.LightningModule):
        def __init__(self, width: int, scale: float = 1.0) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.layer = torch.nn.Linear(width, width)

        def training_step(self, batch: torch.Tensor, _index: int) -> torch.Tensor:
            loss: torch.Tensor = self.layer(batch).pow(2).mean()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Scaled(6, scale=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=1,
            max_steps=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            plugins=[CkptkitIO()],
        )
        trainer.fit(module, batches())
        trainer.save_checkpoint(tmp_path / "last.ckpt")
    with pytest.raises(IsADirectoryError):
        Scaled.load_from_checkpoint(tmp_path / "last.ckpt")
    loaded = Scaled.load_from_checkpoint(as_file(tmp_path / "last.ckpt"))
    assert loaded.hparams == {"width": 6, "scale": 0.5}
    assert same(dict(loaded.state_dict()), dict(module.state_dict()))


def test_the_commands_know_it(tmp_path: Path) -> None:
    trainer = train(tmp_path, 2)
    path = tmp_path / "epoch=0-step=2.ckpt"
    (verified,) = verify(path)
    assert verified.is_ok
    assert verified.has_manifest
    assert verified.unchecked_bytes == 0
    found = Checkpoint.open(path)
    assert (found.step, found.trainer, found.is_complete) == (2, "Lightning", True)
    state = trainer.model.state_dict()
    assert found.weights.layout.tensors.keys() == state.keys()
    convert(path, tmp_path / "whole", to="pt")
    (file,) = (tmp_path / "whole").glob("*.pt")
    there = torch.load(file, weights_only=True)["state_dict"]
    assert all(torch.equal(there[name], tensor) for name, tensor in state.items())


def test_damage_is_found_when_it_is_loaded(tmp_path: Path) -> None:
    from ckptkit.integrations.lightning import CkptkitIO

    train(tmp_path, 2)
    path = tmp_path / "epoch=0-step=2.ckpt"
    for shard in path.glob("*.distcp"):
        data = bytearray(shard.read_bytes())
        data[len(data) // 3] ^= 1
        shard.write_bytes(data)
    with pytest.raises(CkptError):
        CkptkitIO().load_checkpoint(path)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_mappings_without_tensors_stay_themselves(tmp_path: Path) -> None:
    """Not every mapping can be made from pairs: a Counter would count them, and OmegaConf would refuse them."""
    from ckptkit.integrations.lightning import CkptkitIO

    seen = Counter(cat=3)
    checkpoint = {
        "state_dict": {"w": torch.ones(2)},
        "hyper_parameters": seen,
        "callbacks": {"c": {"n": seen, "t": torch.ones(1)}},
    }
    CkptkitIO().save_checkpoint(checkpoint, tmp_path / "out")
    loaded = CkptkitIO().load_checkpoint(tmp_path / "out", weights_only=False)
    assert same(dict(sorted(loaded.items())), dict(sorted(checkpoint.items())))
    assert type(loaded["callbacks"]["c"]["n"]) is Counter


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(
    ("mine", "name"),
    [
        ({0: torch.ones(2), "0": torch.zeros(2)}, "mine.0"),
        ({"0": {"x": torch.ones(2)}, 0: torch.zeros(2)}, "mine.0"),
        ({"a.b": torch.ones(2), "a": {"b": torch.zeros(2)}}, "mine.a.b"),
    ],
)
def test_tensors_under_keys_of_equal_text_are_refused(tmp_path: Path, mine: Any, name: str, background: bool) -> None:
    from ckptkit.integrations.lightning import CkptkitIO

    with pytest.raises(Unsupported, match=f"`{name}`: two tensors have keys of the same text"):
        CkptkitIO(background=background).save_checkpoint({"mine": mine}, tmp_path / "out")
    assert not [*tmp_path.iterdir()]


@pytest.mark.slow
def test_a_training_in_the_foreground_saves_to_a_store_and_resumes_from_it(place: Place, tmp_path: Path) -> None:
    run = f"s3://{place.name}/run"
    for home in (str(tmp_path), run):
        train(home, 2)
    ours, theirs = (train(home, 6, resume=f"{home}/epoch=0-step=2.ckpt") for home in (run, str(tmp_path)))
    assert same(dict(ours.model.state_dict()), dict(theirs.model.state_dict()))
    (saved,) = place.files.ls(f"{place.name}/run", detail=False, refresh=True)
    assert saved.endswith("-step=6.ckpt")


def test_a_whole_model_of_a_strategy_that_shards_is_not_saved_to_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.pytorch.strategies import ModelParallelStrategy

    from ckptkit.integrations.lightning import CkptkitIO

    monkeypatch.setattr("ckptkit.integrations.lightning.find_calling_strategy", ModelParallelStrategy)
    with pytest.raises(Unsupported, match="Lightning itself saves a full model, and only locally") as raised:
        CkptkitIO().save_checkpoint({}, Path("s3://bucket/run/x.ckpt"))  # as the strategy passes it
    assert "BackgroundModelParallelStrategy" in (raised.value.hint or "")


def test_a_directory_of_others_is_refused(tmp_path: Path) -> None:
    from ckptkit.integrations.lightning import CkptkitIO
    from tests.producers import save_alone

    save_alone({"state_dict": {"w": torch.ones(3)}}, tmp_path / "other")
    with pytest.raises(Corrupt, match="not a checkpoint of this plugin"):
        CkptkitIO().load_checkpoint(tmp_path / "other")


def test_only_what_is_pinned_stays_of_the_old(tmp_path: Path) -> None:
    train(tmp_path, 2)
    pin(tmp_path / "epoch=0-step=2.ckpt")
    train(tmp_path, 6, resume=tmp_path / "epoch=0-step=2.ckpt", save_top_k=1)
    kept = sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith("."))
    assert kept == ["epoch=0-step=2.ckpt", "epoch=0-step=6.ckpt"]
    train(tmp_path / "plain", 6, save_top_k=1)
    assert [path.name for path in (tmp_path / "plain").iterdir()] == ["epoch=0-step=6.ckpt"]


def _train_by_ranks(home: Path) -> None:
    """Train as a rank of a strategy that shards and saves whole models, with the plugin, and go on from one."""
    from ckptkit.integrations.lightning import CkptkitIO

    be_torchrun()
    for steps in (2, 4):
        trainer = make_trainer(home, steps=steps, is_sharded=True, as_shards=False, plugins=[CkptkitIO()])
        module = make_module(is_sharded=True)
        trainer.fit(module, batches(), ckpt_path=home / "epoch=0-step=2.ckpt" if steps > 2 else None)
    assert trainer.global_step == 4
    state = {name: tensor.full_tensor() for name, tensor in module.state_dict().items()}
    if dist.get_rank() == 0:
        torch.save(state, home / "truth.pt")


@pytest.mark.slow
def test_whole_models_of_strategies_that_shard_are_files_as_they_load_nothing_else(tmp_path: Path) -> None:
    spawn(2, _train_by_ranks, tmp_path)
    path = next(tmp_path.glob("*-step=4.ckpt"))
    assert path.is_file()
    assert same(torch.load(path, weights_only=True)["state_dict"], torch.load(tmp_path / "truth.pt"))

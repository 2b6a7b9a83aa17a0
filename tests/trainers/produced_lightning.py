"""Checkpoints of Lightning and Fabric, made by them: sharded by FSDP2 on 2 ranks, and whole."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.producers import Truth, _on_ranks
from tests.trainers.produced_plain import _free_port, live_state

STEPS = 2


def be_torchrun() -> None:
    """Set the environment that torchrun gives a rank."""
    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "GROUP_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port(), "TORCHELASTIC_RUN_ID": "none"}


class Net(nn.Module):
    """Two layers with an odd number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 7)
        self.down = nn.Linear(7, 6, bias=False)

    def forward(self, batch: Tensor) -> Tensor:
        out: Tensor = self.down(torch.relu(self.up(batch)))
        return out


def make_module(*, is_sharded: bool) -> Any:
    """The LightningModule around a net, which is called `net` in it."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.save_hyperparameters({"width": 7})
            self.net = Net()

        def configure_model(self) -> None:
            if is_sharded and not isinstance(self.net.up.weight, DTensor):
                assert self.device_mesh is not None
                fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: Tensor, _index: int) -> Tensor:
            loss: Tensor = self.net(batch).pow(2).mean()
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
            return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}

    torch.manual_seed(0)
    return Module()


def make_trainer(home: Path, *, steps: int, is_sharded: bool, as_shards: bool = True, **options: Any) -> Any:
    """A Trainer of Lightning that saves after each second step: what is sharded `as_shards`, or as a whole."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import ModelParallelStrategy

    strategy: Any = "auto"
    if is_sharded:
        strategy = ModelParallelStrategy(
            data_parallel_size=dist.get_world_size(),
            tensor_parallel_size=1,
            save_distributed_checkpoint=as_shards,
            process_group_backend="gloo",
        )
    return lightning.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size() if is_sharded else 1,
        strategy=strategy,
        max_steps=steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(dirpath=home, every_n_train_steps=STEPS)],
        **options,
    )


def batches() -> Any:
    torch.manual_seed(1)
    return torch.utils.data.DataLoader(torch.randn(16, 6).split(2), batch_size=None)


def _fit(root: Path) -> Mapping[str, Any]:
    be_torchrun()
    trainer, module = make_trainer(root, steps=STEPS, is_sharded=True), make_module(is_sharded=True)
    trainer.fit(module, batches())
    return live_state(module, trainer.optimizers[0])


def lightning_sharded(root: Path) -> Truth:
    """A run of Lightning's Trainer under ModelParallelStrategy on 2 ranks."""
    return _on_ranks(2, _fit, root)


def lightning_whole(root: Path) -> Truth:
    """A run of Lightning's Trainer in one process, which saves one file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer, module = make_trainer(root, steps=STEPS, is_sharded=False), make_module(is_sharded=False)
        trainer.fit(module, batches())
    return live_state(module, trainer.optimizers[0])


def _save_with_fabric(root: Path) -> Mapping[str, Any]:
    be_torchrun()
    import lightning
    from lightning.fabric.strategies.model_parallel import ModelParallelStrategy

    def shard(model: nn.Module, mesh: Any) -> nn.Module:
        fully_shard(model, mesh=mesh["data_parallel"])
        return model

    strategy = ModelParallelStrategy(
        shard,
        data_parallel_size=2,
        tensor_parallel_size=1,
        process_group_backend="gloo",
        save_distributed_checkpoint=True,
    )
    fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy=strategy, precision="32-true")
    fabric.launch()
    model = fabric.setup_module(Net())
    optimizer: Any = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), 1e-2))
    fabric.backward(model(torch.ones(2, 6)).pow(2).mean())
    optimizer.step()
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 1, "hparams": {"width": 7}}
    fabric.save(root / "sharded.ckpt", state)
    strategy._save_distributed_checkpoint = False
    fabric.save(root / "whole.ckpt", state)
    return live_state(model.module, optimizer.optimizer)


def fabric(root: Path) -> Truth:
    """The same state saved by Fabric twice: in shards, and as one file."""
    return _on_ranks(2, _save_with_fabric, root)

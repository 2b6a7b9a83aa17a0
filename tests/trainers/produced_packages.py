"""Checkpoints of torch_checkpointing and torchsnapshot, made by these on two gloo ranks, without a GPU.

Neither does that by itself: what is replaced is how metadata are gathered, and how files are opened, never what is in
them.
"""

from __future__ import annotations

import os
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817 - as all call it
from torch.distributed.fsdp import ShardedStateDictConfig, StateDictType

from tests.producers import Truth, _on_ranks
from tests.trainers.produced_ranks import CPU, Model, adamw, sharded, train, truth_of, truth_of_wrapped, wrapped


def by_torch_checkpointing(root: Path) -> Truth:
    """FSDP2's model and optimizer, as torch.save and as safetensors."""
    return _on_ranks(2, _by_torch_checkpointing, root)


def _by_torch_checkpointing(root: Path) -> Truth:
    import torch_checkpointing.metadata_manager as managing
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
    from torch_checkpointing import CheckpointManager, ItemSpec
    from torch_checkpointing.checkpoint_layout import LayoutInfo, SafetensorsSerialization
    from torch_checkpointing.config import SyncCheckpointSaverConfig
    from torch_checkpointing.default_resharder import DefaultResharder

    def gather(_: Any, data: Any, *__: Any, **___: Any) -> dict[int, Any]:
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, data)
        return dict(enumerate(found))

    for kind in vars(managing).values():
        if isinstance(kind, type) and "_all_gather_pickled_data" in vars(kind):
            kind._all_gather_pickled_data = gather  # type: ignore[attr-defined]  # gathers through tensors on "cuda" otherwise
    os.O_DIRECT = 0  # type: ignore[misc]  # tiny files fail under O_DIRECT
    model = sharded()
    optimizer = adamw(model)
    train(model, optimizer)
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer), "step": 3}
    layouts = {"torch": None, "safetensors": LayoutInfo("model_{rank}.safetensors", SafetensorsSerialization())}
    for place, layout in layouts.items():
        spec: dict[str, Any] = {} if layout is None else {"layout": layout}
        items = {
            "model": ItemSpec(resharder=DefaultResharder(), **spec),
            "optimizer": ItemSpec(resharder=DefaultResharder()),
        }
        config = CheckpointManager.Config(save=SyncCheckpointSaverConfig(), items=items)
        CheckpointManager(config).save(str(root / place), state)
    return truth_of("any", model, optimizer)


def by_torchsnapshot(root: Path) -> Truth:
    """FSDP1's shards, tensors that are replicated, large ones in pieces, objects; and one snapshot without batches."""
    return _on_ranks(2, _by_torchsnapshot, root)


def _by_torchsnapshot(root: Path) -> Truth:
    import torchsnapshot
    from torchsnapshot import knobs

    model = wrapped(use_orig_params=True)
    optimizer = adamw(model)
    train(model, optimizer)
    FSDP.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig())
    own = torch.arange(4.0) + dist.get_rank()
    half, tall = torch.linspace(0, 1, 6).to(torch.bfloat16), torch.arange(40.0).reshape(10, 4)
    rest = torchsnapshot.StateDict(
        step=3, lr=0.1, own=own, half=half, tall=tall, told={"who": ["me", 2]}, kind=torch.float32
    )
    app = {"model": torchsnapshot.StateDict(**model.state_dict()), "progress": rest}
    torchsnapshot.Snapshot.take(str(root / "batched"), app, replicated=["progress/half", "progress/tall"])
    with knobs.override_max_chunk_size_bytes(48), knobs.override_is_batching_disabled(True):
        torchsnapshot.Snapshot.take(str(root / "plain"), app, replicated=["progress/half", "progress/tall"])
    truth = {f"model.{n.removeprefix('any/')}": t for n, t in truth_of_wrapped("any", model, optimizer).items()}
    moments = ("step", "exp_avg", "exp_avg_sq")
    truth = {name: tensor for name, tensor in truth.items() if name.rpartition(".")[2] not in moments}
    both: list[Any] = [None, None]
    dist.all_gather_object(both, own)
    return truth | {"progress.half": half, "progress.tall": tall, "own 0": both[0], "own 1": both[1]}


def by_fairscale(root: Path) -> Truth:
    """Fairscale's local state with its metadata, as fairseq saves it, of a module in a module, with its optimizer."""
    return _on_ranks(3, _by_fairscale, root)


def _by_fairscale(root: Path) -> Truth:
    from fairscale.nn.data_parallel import FullyShardedDataParallel

    def step(module: torch.nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(module.parameters())
        for parameter in module.parameters():  # a forward pass takes a GPU
            parameter.grad = parameter.detach() * 0.25
        optimizer.step()
        return optimizer

    model = Model()
    alone = deepcopy(model)
    states = step(alone).state_dict()["state"]
    truth = {f"model.{name}": tensor.clone() for name, tensor in alone.state_dict().items()}
    for i, (name, _) in enumerate(alone.named_parameters()):
        truth |= {f"optimizer.state.{name}.{moment}": value for moment, value in states[i].items()}
    for i, layer in enumerate(model.layers):
        model.layers[i] = FullyShardedDataParallel(layer, compute_device=CPU)
    outer = FullyShardedDataParallel(model, compute_device=CPU)
    root.mkdir(exist_ok=True)
    optimizer = step(outer).state_dict()
    state = {"model": outer.local_state_dict(), "shard_metadata": outer.local_metadata_dict(), "num_updates": 7}
    state |= {"last_optimizer_state": optimizer}
    torch.save(state, root / f"checkpoint_best-shard{dist.get_rank()}.pt")
    return truth

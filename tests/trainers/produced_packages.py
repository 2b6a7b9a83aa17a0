"""Checkpoints of torch_checkpointing and torchsnapshot, made by these on two gloo ranks, without a GPU.

Neither does that by itself: what is replaced is how metadata are gathered, and how files are opened, never what is in
them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.producers import Truth, _on_ranks
from tests.trainers.produced_ranks import adamw, sharded, train, truth_of


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

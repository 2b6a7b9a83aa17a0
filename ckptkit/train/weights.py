"""Starting weights: those of a checkpoint of any format and world size, each rank reading its own part of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from ckptkit import storage
from ckptkit.runs import find_checkpoint
from ckptkit.train.parallel.shard import Sharded


def load_weights(sharded: Sharded, path: Path) -> None:
    """Give a model the weights of the checkpoint, or of the latest one of the run, at `path`; converted to fp32.

    Raises `Mismatch` where a tensor is missing or of another shape. Of tied weights the first stands for all.
    """
    state: dict[str, Any] = get_model_state_dict(sharded.model)
    storage.load_weights(find_checkpoint(path), {name: state[name] for name in sharded.first_names.values()})
    tied = {name: state[sharded.first_names[name]] for name in state}
    set_model_state_dict(sharded.model, tied)

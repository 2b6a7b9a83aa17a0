"""Load the weights to start from, of a checkpoint of any format and world size, each rank its own part of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from ckptkit import storage
from ckptkit.errors import Mismatch
from ckptkit.training.parallel.shard import Sharded

_COMPUTED = ".rotary_emb.inv_freq"  # buffers that older checkpoints hold, and every model computes


def load_weights(sharded: Sharded, path: Path, config: Mapping[str, Any] | None = None) -> None:
    """Load into a model the weights of the checkpoint, or of the latest one of the run, at `path`; converted to fp32.

    If they have the names of another family, the config.json beside them or else `config` says what they become.

    Raises `Mismatch` where a tensor is missing or of another shape, where the checkpoint has one that the model has
    not, and where two that the model ties differ.
    """
    state: dict[str, Any] = get_model_state_dict(sharded.model)
    tied = {name: state[sharded.first_names[name]] for name in state}
    unused = storage.load_weights(path, tied, config, cast="allow")
    require_used(unused, path)
    set_model_state_dict(sharded.model, tied)


def require_used(unused: Iterable[str], path: Path) -> None:
    """Raise `Mismatch` if a tensor of the checkpoint has no place in the model."""
    strangers = [name for name in unused if not name.endswith(_COMPUTED)]
    if strangers:
        raise Mismatch(
            f"the model has no place for {len(strangers)} of the checkpoint's tensors: {', '.join(strangers[:4])}",
            path=path,
            tensor=strangers[0],
            hint="is this a checkpoint of the same model?",
        )

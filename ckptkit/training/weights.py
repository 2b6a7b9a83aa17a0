"""Load the weights to start from, of a checkpoint of any format and world size, each rank its own part of them."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from ckptkit import storage
from ckptkit.adapters.names import read_entry
from ckptkit.errors import Mismatch
from ckptkit.training.parallel.shard import ShardedModel

_COMPUTED = ".rotary_emb.inv_freq"  # buffers that older checkpoints hold, and every model computes
_PRIME = 2**31 - 1


def load_weights(sharded: ShardedModel, path: Path, config: Mapping[str, Any] | None = None) -> int:
    """Load into a model the weights of the checkpoint, or of the latest one of the run, at `path`, whatever its dtype.

    If they have the names of another family, the config.json beside them or else `config` says what they become.
    Adapters of the model stay as they are; then a checksum of the base is returned, and else 0.

    Raises `Mismatch` where a tensor is missing or of another shape, where the checkpoint has one that the model has
    not, and where two that the model ties differ.
    """
    state: dict[str, Any] = get_model_state_dict(sharded.model)
    tied = {name: state[sharded.first_names[name]] for name in state if read_entry(name) is None}
    unused = storage.load_weights(path, tied, config, cast="allow")
    require_used(unused, path)
    set_model_state_dict(sharded.model, state | tied)
    return checksum(tied) if len(tied) < len(state) else 0


def require_used(unused: Iterable[str], path: Path) -> None:
    """Raise `Mismatch` if a tensor of the checkpoint has no place in the model."""
    strangers = [name for name in unused if not name.endswith(_COMPUTED)]
    if strangers:
        raise Mismatch(
            f"the model does not have {len(strangers)} of the checkpoint's tensors: {', '.join(strangers[:4])}",
            path=path,
            tensor=strangers[0],
            hint="check that the checkpoint is of the same model",
        )


@torch.no_grad()
def checksum(tensors: Mapping[str, Tensor]) -> int:
    """Return a checksum of tensors, rounded to bf16: the same on any ranks, and whatever dtype they are held in.

    It is of the sum of each row, times its number. A collective.
    """
    names = sorted(tensors)
    sums = torch.stack([sum_of_rows(tensors[name]) for name in names])
    dist.all_reduce(sums)
    return zlib.crc32(str(list(zip(names, (sums % _PRIME).tolist(), strict=True))).encode())


def sum_of_rows(tensor: Tensor) -> Tensor:
    """Return what this rank adds to the sum of a tensor's rows, as bits, each times its number, modulo a prime."""
    local, is_mine = tensor, dist.get_rank() == 0
    numbers = torch.arange(1, 1 + (tensor.shape or (1,))[0], device=tensor.device)
    if isinstance(tensor, DTensor):
        mesh, placements = tensor.device_mesh, tensor.placements
        local, place = tensor.to_local(), mesh.get_coordinate() or ()
        # src_data_rank=None: every rank cuts its own copy, nothing is sent
        numbers = distribute_tensor(numbers, mesh, placements, src_data_rank=None).to_local()
        is_mine = not any(at for at, how in zip(place, placements, strict=True) if isinstance(how, Replicate))
    bits = local.reshape(local.shape or (1,)).to(torch.bfloat16).view(torch.int16)
    rows = bits.reshape(len(bits), math.prod(bits.shape[1:]))
    sums = rows.sum(1, dtype=torch.int64) % _PRIME * numbers % _PRIME
    total: Tensor = sums.sum() * is_mine % _PRIME
    return total

"""Models of transformers trained for two steps under FSDP2 on three gloo ranks, and what they were saved as."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from tests.models.names.tiny_models import make_model
from tests.producers import Truth, _on_ranks, flatten

TRAINED = ("mixtral", "granitemoe", "gpt_neox")


def trained(root: Path) -> Truth:
    """Each of `TRAINED` in a directory of its own: model and optimizer, cut in the middle of experts and of halves."""
    return _on_ranks(3, _train, root)


def _train(root: Path) -> Mapping[str, Any]:
    truth: dict[str, Any] = {}
    for model_type in TRAINED:
        model = make_model(model_type)
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(root / model_type)
        fully_shard(model, shard_placement_fn=placement)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(2):
            tokens = torch.randint(0, 40, (2, 7), generator=torch.Generator().manual_seed(step))
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.save(state, checkpoint_id=root / model_type / "ckpt-2")
        truth |= {f"{model_type}:{name}": value for name, value in flatten(state).items() if isinstance(value, Tensor)}
    return truth


def placement(parameter: nn.Parameter) -> Shard | None:
    """Cut each expert within, where FSDP2 can; all else along the first axis."""
    return Shard(1) if parameter.ndim == 3 and parameter.shape[1] % 3 == 0 else None

"""A small network with everything that is awkward to save, under each wrapper, and the truth about its training."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from ckptkit.training.models.lora import Lora, LoraLinear

ROWS = 11  # not to be divided by any number of ranks
CPU = torch.device("cpu")
Tensors = dict[str, Tensor]


class Network(nn.Module):
    """Tied, frozen and integer tensors, buffers, and fewer rows than some numbers of ranks."""

    def __init__(self, seed: int, *, with_unused: bool = False, with_adapters: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(ROWS, 6)
        layers = [nn.Linear(6, 6) for _ in range(2)]
        self.layers = nn.ModuleList(layers)
        self.norm = nn.BatchNorm1d(6)
        self.frozen = nn.Linear(6, 3)
        self.frozen.requires_grad_(False)
        self.scale = nn.Parameter(torch.rand(1))
        self.head = nn.Linear(6, ROWS, bias=False)
        self.head.weight = self.embed.weight
        if with_unused:
            self.unused = nn.Linear(6, 5)
        if with_adapters:
            self.requires_grad_(False)
            self.layers = nn.ModuleList(LoraLinear(layer, Lora(rank=2, alpha=4)) for layer in layers)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        hidden = self.norm(hidden) * self.scale
        loss: Tensor = self.head(hidden).square().mean() + self.frozen(hidden).sum()
        return loss


@dataclass
class Trainee:
    """A wrapped network with its optimizer, its scheduler and its place in the data."""

    model: nn.Module
    optimizer: AdamW
    scheduler: LambdaLR
    place: dict[Any, Any]

    @classmethod
    def make(cls, wrapper: str, seed: int, **options: bool) -> Trainee:
        model = wrap(Network(seed, **options), wrapper)
        named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        groups = [
            {"params": [parameter for name, parameter in named if name.endswith("weight")], "weight_decay": 0.1},
            {"params": [parameter for name, parameter in named if not name.endswith("weight")], "weight_decay": 0.0},
        ]
        optimizer = AdamW([group for group in groups if group["params"]], lr=0.01 * (seed + 1))
        return cls(model, optimizer, LambdaLR(optimizer, lambda step: 1 / (1 + step)), {})

    def learn(self, steps: int) -> list[float]:
        """The losses of some steps, all ranks on the same batch: so FSDP's mean gradient is a plain model's."""
        losses = []
        for step in range(steps):
            loss = self.model(torch.arange(ROWS).roll(step))
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            losses.append(float(loss.detach()))
            self.place = {"epoch": step, 7: {}, "seen": [step, (1, "two")], "weights": torch.full((2,), float(step))}
        return losses

    def compare(self, other: Trainee) -> list[str]:
        """What another has otherwise."""
        wrong = differing(self.tensors(), other.tensors())
        for what in ("scheduler", "place", "groups"):
            if getattr(self, f"_{what}")() != getattr(other, f"_{what}")():
                wrong.append(what)
        return wrong

    def _scheduler(self) -> object:
        return self.scheduler.state_dict()

    def _place(self) -> object:
        return {**self.place, "weights": self.place["weights"].tolist()}

    def _groups(self) -> object:
        return [
            {key: value for key, value in group.items() if key != "params"} for group in self.optimizer.param_groups
        ]

    def state(self) -> dict[str, Any]:
        """What goes to `save` and `load` besides model and optimizer."""
        return {"scheduler": self.scheduler, "place": self.place}

    def tensors(self) -> Tensors:
        """Every tensor of model and optimizer, whole, by its name; read without the code under test."""
        with warnings.catch_warnings(action="ignore"):
            return self._tensors()

    def _tensors(self) -> Tensors:
        if isinstance(self.model, FullyShardedDataParallel):
            with FullyShardedDataParallel.summon_full_params(self.model):
                found = {name: value.detach().clone() for name, value in everything(self.model)}
        else:
            found = {name: whole(value) for name, value in everything(self.model)}
        state: Any = get_optimizer_state_dict(self.model, self.optimizer)["state"] if self._has_stepped() else {}
        return {
            **{name.replace("_fsdp_wrapped_module.", ""): value for name, value in found.items()},
            **{f"{key} of {name}": whole(value) for name, entry in state.items() for key, value in entry.items()},
        }

    def _has_stepped(self) -> bool:
        """Whether the optimizer of any rank has a state: that of a rank is empty if its shards of FSDP1 are."""
        count = torch.tensor(len(self.optimizer.state))
        if dist.is_initialized():
            dist.all_reduce(count)
        return bool(count)


def everything(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]


def whole(tensor: Tensor) -> Tensor:
    """A tensor gathered on every rank."""
    if isinstance(tensor, DTensor):
        return tensor.full_tensor().detach().clone()
    if not isinstance(tensor, ShardedTensor):
        return tensor.detach().clone()
    gathered = torch.zeros(tensor.size())
    for shard in tensor.local_shards():
        start, size = shard.metadata.shard_offsets[0], shard.metadata.shard_sizes[0]
        gathered[start : start + size] = shard.tensor
    dist.all_reduce(gathered, group=tensor._process_group)
    return gathered


def differing(found: Tensors, expected: Tensors) -> list[str]:
    """The names that only one side has, or that are not equal to the bit."""
    return sorted(
        name
        for name in found.keys() | expected.keys()
        if name not in found or name not in expected or not torch.equal(found[name], expected[name])
    )


def wrap(network: Network, wrapper: str) -> nn.Module:
    """`plain`, `fsdp2`, `hsdp2`, or FSDP1 as `fsdp1 STRATEGY` with a device mesh, `fsdp1 STRATEGY bare` without."""
    if wrapper == "plain":
        return network
    world = dist.get_world_size()
    hybrid = wrapper == "hsdp2" or "HYBRID" in wrapper
    shape, names = ((2, world // 2), ("replicate", "shard")) if hybrid else ((world,), ("shard",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    if not wrapper.startswith("fsdp1"):
        for layer in (*network.layers, network):
            fully_shard(layer, mesh=mesh)
        return network
    _, strategy, *bare = wrapper.split()
    options: dict[str, Any] = {
        "device_id": CPU,
        "use_orig_params": True,
        "sharding_strategy": ShardingStrategy[strategy],
        "device_mesh": None if bare else mesh,
    }
    with warnings.catch_warnings(action="ignore"):  # NO_SHARD is deprecated
        for index, layer in enumerate(network.layers):
            network.layers[index] = FullyShardedDataParallel(layer, **options)
        return FullyShardedDataParallel(network, **options)

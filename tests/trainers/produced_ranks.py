"""Directories with a file of torch.save for each rank, made by torch and Accelerate on gloo ranks.

Each producer makes several in one run, and returns the live state by `DIRECTORY/NAME`: weights as the model calls them,
and moments as `NAME.exp_avg`.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817 - as all call it
from torch.distributed.fsdp import ShardedOptimStateDictConfig, ShardedStateDictConfig, StateDictType, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.producers import Truth, _on_ranks

CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 7)
        self.down = nn.Linear(7, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """A model with sizes that no number of ranks divides, a tensor with one row, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.layers = nn.ModuleList([Block(), Block()])
        self.gate = nn.Linear(6, 1, bias=False)
        self.head = nn.Linear(6, 13, bias=False)
        self.register_buffer("freqs", torch.arange(3.0))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x) * torch.sigmoid(self.gate(x))
        return self.head(x)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range = range(2)) -> list[float]:
    """The losses of a few steps, on tokens that only the step decides."""
    losses = []
    for step in steps:
        x = torch.randint(0, 13, (4, 5), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def sharded(names: tuple[str, ...] = ("fsdp",), shape: tuple[int, ...] | None = None) -> Model:
    """A model under FSDP2, on a mesh of all ranks."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", shape or (dist.get_world_size(),), mesh_dim_names=names)
    model = Model()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def wrapped(**options: Any) -> FSDP:
    """A model under FSDP1."""
    torch.manual_seed(0)
    return FSDP(Model(), auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=CPU, **options)


def save(root: Path, model: nn.Module, optimizer: torch.optim.Optimizer, *, version: int = 2) -> None:
    """Save as verl does: model, optimizer and the rest, each rank its own files."""
    root.mkdir(parents=True, exist_ok=True)
    rank, world = dist.get_rank(), dist.get_world_size()
    for_model, for_optimizer = ShardedStateDictConfig(), ShardedOptimStateDictConfig()
    state = FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, for_model, for_optimizer)
    with state if version == 1 else contextlib.nullcontext():
        torch.save(model.state_dict(), root / f"model_world_size_{world}_rank_{rank}.pt")
        torch.save(optimizer.state_dict(), root / f"optim_world_size_{world}_rank_{rank}.pt")
    extra = {
        "lr_scheduler": {"last_epoch": 2, "_last_lr": [0.01]},
        "rng": {"cpu": torch.get_rng_state(), "random": rank},
    }
    torch.save(extra, root / f"extra_state_world_size_{world}_rank_{rank}.pt")
    if rank == 0:
        (root / "fsdp_config.json").write_text(json.dumps({"FSDP_version": version, "world_size": world}))
        (root / "huggingface").mkdir(exist_ok=True)
        (root / "huggingface" / "config.json").write_text(json.dumps({"model_type": "tiny", "vocab_size": 13}))


def whole(tensor: Tensor) -> Tensor:
    if isinstance(tensor, ShardedTensor):
        shards: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(shards, [(s.metadata.shard_offsets, s.tensor) for s in tensor.local_shards()])
        full = torch.empty(tensor.size(), dtype=tensor.dtype)
        for start, shard in (one for found in shards for one in found):
            full[tuple(slice(a, a + n) for a, n in zip(start, shard.shape, strict=True))] = shard
        return full
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def truth_of(place: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> Truth:
    """The live state, by names that begin with the directory's."""
    found = {name: whole(tensor) for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for what, moment in optimizer.state.get(parameter, {}).items():
            found[f"{name}.{what}"] = whole(moment)
    return {f"{place}/{name}": tensor for name, tensor in found.items()}


def truth_of_wrapped(place: str, model: FSDP, optimizer: torch.optim.Optimizer) -> Truth:
    """The live state of FSDP1, from its shards: gathered whole on a CPU it has one moment in place of another."""
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        found = dict(model.state_dict())
        state = FSDP.optim_state_dict(model, optimizer)["state"]
    names: list[Any] = [None] * dist.get_world_size()  # a rank has none of a parameter of which it has no part
    dist.all_gather_object(names, {name: list(moments) for name, moments in state.items()})
    assert all(other == names[0] for other in names), names
    found |= {f"{name}.{what}": moment for name, moments in state.items() for what, moment in moments.items()}
    return {f"{place}/{name}": whole(tensor) for name, tensor in found.items()}


# -- what is produced --------------------------------------------------------------------------------------------------


def two_ranks(root: Path) -> Truth:
    """FSDP2, FSDP1 in three ways, and HSDP, all on two ranks."""
    return _on_ranks(2, _two_ranks, root)


def _two_ranks(root: Path) -> Truth:
    truth: Truth = {}
    for place, model in (("fsdp2", sharded()), ("hsdp", sharded(("ddp", "fsdp"), (2, 1)))):
        optimizer = adamw(model)
        train(model, optimizer)
        save(root / place / "global_step_2" / "actor", model, optimizer)
        truth |= truth_of(place, model, optimizer)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    kinds: dict[str, dict[str, Any]] = {
        "units": {"use_orig_params": False},
        "orig": {"use_orig_params": True},
        "mesh": {"use_orig_params": True, "device_mesh": mesh},
    }
    for place, options in kinds.items():
        wrapper = wrapped(**options)
        optimizer = adamw(wrapper)
        train(wrapper, optimizer)
        save(root / place, wrapper, optimizer, version=1)
        truth |= truth_of_wrapped(place, wrapper, optimizer)
    return truth


def named_ranks(root: Path) -> Truth:
    """FSDP2 and FSDP1 on two ranks, with optimizers that were given names, in another order than the model's."""
    return _on_ranks(2, _named_ranks, root)


def _named_ranks(root: Path) -> Truth:
    def trained(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(reversed(list(model.named_parameters())), lr=1e-2)
        train(model, optimizer)
        return optimizer

    model = sharded()
    optimizer = trained(model)
    save(root / "fsdp2", model, optimizer)
    truth = truth_of("fsdp2", model, optimizer)
    for place, is_original in (("orig", True), ("units", False)):
        wrapper = wrapped(use_orig_params=is_original)
        optimizer = trained(wrapper)
        save(root / place, wrapper, optimizer, version=1)
        truth |= truth_of_wrapped(place, wrapper, optimizer)
    states = {"model": get_model_state_dict(wrapper), "optimizer": get_optimizer_state_dict(wrapper, optimizer)}
    dcp.save(states, checkpoint_id=root / "dcp")  # of the flat parameters
    return truth


def three_ranks(root: Path) -> Truth:
    """FSDP2 on three ranks, with groups of parameters that decay and others; and FSDP1, of which ranks hold pieces."""
    return _on_ranks(3, _three_ranks, root)


def _three_ranks(root: Path) -> Truth:
    model = sharded()
    matrices: list[Tensor] = [p for p in model.parameters() if p.ndim > 1]
    vectors: list[Tensor] = [p for p in model.parameters() if p.ndim == 1]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    grouped = torch.optim.AdamW(groups, lr=1e-2)
    train(model, grouped)
    save(root / "groups", model, grouped)
    truth = truth_of("groups", model, grouped)
    wrapper = wrapped(use_orig_params=True)
    optimizer = adamw(wrapper)
    train(wrapper, optimizer)
    save(root / "orig", wrapper, optimizer, version=1)
    return truth | truth_of_wrapped("orig", wrapper, optimizer)


def four_ranks(root: Path) -> Truth:
    """Two axes of two ranks: HSDP, and FSDP2 over tensor parallelism, which cuts uneven dimensions too."""
    return _on_ranks(4, _four_ranks, root)


def _four_ranks(root: Path) -> Truth:
    model = sharded(("ddp", "fsdp"), (2, 2))
    optimizer = adamw(model)
    train(model, optimizer)
    save(root / "hsdp", model, optimizer)
    truth = truth_of("hsdp", model, optimizer)
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    stack = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 6), nn.Linear(6, 8))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel(), "3": ColwiseParallel()}
    parallelize_module(stack, both["tp"], plan)
    fully_shard(stack, mesh=both["dp"])
    optimizer = adamw(stack)
    stack(torch.ones(2, 6)).pow(2).mean().backward()
    optimizer.step()
    save(root / "tp", stack, optimizer)
    return truth | truth_of("tp", stack, optimizer)


def one_rank(root: Path) -> Truth:
    """One rank alone, which has plain tensors."""
    return _on_ranks(1, _one_rank, root)


def _one_rank(root: Path) -> Truth:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 6))
    optimizer = adamw(model)
    model(torch.ones(2, 6)).pow(2).mean().backward()
    optimizer.step()
    save(root / "alone", model, optimizer)
    return truth_of("alone", model, optimizer)


def by_accelerate(root: Path) -> Truth:
    """Accelerate's own functions, without DCP: FSDP2 and FSDP1; it takes FSDP off by itself where there is no GPU."""
    return _on_ranks(2, _by_accelerate, root)


def _by_accelerate(root: Path) -> Truth:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import save_fsdp_model, save_fsdp_optimizer

    rank = str(dist.get_rank())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    accelerator = Accelerator(cpu=True)
    truth: Truth = {}
    for version, model in ((2, sharded()), (1, wrapped(use_orig_params=True))):
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=version,
            state_dict_type="SHARDED_STATE_DICT",
            reshard_after_forward=True if version == 2 else "FULL_SHARD",
            cpu_ram_efficient_loading=False,
        )
        optimizer = adamw(model)
        train(model, optimizer)
        place = f"fsdp{version}"
        (root / place / "checkpoint-7").mkdir(parents=True, exist_ok=True)
        save_fsdp_model(plugin, accelerator, model, str(root / place / "checkpoint-7"), use_dcp=False)
        save_fsdp_optimizer(plugin, accelerator, optimizer, model, str(root / place / "checkpoint-7"), use_dcp=False)
        if isinstance(model, FSDP):
            truth |= truth_of_wrapped(place, model, optimizer)
        else:
            truth |= truth_of(place, model, optimizer)
    return truth


# -- what is resumed ---------------------------------------------------------------------------------------------------

MORE = range(2, 5)


def resumed(ranks: int, root: Path, like: str) -> Truth:
    """The state that `ranks` load from files of their own as verl and Accelerate do, and the losses of more steps."""
    return _on_ranks(ranks, _resumed, root, like)


def _resumed(root: Path, like: str) -> Truth:
    rank, world = dist.get_rank(), dist.get_world_size()
    model = sharded(("ddp", "fsdp"), (world // 2, 2)) if like == "hsdp" else sharded()
    optimizer = adamw(model)
    if (root / "fsdp_config.json").exists():
        names = f"model_world_size_{world}_rank_{rank}.pt", f"optim_world_size_{world}_rank_{rank}.pt"
        extra = torch.load(root / f"extra_state_world_size_{world}_rank_{rank}.pt", weights_only=False)
        assert extra == {"lr_scheduler": {"last_epoch": 2, "_last_lr": [0.01]}}
    else:
        names = f"pytorch_model_fsdp_0_rank{rank}.bin", f"optimizer_0_rank{rank}.bin"
    state, numbers = (torch.load(root / name, weights_only=False) for name in names)
    model.load_state_dict(state)
    if isinstance(next(iter(numbers["state"])), str):
        set_optimizer_state_dict(model, optimizer, numbers)
    else:
        optimizer.load_state_dict(numbers)
    parameter: Any
    for parameter, moments in optimizer.state.items():  # on a mesh with process groups, which no file can bring along
        for what, moment in moments.items():
            if isinstance(moment, DTensor):
                moments[what] = DTensor.from_local(
                    moment.to_local(),
                    parameter.device_mesh,
                    moment.placements,
                    shape=moment.shape,
                    stride=moment.stride(),
                )
    truth = truth_of("resumed", model, optimizer)
    return truth | {"losses": torch.tensor(train(model, optimizer, MORE))}


def uninterrupted(_: Path) -> Truth:
    """The losses of one rank that is never stopped."""
    torch.manual_seed(0)
    model = Model()
    optimizer = adamw(model)
    train(model, optimizer)
    return {"losses": torch.tensor(train(model, optimizer, MORE))}


# -- flat parameters ---------------------------------------------------------------------------------------------------


def flat_parameters(root: Path) -> Truth:
    """Accelerate's LOCAL_STATE_DICT: flat parameters, with and without alignment, beside the optimizer's DCP."""
    return _on_ranks(3, _flat_parameters, root)


def _flat_parameters(root: Path) -> Truth:
    import torch.distributed.checkpoint as dcp

    truth: Truth = {}
    for place, orig in (("units", False), ("orig", True)):
        model = wrapped(use_orig_params=orig)
        optimizer = adamw(model)
        train(model, optimizer)
        (root / place).mkdir(parents=True, exist_ok=True)
        with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
            torch.save(model.state_dict(), root / place / f"pytorch_model_fsdp_rank{dist.get_rank()}.bin")
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            dcp.save({"optimizer": FSDP.optim_state_dict(model, optimizer)}, checkpoint_id=root / place / "optimizer_0")
        truth |= truth_of_wrapped(place, model, optimizer)
    return truth


FLAT_MODELS = {"llama": False, "tied": False, "orig": True, "whole": False, "gpt2": True, "by-hand": False}


def flat_by_config(root: Path) -> Truth:
    """Flat parameters of transformers' models beside their config.json, without an optimizer; wrapped in some ways."""
    return _on_ranks(2, _flat_by_config, root)


def _flat_by_config(root: Path) -> Truth:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    truth: Truth = {}
    sizes = {"hidden_size": 12, "intermediate_size": 14, "num_hidden_layers": 2, "num_attention_heads": 2}
    model: Any
    for place, orig in FLAT_MODELS.items():
        torch.manual_seed(0)
        if place == "gpt2":
            model = GPT2LMHeadModel(GPT2Config(n_embd=12, n_layer=2, n_head=2, vocab_size=17, n_positions=8))
        else:
            config = LlamaConfig(**sizes, vocab_size=17, num_key_value_heads=1, tie_word_embeddings=place == "tied")
            model = LlamaForCausalLM(config)
        policy = None if place == "whole" else ModuleWrapPolicy({LlamaDecoderLayer, GPT2Block})
        wrapped = FSDP(model, auto_wrap_policy=policy, device_id=CPU, use_orig_params=orig)
        (root / place).mkdir(parents=True, exist_ok=True)
        here = root / place / "checkpoint-3"
        name = f"pytorch_model_fsdp_rank{dist.get_rank()}.bin"
        with FSDP.state_dict_type(wrapped, StateDictType.LOCAL_STATE_DICT):
            if place == "by-hand":
                state = {"model": wrapped.state_dict(), "iteration": 3}
                torch.save(state, root / place / f"model_0000003.rank_{dist.get_rank()}.pth")
            else:
                here.mkdir(parents=True, exist_ok=True)
                torch.save(wrapped.state_dict(), here / name)
        with FSDP.state_dict_type(wrapped, StateDictType.FULL_STATE_DICT):
            full = wrapped.state_dict()
        tied = "lm_head.weight" if place in ("tied", "gpt2") else ""
        truth |= {f"{place}/{name}": value.detach().clone() for name, value in full.items() if name != tied}
        if dist.get_rank() == 0:
            model.config.architectures = [type(model).__name__]
            model.config.save_pretrained(root / place)
    return truth

"""Small checkpoints as the ranks of trainers leave them, written by plain torch after the trainers' own sources.

Each function writes to a directory what so many ranks save of the model at a step, and returns the tensors in it by
ckptkit's names; other values are nobody's business.
"""

from __future__ import annotations

import json
import pickle
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

Truth = dict[str, Tensor]
Make = Callable[[Path, Truth, int, int], Truth]  # of a directory, the model, the step and the number of ranks

OPTIMIZER = "optimizer.state"
_LR = 0.1


def moments(state: Truth) -> Truth:
    """What an optimizer has for each parameter."""
    return {name: value * 0.5 for name, value in state.items()}


def named(state: Truth) -> Truth:
    """The truth of a model and its moments by name."""
    averages = {f"{OPTIMIZER}.{name}.exp_avg": value for name, value in moments(state).items()}
    return {**{f"model.{name}": value for name, value in state.items()}, **averages}


def in_row(tensors: Iterable[Tensor], ranks: int) -> list[Tensor]:
    """The ranks' equal parts of tensors one after another, flattened, with padding at the end."""
    row = torch.cat([tensor.reshape(-1) for tensor in tensors])
    return list(nn.functional.pad(row, (0, -len(row) % (2 * ranks))).chunk(ranks))


def by_tensor(tensors: Iterable[Tensor], ranks: int) -> list[Tensor]:
    """What ranks have of tensors of which each is cut by itself, with padding at its end."""
    pieces = [nn.functional.pad(t.reshape(-1), (0, -t.numel() % ranks)).chunk(ranks) for t in tensors]
    return [torch.cat([piece[rank] for piece in pieces]) for rank in range(ranks)]


def save(value: object, path: Path) -> None:
    """Save by torch, each tensor with a storage to itself."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(apart(value), path)


def apart(value: object) -> Any:
    """The value with copies of its tensors."""
    if isinstance(value, Tensor):
        return value.detach().clone(memory_format=torch.contiguous_format)
    if isinstance(value, Mapping):
        return {key: apart(member) for key, member in value.items()}
    return [apart(member) for member in value] if type(value) is list else value


# -- flat partitions ---------------------------------------------------------------------------------------------------


def model_states(state: Truth, step: int, ranks: int, *, is_empty: bool) -> dict[str, Any]:
    """DeepSpeed's model states, with the 16-bit copy, or empty tensors where ZeRO 3 has taken these."""
    module = {name: torch.empty(0) if is_empty else value.bfloat16() for name, value in state.items()}
    shapes = {name: value.shape for name, value in state.items()}
    return {"module": module, "param_shapes": [shapes], "global_steps": step, "dp_world_size": ranks}


def zero2(root: Path, state: Truth, step: int, ranks: int) -> Truth:
    """DeepSpeed's ZeRO 2."""
    save(model_states(state, step, ranks, is_empty=False), root / "mp_rank_00_model_states.pt")
    flat = zip(in_row(state.values(), ranks), in_row(moments(state).values(), ranks), strict=True)
    for rank, (masters, averages) in enumerate(flat):
        base = {"state": {0: {"step": step, "exp_avg": averages}}, "param_groups": [{"lr": _LR, "params": [0]}]}
        groups = {"single_partition_of_fp32_groups": [masters], "partition_count": [ranks]}
        saved = {"zero_stage": 2, "base_optimizer_state": base, **groups}
        save({"optimizer_state_dict": saved}, root / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return named(state)


def zero3(root: Path, state: Truth, step: int, ranks: int) -> Truth:
    """DeepSpeed's ZeRO 3."""
    flat = zip(by_tensor(state.values(), ranks), by_tensor(moments(state).values(), ranks), strict=True)
    for rank, (masters, averages) in enumerate(flat):
        name = f"zero_pp_rank_{rank}_mp_rank_00"
        save(model_states(state, step, ranks, is_empty=True), root / f"{name}_model_states.pt")
        inner = {"state": {0: {"step": step, "exp_avg": averages}}, "param_groups": [{"lr": _LR, "params": [0]}]}
        saved = {"zero_stage": 3, "optimizer_state_dict": inner, "fp32_flat_groups": [masters]}
        save({"optimizer_state_dict": {**saved, "partition_count": ranks}}, root / f"{name}_optim_states.pt")
    return named(state)


def universal(root: Path, state: Truth, step: int, ranks: int) -> Truth:
    """DeepSpeed's universal checkpoint."""
    save(model_states(state, step, ranks, is_empty=False), root / "mp_rank_00_model_states.pt")
    averages = moments(state)
    for name, value in state.items():
        for what, tensor in (("fp32", value), ("exp_avg", averages[name])):
            save({"param": tensor, "cat_dim": 0}, root / "zero" / name / f"{what}.pt")
    save({"param_groups": [{"lr": _LR, "params": [0]}]}, root / "zero" / "optimizer_state.pt")
    return named(state)


def ranks(root: Path, state: Truth, step: int, _: int) -> Truth:
    """Files of ranks with DTensors, by every rank of a process group."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))

    def spread(tensors: Truth) -> dict[str, Any]:
        return {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in tensors.items()}

    root.mkdir(exist_ok=True, parents=True)
    states = {name: {"exp_avg": value, "step": step} for name, value in spread(moments(state)).items()}
    optimizer = {"state": states, "param_groups": [{"lr": _LR, "params": list(state)}]}
    torch.save(spread(state), root / f"model_world_size_{world}_rank_{rank}.pt")
    torch.save(optimizer, root / f"optim_world_size_{world}_rank_{rank}.pt")
    return named(state)


def items(root: Path, state: Truth, step: int, ranks: int) -> Truth:
    """The items of torch_checkpointing: a model in shards, and each rank's file of the rest."""
    spread = {
        (name,): [
            {
                "ranks": list(range(ranks)),
                "sharding_metadata": {
                    "type": "DTensorShardingMetadata",
                    "data": {
                        "global_shape": list(value.shape),
                        "mesh_spec": {"mesh_shape": [ranks], "mesh_data": list(range(ranks))},
                        "placements": [{"type": "Shard", "dim": 0}],
                    },
                },
            }
        ]
        for name, value in state.items()
    }
    for rank in range(ranks):
        save({name: value.chunk(ranks)[rank] for name, value in state.items()}, root / f"model_{rank}.pt")
        save({"step": step}, root / f"progress_{rank}.pt")
    model = {"nested_path_to_metadata": spread, "rank_to_layout_info": {}}
    metadata = {"version": "2.0", "world_size": ranks, "metadata": {"model": model}}
    (root / "metadata.pkl").write_bytes(pickle.dumps(metadata))
    return {f"model.{name}": value for name, value in state.items()}


def bins(root: Path, state: Truth, _: int, ranks: int) -> Truth:
    """A model in several files of torch.save, with an index."""
    names = [f"pytorch_model-{i + 1:05d}-of-{ranks:05d}.bin" for i in range(ranks)]
    places = {name: names[i % ranks] for i, name in enumerate(state)}
    for file in names:
        save({name: value for name, value in state.items() if places[name] == file}, root / file)
    (root / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return state


# -- parts that are joined by rules ------------------------------------------------------------------------------------


def part(value: Tensor, axis: int | None, rank: int, ranks: int) -> Tensor:
    """What a rank has of a tensor that is cut along an axis, or that all have."""
    return value if axis is None else value.chunk(ranks, axis)[rank]


def megatron(root: Path, _: Truth, step: int, ranks: int) -> Truth:
    """Megatron's files of tensor-parallel ranks."""
    layer = "decoder.layers.0"
    state: dict[str, tuple[Tensor, int | None]] = {
        "embedding.word_embeddings.weight": (torch.randn(48, 12), 0),
        f"{layer}.self_attention.linear_qkv.weight": (torch.randn(36, 12), 0),
        f"{layer}.self_attention.linear_proj.weight": (torch.randn(12, 12), 1),
        f"{layer}.mlp.linear_fc1.weight": (torch.randn(24, 12), 0),
        f"{layer}.mlp.linear_fc2.weight": (torch.randn(12, 24), 1),
        "decoder.final_layernorm.weight": (torch.randn(12), None),
    }
    sizes = {"tensor_model_parallel_size": ranks, "pipeline_model_parallel_size": 1, "expert_model_parallel_size": 1}
    for rank in range(ranks):
        model = {name: part(value, axis, rank, ranks) for name, (value, axis) in state.items()}
        saved = {"model": model, "iteration": step, "checkpoint_version": 3.0, "args": Namespace(**sizes)}
        save(saved, root / f"mp_rank_{rank:02d}" / "model_optim_rng.pt")
    return {f"model.{name}": value for name, (value, _) in state.items()}


def meta(root: Path, _: Truth, __: int, ranks: int) -> Truth:
    """Meta's files of ranks."""
    state: dict[str, tuple[Tensor, int | None]] = {
        "tok_embeddings.weight": (torch.randn(48, 12), 0),
        "layers.0.attention.wq.weight": (torch.randn(12, 12), 0),
        "layers.0.attention.wo.weight": (torch.randn(12, 12), 1),
        "norm.weight": (torch.randn(12), None),
        "output.weight": (torch.randn(48, 12), 0),
    }
    for rank in range(ranks):
        model = {name: part(value, axis, rank, ranks) for name, (value, axis) in state.items()}
        save(model, root / f"consolidated.{rank:02d}.pth")
    (root / "params.json").write_text(json.dumps({"dim": 12, "n_heads": 6, "vocab_size": 48}))
    return {name: value for name, (value, _) in state.items()}


MAKERS: dict[str, Make] = {
    make.__name__: make for make in (zero2, zero3, universal, ranks, items, bins, megatron, meta)
}
OWN_NAMES = frozenset({"megatron", "meta"})  # whose weights have other names than the model's in the Hub

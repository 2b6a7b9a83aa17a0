"""Small checkpoints of the trainers and libraries that came up in 2026.

Written by one process with torch and tensorstore, after the sources that the suite's own producers name.
"""

from __future__ import annotations

import json
import re
import warnings
from argparse import Namespace
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from tests.faults.trained import MAKERS as EARLIER
from tests.faults.trained import OWN_NAMES as EARLIER_NAMES
from tests.faults.trained import Make, Truth, in_row, model_states, moments, part, save
from tests.plugins.orbax.trees import metadata_of, save_array


def save_dcp(state: Mapping[str, Any], root: Path, *, flat: bool = True) -> None:
    """Save by DCP in two files; without a nesting of keys unless it is `flat`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        writer = FileSystemWriter(root, thread_count=2)
        dcp.save(dict(state), storage_writer=writer, planner=DefaultSavePlanner(flatten_state_dict=flat), no_dist=True)


def flat_names(state: Mapping[str, Any], prefix: str) -> Truth:
    """Tensors by their names below a prefix."""
    return {f"{prefix}.{name}": value for name, value in state.items()}


def of_muon(state: Truth) -> tuple[dict[str, Any], Truth]:
    """The states of Muon for matrices and of AdamW for the rest, and their truth below `state`."""
    names = {name: "momentum_buffer" if value.ndim == 2 else "exp_avg" for name, value in state.items()}
    found = {name: {names[name]: value} for name, value in moments(state).items()}
    return found, {f"state.{name}.{names[name]}": value for name, value in moments(state).items()}


# -- DCP in trees ------------------------------------------------------------------------------------------------------


def prime(root: Path, state: Truth, step: int, ranks: int) -> Truth:
    """prime-rl: all of it under `app`, with Muon and AdamW, and beside it what each rank's loader has."""
    states, truth = of_muon(state)
    app = {"model": state, "optimizers": {"state": states}, "scheduler": {"last": step}, "progress": {"step": step}}
    save_dcp({"app": app}, root / "trainer")
    for rank in range(ranks):
        save({"rows": rank}, root / "trainer" / "dataloader" / f"rank_{rank}.pt")
    return flat_names(state, "app.model") | flat_names(truth, "app.optimizers")


def miles(root: Path, state: Truth, step: int, _: int) -> Truth:
    """Miles with FSDP: a DCP directory each for model, optimizer and scheduler; a state of Dion has another shape."""
    states = {name: {"momentum": value, "Q": torch.ones(value.shape[-1], 3)} for name, value in moments(state).items()}
    save_dcp({"model_state": {"model": state}}, root / "model")
    save_dcp({"optim_state": {"optim": {"state": states}}}, root / "optimizer")
    save_dcp({"lr_scheduler_state": {"lr_scheduler": {"last_epoch": step}}}, root / "lr_scheduler")
    save({"torch": torch.get_rng_state()}, root / "rng.pt")
    (root / "meta.json").write_text(json.dumps({"iteration": step, "world_size": 2}))
    under = "optim_state.optim.state"
    truth = {f"{under}.{name}.{what}": value for name, each in states.items() for what, value in each.items()}
    return flat_names(state, "model_state.model") | truth


def automodel(root: Path, state: Truth, step: int, _: int) -> Truth:
    """NeMo Automodel: a model in safetensors of ranks, the optimizer in DCP, and files that tell who wrote it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = HuggingFaceStorageWriter(str(root / "model"), dict.fromkeys(state, 1), save_distributed=True)
        dcp.save(dict(state), storage_writer=writer, no_dist=True)
    states = {f"state.{name}.exp_avg": value for name, value in moments(state).items()}
    save_dcp({"optim": states, "sched": {"num_steps": step}}, root / "optim")
    save({"rows": 0}, root / "dataloader" / "dataloader_dp_rank_0.pt")
    (root / "losses.json").write_text(json.dumps({"train_loss": 1.5}))
    return state | flat_names(states, "optim")


def core(root: Path, _: Truth, step: int, __: int) -> Truth:
    """Megatron core 0.20: names without key paths, and what all ranks have in common in an entry of the shards."""
    layers = "decoder.layers"
    state = {
        "embedding.word_embeddings.weight": torch.randn(48, 12),
        f"{layers}.self_attention.linear_qkv.weight": torch.randn(2, 36, 12),
        f"{layers}.mlp.linear_fc2.weight": torch.randn(2, 12, 24),
        "decoder.final_layernorm.weight": torch.randn(12),
    }
    averages = {f"optimizer.state.exp_avg.{name}": value for name, value in moments(state).items()}
    common = [{"iteration": step, "checkpoint_version": 3.0}]
    save_dcp({**state, **averages, "common_state/shard_0_1": common}, root, flat=False)
    (root / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    return state | averages


class Uneven(Tensor):
    """A tensor in two boxes of rows, the first of one row: Megatron-FSDP's flat buffers cut parameters like that."""

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        return [self.write_item(name, first, end) for first, end in pairwise((0, 1, len(self)))]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        rows = self.as_subclass(Tensor)
        return rows[1:] if index.offset and index.offset[0] else rows[:1]

    def write_item(self, name: str, first: int, end: int) -> WriteItem:
        """What a rank that has these rows hands to DCP."""
        above = self.shape[1:]
        box = ChunkStorageMetadata(torch.Size([first, *[0] * len(above)]), torch.Size([end - first, *above]))
        data = TensorWriteData(box, TensorProperties(self.dtype), self.shape)
        return WriteItem(MetadataIndex(name, box.offsets), WriteItemType.SHARD, tensor_data=data)


def fsdp_dtensor(root: Path, _: Truth, step: int, __: int) -> Truth:
    """Megatron-FSDP of core 0.20: DCP of uneven rows, with the optimizer's groups by parameter.

    A gated layer is two tensors in the model and in the states, and one parameter in the map of groups.
    """
    layer = "decoder.layers.0"
    state = {
        "embedding.word_embeddings.weight": torch.randn(48, 12),
        f"{layer}.self_attention.linear_qkv.weight": torch.randn(36, 12),
        f"{layer}.mlp.linear_fc1.weight_w": torch.randn(24, 12),
        f"{layer}.mlp.linear_fc1.weight_v": torch.randn(24, 12),
        f"{layer}.mlp.linear_fc2.weight": torch.randn(12, 24),
        "decoder.final_layernorm.weight": torch.randn(12),
    }
    model = {f"module.{name}": value for name, value in state.items()}
    states = {f"module.module.module.{name}": value for name, value in moments(state).items()}
    groups = {name.removesuffix("_w").removesuffix("_v"): {"lr": 0.1, "step": step} for name in states}
    averages = {name: {"exp_avg": value.as_subclass(Uneven)} for name, value in states.items()}
    saved = {
        "model": {name: value.as_subclass(Uneven) for name, value in model.items()},
        "optimizer": {"state": averages, "param_to_group_meta": groups},
        "rng_state": {"(0, 0)": [{"np_rng_state": "MT19937"}]},
    }
    save_dcp({**saved, "args": Namespace(num_layers=1), "checkpoint_version": 3.0, "iteration": step}, root)
    truth = {f"optimizer.state.{name}.exp_avg": value for name, value in states.items()}
    return flat_names(model, "model") | truth


# -- DeepSpeed ---------------------------------------------------------------------------------------------------------


AXES = {"up": 0, "down": 1}  # along which AutoTP cuts matrices


def strides(shape: tuple[int, ...]) -> list[int]:
    """Those of a tensor in row-major order."""
    return list(torch.empty(shape).stride())


def affine_map(value: Tensor, axis: int | None, slices: int) -> dict[str, Any]:
    """What AutoTP's map says of a parameter that is cut along an axis, or that all have."""
    said: dict[int, Any] = {}
    for rank in range(slices):
        own = part(value, axis, rank, slices)
        first = 0 if axis is None else sum(part(value, axis, i, slices).shape[axis] for i in range(rank))
        offset = 0 if axis is None else first * value.stride(axis)
        piece = {
            "shape": list(own.shape),
            "source": [offset, strides(tuple(value.shape))],
            "dest": [0, strides(tuple(own.shape))],
            "locations": list(range(slices)) if axis is None else [rank],
        }
        said[rank] = {"shard_shape": list(own.shape), "pieces": [piece]}
    return {"logical_shape": list(value.shape), "ranks": said}


def auto_tp(root: Path, state: Truth, step: int, ranks: int) -> Truth:
    """DeepSpeed's AutoTP with ZeRO 2: slices of two ranks of tensors, by others of data, and the map of the slices."""
    axes = {name: AXES.get(name.split(".")[-2]) if value.ndim == 2 else None for name, value in state.items()}
    params = {f"^{re.escape(name)}$": affine_map(value, axes[name], 2) for name, value in state.items()}
    info = {"affine_map": {"version": 1, "params": params}}
    for tensor in range(2):
        own = {name: part(value, axes[name], tensor, 2).contiguous() for name, value in state.items()}
        saved = model_states(own, step, ranks, is_empty=False) | {"universal_checkpoint_info": info}
        saved |= {"checkpoint_parallel_dimensions": {"tp_degree": 2}, "mp_world_size": 2}
        save(saved, root / f"mp_rank_{tensor:02d}_model_states.pt")
        flat = zip(in_row(own.values(), ranks), in_row(moments(own).values(), ranks), strict=True)
        for rank, (masters, averages) in enumerate(flat):
            base = {"state": {0: {"step": step, "exp_avg": averages}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
            groups = {"single_partition_of_fp32_groups": [masters], "partition_count": [ranks]}
            optimizer = {"zero_stage": 2, "base_optimizer_state": base, **groups}
            save(
                {"optimizer_state_dict": optimizer}, root / f"zero_pp_rank_{rank}_mp_rank_{tensor:02d}_optim_states.pt"
            )
    named = {f"optimizer.state.{name}.exp_avg": value for name, value in moments(state).items()}
    return flat_names(state, "model") | named


def auto_ep(root: Path, state: Truth, step: int, ranks: int) -> Truth:
    """DeepSpeed's AutoEP without an optimizer: a file for each expert, of a layer of four that two ranks have."""
    prefix, experts = "layers.0.mlp.experts", 4
    fused = {f"{prefix}.{name}": torch.randn(experts, 5, 6) for name in ("w1", "w2", "w3")}
    layer = {"expert_key_prefix": prefix, "num_experts": experts, "ep_size": 2, "num_local_experts": 2}
    saved = {"module": dict(state), "ds_autoep_layers": [layer], "num_experts": [experts], "dp_world_size": ranks}
    save({**saved, "global_steps": step}, root / "mp_rank_00_model_states.pt")
    for expert in range(experts):
        own = {f"{name}.{expert}": value[expert] for name, value in fused.items()}
        save(own, root / f"layer_0_expert_{expert}_mp_rank_00_model_states.pt")
    return flat_names({**state, **fused}, "model")


# -- orbax -------------------------------------------------------------------------------------------------------------


def save_orbax(root: Path, state: Truth, driver: str, *, is_ocdbt: bool) -> Truth:
    """A tree of orbax with the model, and an optimizer's averages."""
    truth = flat_names(state, "params") | flat_names(moments(state), "opt_state.mu")
    root.mkdir(parents=True)
    ways = {tuple(name.split(".")): "jax.Array" for name in truth}
    (root / "_METADATA").write_text(json.dumps(metadata_of(ways, driver, is_ocdbt=is_ocdbt)))
    (root / "_CHECKPOINT_METADATA").write_text('{"init_timestamp_nsecs": 1, "commit_timestamp_nsecs": 2}')
    for name, value in truth.items():
        grid = tuple(-(-extent // 2) for extent in value.shape)
        save_array(root, name, value.numpy(), "float32", grid, driver, is_ocdbt=is_ocdbt)
    return truth


def ocdbt(root: Path, state: Truth, _: int, __: int) -> Truth:
    """A tree of orbax as it is by default but for zarr 3: all arrays in one database."""
    return save_orbax(root, state, "zarr3", is_ocdbt=True)


def zarr(root: Path, state: Truth, _: int, __: int) -> Truth:
    """A tree of orbax in zarr 2, a directory for each array."""
    return save_orbax(root, state, "zarr", is_ocdbt=False)


TREES: dict[str, Make] = {
    make.__name__: make for make in (prime, miles, automodel, core, fsdp_dtensor, auto_tp, auto_ep, ocdbt, zarr)
}
MAKERS = EARLIER | TREES
OWN_NAMES = EARLIER_NAMES | {"core", "fsdp_dtensor", "ocdbt", "zarr"}

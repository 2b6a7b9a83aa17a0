"""Checkpoints of Megatron-Core on 2 gloo ranks: `torch_dist`, and the legacy directories of ranks, of the same models.

The library asks CUDA for a device in many places and forks its writers; both are replaced. What the whole model is says
the library itself: each checkpoint that two tensor-parallel ranks wrote is loaded by it into a model that is not split.
"""

from __future__ import annotations

import os
import queue
import threading
from argparse import Namespace
from collections.abc import Iterator, Mapping
from itertools import product
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.producers import Truth, _on_ranks

STEP = "iter_0000003"
GATED = {"gated_linear_unit": True, "activation_func": nn.functional.silu, "add_bias_linear": False}
MOE = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_grouped_gemm": False, "add_bias_linear": False}
VARIANTS: dict[str, dict[str, Any]] = {"dense": {}, "swiglu": GATED, "moe": {**MOE, **GATED}, "tied": GATED}


def megatron(root: Path) -> Truth:
    """Models by variant, tensor-parallel over 2 ranks, and `stages` and `virtual`, over 2 pipeline stages.

    The truth has `VARIANT:NAME` for each tensor of a whole model, and `VARIANT:NAME:exp_avg` of its optimizer.
    """
    return _on_ranks(2, _save_all, root)


def _save_all(root: Path) -> Mapping[str, Any]:
    _replace_what_needs_a_gpu()
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    for variant in VARIANTS:
        _save_tensor_parallel(root / variant, variant)
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel()
    truth = {key: value for variant in VARIANTS for key, value in _load_whole(root / variant, variant)}
    parallel_state.destroy_model_parallel()
    truth |= _save_stages(root / "stages", "stages", None)
    parallel_state.destroy_model_parallel()
    return truth | _save_stages(root / "virtual", "virtual", 2)


def _replace_what_needs_a_gpu() -> None:
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda *_, **__: None
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    import megatron.core.dist_checkpointing.strategies.filesystem_async as writers

    context = SimpleNamespace(Queue=queue.Queue, JoinableQueue=queue.Queue, SimpleQueue=queue.SimpleQueue)
    context.Process, context.Manager, context.get_context = threading.Thread, lambda: context, lambda *_: context
    writers.mp = context  # a fork of a process with gloo's threads hangs


def _config(variant: str, layers: int = 2, **more: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=layers,
        hidden_size=16,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=24,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        **{**VARIANTS.get(variant, {}), **more},
    )


def _model(config: Any, variant: str, **more: Any) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    return GPTModel(
        config,
        get_gpt_layer_local_spec(num_experts=config.num_moe_experts, normalization=None),
        vocab_size=64,
        max_sequence_length=16,
        share_embeddings_and_output_weights=variant == "tied",
        position_embedding_type="rope",
        **more,
    )


def _optimizer(model: nn.Module) -> torch.optim.AdamW:
    """Make one step. Parameters that are not split, which every rank has, stay the same on all ranks."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.randn_like(parameter)
        if not getattr(parameter, "tensor_model_parallel", False):
            alike = torch.Generator().manual_seed(number)
            for values in (parameter.data, parameter.grad):
                values.copy_(torch.randn(values.shape, generator=alike))
    optimizer.step()
    return optimizer


def _sharded(model: Any, optimizer: torch.optim.AdamW) -> dict[str, Any]:
    """What is given to the library to save or to load: the model, and the optimizer the way of one not distributed."""
    from megatron.core.dist_checkpointing import optimizer as sharding

    moments = optimizer.state_dict()
    by_number = sharding.get_param_id_to_sharded_param_map(model.sharded_state_dict(), model.parameters())
    sharding.optim_state_to_sharding_state(moments, by_number, exclude_keys=("step",))
    return {"model": model.sharded_state_dict(), "optimizer": moments, "iteration": 3, "checkpoint_version": 3.0}


def _args(config: Any, tensor: int, pipeline: int, virtual: int | None = None) -> Namespace:
    """The part of the library's arguments that says how the model is split."""
    return Namespace(
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        virtual_pipeline_model_parallel_size=virtual,
        expert_model_parallel_size=1,
        num_layers=config.num_layers,
        swiglu=config.gated_linear_unit,
        bf16=False,
    )


def _save_tensor_parallel(root: Path, variant: str) -> None:
    from megatron.core import dist_checkpointing as library

    rank = dist.get_rank()
    torch.manual_seed(1 + rank)
    config = _config(variant)
    model = _model(config, variant)
    optimizer = _optimizer(model)
    there, legacy = root / "torch_dist", root / "legacy" / STEP / f"mp_rank_{rank:02d}"
    (there / STEP).mkdir(parents=True, exist_ok=True)
    legacy.mkdir(parents=True, exist_ok=True)
    args = _args(config, 2, 1)
    common = {"iteration": 3, "checkpoint_version": 3.0, "args": args}
    library.save({**_sharded(model, optimizer), "args": args}, str(there / STEP))
    state = {"model": model.state_dict_for_save_checkpoint(), "optimizer": optimizer.state_dict()}
    torch.save({**common, **state, "rng_state": [{"random": rank}]}, legacy / "model_optim_rng.pt")
    _track(there, root / "legacy")


def _track(*runs: Path) -> None:
    if dist.get_rank() == 0:
        for run in runs:
            (run / "latest_checkpointed_iteration.txt").write_text("3")


def _load_whole(root: Path, variant: str) -> Iterator[tuple[str, Tensor]]:
    from megatron.core import dist_checkpointing as library

    model = _model(_config(variant), variant)
    optimizer = _optimizer(model)
    loaded = library.load(_sharded(model, optimizer), str(root / "torch_dist" / STEP))
    for name, value in loaded["model"].items():
        if isinstance(value, Tensor):
            yield f"{variant}:{name}", value
    for (name, _), state in zip(model.named_parameters(), loaded["optimizer"]["state"].values(), strict=True):
        for moment in ("exp_avg", "exp_avg_sq"):
            yield f"{variant}:{name}:{moment}", state[moment]


def model_space(root: Path) -> Truth:
    """Moments that lie flattened in a grid, as core 0.12 wrote them: 2 layers x 2 ranks of tensors, over 2 of data."""
    return _on_ranks(2, _save_model_space, root)


def _save_model_space(root: Path) -> Mapping[str, Any]:
    import torch.distributed.checkpoint as dcp

    state: dict[str, Any] = {}
    truth: dict[str, Tensor] = {}
    for name, shape, part in (
        ("fc1.weight", (2, 8, 6), (1, 4, 6)),
        ("fc2.weight", (2, 6, 8), (1, 6, 4)),
        ("b", (7,), (7,)),
    ):
        parameter, moment = torch.randn(shape), torch.randn(shape)
        truth |= {name: parameter, f"optimizer.state.exp_avg.{name}": moment}
        grid = [n // m for n, m in zip(shape, part, strict=True)]
        pieces: dict[tuple[int, ...], tuple[int, Tensor]] = {}
        for place in product(*map(range, grid)):
            index = tuple(slice(i * n, (i + 1) * n) for i, n in zip(place, part, strict=True))
            flat = moment[index].reshape(-1)
            cut = len(flat) // 2 - 1
            pieces |= {(*place, 0): (0, flat[:cut]), (*place, cut): (1, flat[cut:])}
        state[name] = parameter
        state[f"optimizer.state.exp_avg.{name}"] = _flat_shards((*grid, moment.numel() // prod(grid)), pieces)
    dcp.save(state, checkpoint_id=root, planner=dcp.DefaultSavePlanner(flatten_state_dict=False))
    return truth


def _flat_shards(shape: tuple[int, ...], pieces: Mapping[tuple[int, ...], tuple[int, Tensor]]) -> Any:
    """A ShardedTensor of `shape`, of which each rank has runs along the last axis, by where they begin."""
    from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardedTensorMetadata, TensorProperties
    from torch.distributed._shard.sharding_spec import ShardMetadata

    sizes = {at: [1] * (len(shape) - 1) + [len(flat)] for at, (_, flat) in pieces.items()}
    metadata = [ShardMetadata(list(at), sizes[at], f"rank:{rank}/cpu") for at, (rank, _) in pieces.items()]
    mine = [
        Shard.from_tensor_and_offsets(flat.reshape(sizes[at]).clone(), list(at), rank)
        for at, (rank, flat) in pieces.items()
        if rank == dist.get_rank()
    ]
    properties = TensorProperties(dtype=torch.float32)
    whole = ShardedTensorMetadata(metadata, torch.Size(shape), properties)
    return ShardedTensor._init_from_local_shards_and_global_metadata(mine, whole)


def _save_stages(root: Path, variant: str, virtual: int | None) -> dict[str, Tensor]:
    """Save 4 layers on 2 pipeline stages; return the tensors by the number that each layer itself has."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=virtual
    )
    stage = dist.get_rank()
    torch.manual_seed(11 + stage)
    config = _config(variant, layers=4, virtual_pipeline_model_parallel_size=virtual, pipeline_model_parallel_size=2)
    chunks = [
        _model(
            config,
            variant,
            pre_process=stage == 0 and chunk == 0,
            post_process=stage == 1 and chunk == (virtual or 1) - 1,
            vp_stage=chunk if virtual else None,
        )
        for chunk in range(virtual or 1)
    ]
    states = {
        f"model{i}" if virtual else "model": chunk.state_dict_for_save_checkpoint() for i, chunk in enumerate(chunks)
    }
    legacy = root / STEP / f"mp_rank_00_{stage:03d}"
    legacy.mkdir(parents=True)
    args = _args(config, 1, 2, virtual)
    torch.save({**states, "iteration": 3, "checkpoint_version": 3.0, "args": args}, legacy / "model_optim_rng.pt")
    _track(root)
    return _gathered({f"{variant}:{name}": value for chunk in chunks for name, value in _by_layer_number(chunk)})


def _by_layer_number(model: Any) -> Iterator[tuple[str, Tensor]]:
    numbers = {f"decoder.layers.{i}.": layer.layer_number - 1 for i, layer in enumerate(model.decoder.layers)}
    for name, value in model.state_dict().items():
        if isinstance(value, Tensor):
            here = next((prefix for prefix in numbers if name.startswith(prefix)), None)
            yield (f"decoder.layers.{numbers[here]}.{name.removeprefix(here)}" if here else name), value


def _gathered(mine: dict[str, Tensor]) -> dict[str, Tensor]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, {name: value.detach() for name, value in mine.items()})
    return {name: value for one in everyone for name, value in one.items()}


def load(root: Path, variant: str) -> Truth:
    """What the library loads from a run's `torch_dist` in `root`, under the names of the truth."""
    return _on_ranks(1, _load_alone, root, variant)


def _load_alone(root: Path, variant: str) -> Mapping[str, Any]:
    _replace_what_needs_a_gpu()
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel()
    return dict(_load_whole(root, variant))

"""Make one checkpoint of the corpus, with the torch and the trainer that are installed. No test runs this.

    torchrun --nproc-per-node 2 tests/corpus/make.py KIND...

writes for each kind torch-2.13.0-KIND.tar.xz and torch-2.13.0-KIND.json, and their checksums into MANIFEST.
The script needs no ckptkit and runs with Python 3.11 and every torch from 2.1 on, hence the plain `if`s. A GPU is not
needed. The expected values come from an unsharded model that takes the same steps in the same process, or, where a
trainer keeps fp32 master weights, from the trainer's own live state.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib
import json
import os
import platform
import queue
import shutil
import sys
import tarfile
import tempfile
import threading
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from torch import Tensor, nn

CPU = torch.device("cpu")
TORCH = tuple(int(number) for number in torch.__version__.split("+")[0].split(".")[:2])
HAS_OPTIMIZER = TORCH >= (2, 2)  # before, FSDP1 gathers shares of several sizes, and gloo refuses
LOW = torch.bfloat16 if TORCH >= (2, 3) else torch.float64  # which gloo could not send before
OPTIONS: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.1}


@dataclass
class Expected:
    """What must come out of a checkpoint: the facts that `inspect` prints, and every tensor and entry by name."""

    format: str
    state: Mapping[str, Any]
    trainer: str | None = "torch.distributed.checkpoint"
    step: int | None = None
    optimizer_keys: str | None = "names"
    libraries: tuple[str, ...] = ()
    world_size: int | None = field(default_factory=dist.get_world_size)


# -- the model ---------------------------------------------------------------------------------------------------------


class LowPrecision(nn.Module):
    """A unit of its own, since FSDP shards only parameters of one dtype together; 3 rows on 2 ranks."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 3, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x.to(self.mix.weight.dtype))


class Net(nn.Module):
    """An odd number of rows, a single row (the second rank has none), a tied weight, and buffers of other dtypes."""

    def __init__(self, low: torch.dtype = LOW, *, is_tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(7, 4)
        self.low = LowPrecision(low)
        self.gate = nn.Linear(4, 1, bias=False)
        self.head = nn.Linear(4, 7, bias=False)
        if is_tied:
            self.head.weight = self.embed.weight
        self.register_buffer("positions", torch.arange(5))
        self.register_buffer("scale", torch.tensor(2.5))
        self.register_buffer("mask", torch.tensor([True, False, True]))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        return (self.head(hidden * self.gate(hidden)) + self.low(hidden).sum()).float()


def train(model: nn.Module, steps: int = 2) -> torch.optim.Optimizer:
    """Take steps of AdamW. The gradient is half the parameter, so that a sharded and an unsharded model agree."""
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS)
    for _ in range(steps):
        for parameter in model.parameters():
            if parameter.numel():
                parameter.grad = parameter.detach() * 0.5
        optimizer.step()
    optimizer.zero_grad()
    return optimizer


def unsharded(model: nn.Module) -> dict[str, Any]:
    """The expected values: the model after the same steps without any wrapper, and its optimizer by name."""
    optimizer = train(model)
    return {"model": model.state_dict(), "optim": by_name(model, optimizer)}


def by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of an optimizer, and of its groups the learning rate, by the names of the parameters."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    states = {names[parameter]: dict(state) for parameter, state in optimizer.state.items()}
    groups = [
        {"lr": group["lr"], "params": [names[each] for each in group["params"]]} for group in optimizer.param_groups
    ]
    return {"state": states, "param_groups": dict(enumerate(groups))}


EXTRA = {
    "note": "seven rows on two ranks",
    "rate": 0.25,
    "nothing": None,
    "scheduler": {"last_epoch": 7, "_last_lr": [0.01, 0.001], "verbose": False},
    "counts": torch.arange(3),
}


def wrapped(model: nn.Module, **options: Any) -> nn.Module:
    """The model under FSDP1, with a unit inside the root."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    if TORCH < (2, 2):  # FSDP1 takes streams and events for granted
        vars(torch.cpu).update(Stream=MagicMock, Event=MagicMock)
    if TORCH < (2, 4):  # it asks CUDA, even on a CPU
        vars(torch.cuda).update(synchronize=MagicMock(), memory_summary=MagicMock())
    return FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({LowPrecision}), device_id=CPU, **({"use_orig_params": True} | options)
    )


def fully_sharded(model: nn.Module, shape: tuple[int, ...] = (), names: tuple[str, ...] = ("shard",)) -> nn.Module:
    """The model under FSDP2, with a unit inside the root."""
    from torch.distributed.device_mesh import init_device_mesh

    where = "torch.distributed.fsdp" if TORCH >= (2, 6) else "torch.distributed._composable.fsdp"
    fully_shard = importlib.import_module(where).fully_shard
    mesh = init_device_mesh("cpu", shape or (dist.get_world_size(),), mesh_dim_names=names)
    fully_shard(model.low, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


@contextlib.contextmanager
def state_of(model: nn.Module, kind: str) -> Iterator[None]:
    """FSDP1 gives `model.state_dict()` in this kind: FULL, SHARDED or LOCAL."""
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    with FullyShardedDataParallel.state_dict_type(model, StateDictType[f"{kind}_STATE_DICT"]):
        yield


def save_dcp(state: dict[str, Any], root: Path) -> None:
    import torch.distributed.checkpoint as dcp

    save = dcp.save if TORCH >= (2, 2) else dcp.save_state_dict
    save(state, storage_writer=dcp.FileSystemWriter(str(root)))


# -- torch's own checkpoints -------------------------------------------------------------------------------------------


def fsdp1(root: Path) -> Expected:
    """DCP of FSDP1 with SHARDED_STATE_DICT: model, optimizer by name, entries that are not tensors."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    expected = {**unsharded(Net()), "step": 7, "extra": EXTRA}
    model = wrapped(Net())
    optimizer = train(model)
    with state_of(model, "SHARDED"):
        state = {"model": model.state_dict()}
        if HAS_OPTIMIZER:
            state["optim"] = FullyShardedDataParallel.optim_state_dict(model, optimizer)
    save_dcp({**state, "step": 7, "extra": copy.deepcopy(EXTRA)}, root)
    if not HAS_OPTIMIZER:
        del expected["optim"]
    return Expected("dcp", expected, step=7, optimizer_keys="names" if HAS_OPTIMIZER else None)


def _save_fsdp2(root: Path, model: nn.Module) -> Expected:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    expected = {**unsharded(Net()), "step": 7, "extra": EXTRA}
    weights, moments = get_state_dict(model, train(model))
    save_dcp({"model": weights, "optim": moments, "step": 7, "extra": copy.deepcopy(EXTRA)}, root)
    return Expected("dcp", expected, step=7)


def fsdp2(root: Path) -> Expected:
    """DCP of FSDP2, which torch has since 2.4."""
    return _save_fsdp2(root, fully_sharded(Net()))


def hsdp(root: Path) -> Expected:
    """DCP of FSDP2 on 4 ranks: sharded over 2, replicated over 2."""
    return _save_fsdp2(root, fully_sharded(Net(), (2, 2), ("replicate", "shard")))


def dtensor(root: Path) -> Expected:
    """DCP of DTensors on a mesh of 2 x 2: sharded along one dimension or both, unevenly, or replicated."""
    module = importlib.import_module(f"torch.distributed.{'tensor' if TORCH >= (2, 5) else '_tensor'}")
    world = dist.get_world_size()
    mesh = module.DeviceMesh("cpu", torch.arange(world).reshape((2, 2) if world == 4 else (world,)))
    none, rows, columns = module.Replicate(), module.Shard(0), module.Shard(1)
    placements = {"rows": [none, rows], "columns": [columns, none], "grid": [rows, columns], "copies": [none, none]}
    whole = {name: torch.arange(35.0).reshape(5, 7) + i for i, name in enumerate(placements)}
    split = {
        name: module.distribute_tensor(whole[name], mesh, place[: mesh.ndim]) for name, place in placements.items()
    }
    save_dcp({"model": split, "step": 3}, root)
    return Expected("dcp", {"model": whole, "step": 3}, step=3, optimizer_keys=None)


def _save_rank_files(root: Path, model: nn.Module, state: contextlib.AbstractContextManager[None]) -> Expected:
    """Save as verl does: for each rank a file of the model, of the numbered optimizer, and of the rest."""
    expected = unsharded(Net(is_tied=False))
    optimizer = train(model)
    rank, world = dist.get_rank(), dist.get_world_size()
    with state:
        torch.save(model.state_dict(), root / f"model_world_size_{world}_rank_{rank}.pt")
        torch.save(optimizer.state_dict(), root / f"optim_world_size_{world}_rank_{rank}.pt")
    extra = {"lr_scheduler": {"last_epoch": 2, "_last_lr": [0.01]}, "rng": {"random": rank}}
    torch.save(extra, root / f"extra_state_world_size_{world}_rank_{rank}.pt")
    return Expected("ranks", {"model": expected["model"], "optimizer": expected["optim"]}, "verl")


def verl_fsdp1(root: Path) -> Expected:
    """Files of ranks with the ShardedTensors of FSDP1."""
    model = wrapped(Net(is_tied=False))
    return _save_rank_files(root, model, state_of(model, "SHARDED"))


def verl_fsdp2(root: Path) -> Expected:
    """Files of ranks with the DTensors of FSDP2."""
    return _save_rank_files(root, fully_sharded(Net(is_tied=False)), contextlib.nullcontext())


def fsdp1_flat(root: Path) -> Expected:
    """Flat parameters (LOCAL_STATE_DICT) as Accelerate saves them, beside its DCP of the optimizer."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    expected = unsharded(Net())
    del expected["model"]["head.weight"]  # a flat parameter has no record of its second name
    expected["optim"]["param_groups"][0]["params"].sort(
        key=lambda name: name.startswith("low.")
    )  # the root comes first
    model = wrapped(Net(), use_orig_params=False)
    optimizer = train(model)
    with state_of(model, "LOCAL"):
        torch.save(model.state_dict(), root / f"pytorch_model_fsdp_rank{dist.get_rank()}.bin")
    with state_of(model, "SHARDED"):
        save_dcp({"optimizer": FullyShardedDataParallel.optim_state_dict(model, optimizer)}, root / "optimizer_0")
    return Expected("ranks", {"model": expected["model"], "optimizer": expected["optim"]}, "Accelerate")


def file(root: Path) -> Expected:
    """One file of torch.save; the optimizer numbers its parameters."""
    return _save_file(root)


def file_legacy(root: Path) -> Expected:
    """One file in the format before torch 1.6, which torch still writes on request."""
    return _save_file(root, _use_new_zipfile_serialization=False)


def _save_file(root: Path, **options: Any) -> Expected:
    model = Net()
    optimizer = train(model)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 7, "extra": EXTRA}
    if dist.get_rank() == 0:
        torch.save(state, root / "checkpoint.pt", **options)
    expected = {"model": model.state_dict(), "optimizer": by_name(model, optimizer), "step": 7, "extra": EXTRA}
    return Expected("pt", expected, "torch.save", 7, "ids", world_size=None)


# -- trainers ----------------------------------------------------------------------------------------------------------


def accelerate_fsdp2(root: Path) -> Expected:
    """Accelerate's own functions for FSDP2; on a CPU, `save_state` itself would go without FSDP."""
    return _save_by_accelerate(root, fully_sharded(Net()), fsdp_version=2)


def accelerate_fsdp1(root: Path) -> Expected:
    """The same for FSDP1."""
    return _save_by_accelerate(root, wrapped(Net()))


def _save_by_accelerate(root: Path, model: nn.Module, **options: Any) -> Expected:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import save_fsdp_model, save_fsdp_optimizer

    expected = unsharded(Net())
    optimizer = train(model)
    accelerator = Accelerator(cpu=True)
    of_gpus = ("sync_module_states", "cpu_ram_efficient_loading")
    options |= {name: False for name in of_gpus if name in vars(FullyShardedDataParallelPlugin)}
    plugin = FullyShardedDataParallelPlugin(state_dict_type="SHARDED_STATE_DICT", **options)
    save_fsdp_model(plugin, accelerator, model, str(root))
    save_fsdp_optimizer(plugin, accelerator, optimizer, model, str(root))
    state = {"model": expected["model"], "optimizer": expected["optim"]}
    return Expected("dcp", state, "Accelerate", libraries=("accelerate",))


LLAMA = {"hidden_size": 8, "intermediate_size": 10, "num_attention_heads": 2, "num_key_value_heads": 1}
LLAMA |= {"num_hidden_layers": 2, "vocab_size": 17, "max_position_embeddings": 16}


def transformers_llama(root: Path) -> Expected:
    """`save_pretrained` of a Llama with a tied head, in bfloat16, in shards with an index."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**LLAMA, tie_word_embeddings=True)).to(torch.bfloat16)
    if dist.get_rank() == 0:
        model.save_pretrained(root, max_shard_size="1KB")
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    return Expected("hf", state, "transformers", optimizer_keys=None, libraries=("transformers",), world_size=None)


def transformers_mixtral(root: Path) -> Expected:
    """`save_pretrained` of a Mixtral, whose experts are one tensor in memory since transformers 5, and not on disk."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(1)
    model = MixtralForCausalLM(MixtralConfig(**LLAMA, num_local_experts=2, tie_word_embeddings=False))
    if dist.get_rank() == 0:
        model.save_pretrained(root)
    state: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        layer, _, what = name.partition(".mlp.")
        matrices = {"experts.gate_up_proj": (1, 3), "experts.down_proj": (2,)}.get(what)
        if matrices:
            for expert, own in enumerate(tensor):
                for number, each in zip(matrices, own.chunk(len(matrices)), strict=True):
                    state[f"{layer}.block_sparse_moe.experts.{expert}.w{number}.weight"] = each
        else:
            state[f"{layer}.block_sparse_moe.{what}" if what else name] = tensor
    return Expected("hf", state, "transformers", optimizer_keys=None, libraries=("transformers",), world_size=None)


def transformers_trainer(root: Path) -> Expected:
    """A run of transformers' Trainer under DDP."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    state: dict[str, Any] = {}

    class Witness(TrainerCallback):
        def on_save(self, *_: Any, model: nn.Module, optimizer: Any, **__: Any) -> None:
            own = getattr(optimizer, "optimizer", optimizer)
            state.update(copy.deepcopy({"model": model.state_dict(), "optimizer": by_name(model, own)}))

    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**LLAMA, tie_word_embeddings=False))
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 17, (16, 8))]
    settings = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "max_steps": 2, "save_steps": 2}
    arguments = TrainingArguments(str(root), weight_decay=0.1, learning_rate=1e-2, **settings)
    Trainer(model, arguments, train_dataset=rows, callbacks=[Witness()]).train()
    return Expected("hf", state, "transformers' Trainer", 2, "ids", libraries=("transformers", "accelerate"))


def _save_by_deepspeed(root: Path, stage: int, **precision: Any) -> Expected:
    """Save with the parameters in two groups and one of them frozen; DeepSpeed's own functions tell the masters."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": os.environ["WORLD_SIZE"]}
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True  # the CPU is slow at it, and able
    model = Net(torch.float32)
    model.gate.requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [parameter for parameter in trained if parameter.dim() > 1], "weight_decay": 0.1},
        {"params": [parameter for parameter in trained if parameter.dim() < 2], "weight_decay": 0.0},
    ]
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **precision,
    }
    deepspeed.init_distributed("gloo")
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(groups, lr=1e-2), config=settings)
    for step in range(2):
        tokens = torch.randint(0, 7, (2, 5), generator=torch.Generator().manual_seed(step))
        engine.backward(nn.functional.cross_entropy(engine(tokens).flatten(0, 1), tokens.flatten()))
        engine.step()
    engine.save_checkpoint(str(root), client_state={"note": "two groups"})
    link = getattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state", None)
    if link is not None:
        engine.optimizer._hp_optimizer_states_linked = False  # it links the first group alone
        link()
    state: dict[str, Any] = dict(model.named_buffers())
    moments: dict[str, dict[str, Tensor]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            state[name] = safe_get_full_fp32_param(parameter)
            shape = getattr(parameter, "ds_shape", parameter.shape)
            found = {moment: safe_get_full_optimizer_state(parameter, moment) for moment in ("exp_avg", "exp_avg_sq")}
            moments[name] = {moment: tensor.reshape(shape) for moment, tensor in found.items()}
        else:
            with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
                state[name] = parameter.detach().clone()
    state["head.weight"] = state["embed.weight"]
    expected = {"model": state, "optimizer": {"state": moments}, "note": "two groups"}
    return Expected("deepspeed", expected, "DeepSpeed", 2, libraries=("deepspeed",))


def deepspeed_zero1(root: Path) -> Expected:
    """DeepSpeed ZeRO 1 in bfloat16."""
    return _save_by_deepspeed(root, 1, bf16={"enabled": True})


def deepspeed_zero2(root: Path) -> Expected:
    """DeepSpeed ZeRO 2 in float16."""
    return _save_by_deepspeed(root, 2, fp16={"enabled": True, "initial_scale_power": 4})


def deepspeed_zero3(root: Path) -> Expected:
    """DeepSpeed ZeRO 3 in bfloat16."""
    return _save_by_deepspeed(root, 3, bf16={"enabled": True})


def lightning_sharded(root: Path) -> Expected:
    """A run of Lightning's Trainer under FSDP2 (ModelParallelStrategy, since Lightning 2.4)."""
    return _save_by_lightning(root, is_sharded=True)


def lightning_file(root: Path) -> Expected:
    """A run of Lightning's Trainer in one process, which saves one file."""
    return _save_by_lightning(root, is_sharded=False)


def _save_by_lightning(root: Path, *, is_sharded: bool) -> Expected:
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net: nn.Module = Net()

        def configure_model(self) -> None:
            if is_sharded:
                self.net = fully_sharded(Net())

        def training_step(self, tokens: Tensor, _: int) -> Tensor:
            return self.net(tokens).square().mean()

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), **OPTIONS)
            return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}

    strategy: Any = "auto"
    if is_sharded:
        from lightning.pytorch.strategies import ModelParallelStrategy

        strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo")
    module = Module()
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    saving = ModelCheckpoint(dirpath=root, every_n_train_steps=2)
    training = lightning.Trainer(
        accelerator="cpu", devices=dist.get_world_size(), strategy=strategy, max_steps=2, callbacks=[saving], **quiet
    )
    batches: Any = (torch.arange(24) % 7).reshape(12, 2)
    training.fit(module, torch.utils.data.DataLoader(batches, batch_size=None))
    names = by_name(module, training.optimizers[0])
    state = {"state_dict": module.state_dict(), "optimizer_0" if is_sharded else "optimizer_states.0": names}
    keys = "names" if is_sharded else "ids"
    made = Expected("dcp" if is_sharded else "pt", gathered(state), "Lightning", 2, keys, libraries=("lightning",))
    if not is_sharded:
        made.world_size = None
    return made


def gathered(tree: Any) -> Any:
    """The same nested dict with each DTensor as the tensor that it is a part of."""
    if isinstance(tree, Mapping):
        return {key: gathered(branch) for key, branch in tree.items()}
    return tree.full_tensor() if hasattr(tree, "full_tensor") else tree


def megatron_core_dist(root: Path) -> Expected:
    """Megatron-Core's `torch_dist` of a GPT, tensor-parallel over 2 ranks."""
    return _save_by_megatron(root, is_legacy=False)


def megatron_core_ranks(root: Path) -> Expected:
    """The `mp_rank_XX` directories of the same model."""
    return _save_by_megatron(root, is_legacy=True)


def _save_by_megatron(root: Path, *, is_legacy: bool) -> Expected:
    """Save a model of two layers after a step of AdamW. CUDA and forked writers are replaced: neither exists here."""
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda *_, **__: None
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing import optimizer as sharding
    from megatron.core.dist_checkpointing.strategies import async_utils, filesystem_async
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    context = SimpleNamespace(Queue=queue.Queue, JoinableQueue=queue.Queue, SimpleQueue=queue.SimpleQueue)
    context.Process, context.Manager, context.get_context = threading.Thread, lambda: context, lambda *_: context
    filesystem_async.mp = async_utils.mp = context
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    sizes = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "num_query_groups": 2, "ffn_hidden_size": 12}
    config = TransformerConfig(**sizes, use_cpu_initialization=True, pipeline_dtype=torch.float32)
    layers = get_gpt_layer_local_spec()
    model = GPTModel(config, layers, vocab_size=32, max_sequence_length=16, position_embedding_type="rope")
    for number, parameter in enumerate(model.parameters()):
        own = dist.get_rank() if getattr(parameter, "tensor_model_parallel", False) else 2
        noise = torch.Generator().manual_seed(3 * number + own)
        parameter.data.copy_(torch.randn(parameter.shape, generator=noise))
    optimizer = train(model, 1)
    args = Namespace(
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=1,
        expert_model_parallel_size=1,
        virtual_pipeline_model_parallel_size=None,
        num_layers=2,
        swiglu=False,
        bf16=False,
    )
    common = {"iteration": 3, "checkpoint_version": 3.0, "args": args}
    home = root / "iter_0000003" / (f"mp_rank_{dist.get_rank():02d}" if is_legacy else "")
    home.mkdir(parents=True, exist_ok=True)
    if is_legacy:
        state = {"model": model.state_dict_for_save_checkpoint(), "optimizer": optimizer.state_dict()}
        torch.save({**common, **state}, home / "model_optim_rng.pt")
    else:
        numbered = optimizer.state_dict()
        parameters = sharding.get_param_id_to_sharded_param_map(model.sharded_state_dict(), model.parameters())
        sharding.optim_state_to_sharding_state(numbered, parameters, exclude_keys=("step",))
        state = {"model": model.sharded_state_dict(), "optimizer": numbered}
        dist_checkpointing.save({**common, **state}, str(home))
    (root / "latest_checkpointed_iteration.txt").write_text("3")
    whole = {name: _of_all_ranks(parameter, parameter) for name, parameter in model.named_parameters()}
    states = {
        name: {
            moment: _of_all_ranks(optimizer.state[parameter][moment], parameter) for moment in ("exp_avg", "exp_avg_sq")
        }
        for name, parameter in model.named_parameters()
    }
    if is_legacy:
        expected: dict[str, Any] = {"model": whole, "optimizer": {"state": states}}
        return Expected("megatron", expected, "Megatron", 3, libraries=("megatron-core",))
    moments = {f"optimizer.state.{moment}.{name}": states[name][moment] for name in states for moment in states[name]}
    return Expected("dcp", dict(_stacked(whole | moments)), "Megatron", 3, libraries=("megatron-core",))


def _of_all_ranks(part: Tensor, parameter: Any) -> Tensor:
    """The tensor of which each rank has a part, as the parameter says."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return part.detach()
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, part.detach())
    return torch.cat(parts, parameter.partition_dim)


def _stacked(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The layers of a kind as one tensor, as `torch_dist` has them; the norms are called as in Transformer Engine."""
    norms = {
        "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
        "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
    }
    for name, tensor in tensors.items():
        if ".layers.0." in name:
            stacked = name.replace(".layers.0.", ".layers.")
            for own, fused in norms.items():
                stacked = stacked.replace(own, fused)
            yield stacked, torch.stack([tensor, tensors[name.replace(".layers.0.", ".layers.1.")]])
        elif ".layers." not in name:
            yield name, tensor


# -- the file ----------------------------------------------------------------------------------------------------------


def flat(tree: object, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested dicts, and of lists of dicts, by dotted names."""
    if isinstance(tree, list) and tree and all(isinstance(branch, Mapping) for branch in tree):
        tree = dict(enumerate(tree))
    if isinstance(tree, Mapping):
        for key, branch in tree.items():
            yield from flat(branch, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, tree


def describe(tensor: Tensor) -> str:
    """The dtype, the shape, and the SHA-256 of the elements in row-major order."""
    whole = tensor.detach().contiguous().clone().reshape(-1)
    raw = whole.view(torch.uint8).numpy().tobytes() if whole.numel() else b""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype} {list(tensor.shape)} {hashlib.sha256(raw).hexdigest()}"


def store(kind: str, root: Path, expected: Expected, home: Path) -> None:
    """Write the archive, the expected values and their checksums. A file that is there already stays as it is."""
    library = next(iter(expected.libraries), "torch")
    name = f"{library}-{version(library).split('+')[0]}-{kind.removeprefix(f'{library}-')}"
    leaves = dict(flat(expected.state))
    facts = {
        "made": f"torchrun --nproc-per-node {dist.get_world_size()} tests/corpus/make.py {kind}",
        "on": time.strftime("%Y-%m-%d", time.gmtime()),
        "with": {"python": platform.python_version()} | {one: version(one) for one in ("torch", *expected.libraries)},
        "format": expected.format,
        "trainer": expected.trainer,
        "step": expected.step,
        "world_size": expected.world_size,
        "optimizer_keys": expected.optimizer_keys,
        "tensors": {name: describe(leaf) for name, leaf in leaves.items() if isinstance(leaf, Tensor)},
        "entries": {name: leaf for name, leaf in leaves.items() if not isinstance(leaf, Tensor)},
    }
    with (home / f"{name}.json").open("x") as file:
        file.write(json.dumps(facts, indent=1) + "\n")
    with tarfile.open(home / f"{name}.tar.xz", "x:xz") as archive:
        archive.add(root, ".", filter=_anonymous)
    with (home / "MANIFEST").open("a") as file:
        for path in (home / f"{name}.json", home / f"{name}.tar.xz"):
            file.write(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n")


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


KINDS: dict[str, Callable[[Path], Expected]] = {
    function.__name__.replace("_", "-"): function
    for function in (
        *(fsdp1, fsdp2, hsdp, dtensor, verl_fsdp1, verl_fsdp2, fsdp1_flat, file, file_legacy),
        *(
            accelerate_fsdp1,
            accelerate_fsdp2,
            transformers_llama,
            transformers_mixtral,
            transformers_trainer,
            deepspeed_zero1,
            deepspeed_zero2,
            deepspeed_zero3,
        ),
        *(lightning_sharded, lightning_file, megatron_core_dist, megatron_core_ranks),
    )
}


def main() -> None:
    arguments = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    arguments.add_argument("kinds", nargs="+", metavar="KIND", choices=KINDS)
    arguments.add_argument("--into", type=Path, default=Path(__file__).parent, metavar="DIRECTORY")
    asked = arguments.parse_args()
    dist.init_process_group("gloo")
    for kind in asked.kinds:
        make(kind, asked.into)
    sys.stdout.flush()
    os._exit(0)  # not through the interpreter's end, where gloo's threads may abort


def make(kind: str, home: Path) -> None:
    shared: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(shared)
    root = Path(shared[0], "checkpoint")
    root.mkdir(exist_ok=True)
    dist.barrier()
    expected = KINDS[kind](root)
    dist.barrier()
    if dist.get_rank() == 0:
        store(kind, root, expected, home)
        shutil.rmtree(shared[0])
    dist.barrier()  # gloo may abort a rank whose peers have left


if __name__ == "__main__":
    main()

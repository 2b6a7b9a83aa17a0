"""Sources of the cases of meaning: one small Llama with its optimizer, in every format, with room for entries more.

Everything is written by torch, safetensors and plain files; ckptkit takes no part.
"""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.faults import trained

Tree = dict[str, Any]
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 16,
    "tie_word_embeddings": False,
}
STEP = 10
RANKS = 2
_LAYER = {
    "self_attn.q_proj.weight": (8, 8),
    "self_attn.k_proj.weight": (8, 8),
    "self_attn.v_proj.weight": (8, 8),
    "self_attn.o_proj.weight": (8, 8),
    "mlp.gate_proj.weight": (12, 8),
    "mlp.up_proj.weight": (12, 8),
    "mlp.down_proj.weight": (8, 12),
    "input_layernorm.weight": (8,),
    "post_attention_layernorm.weight": (8,),
}
_SHAPES = {
    "model.embed_tokens.weight": (16, 8),
    **{f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in _LAYER.items()},
    "model.norm.weight": (8,),
    "lm_head.weight": (16, 8),
}


def model(seed: int = 0) -> dict[str, Tensor]:
    """The weights of the Llama; another seed gives another model of the same shapes."""
    source = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=source) for name, shape in _SHAPES.items()}


def optimizer(weights: Mapping[str, Tensor], seed: int, *, ids: bool = False) -> Tree:
    """The state of an Adam for these parameters, by name or number."""
    source = torch.Generator().manual_seed(seed)
    keys: list[Any] = list(range(len(weights))) if ids else list(weights)
    states = {
        key: {
            "step": torch.tensor(float(STEP)),
            "exp_avg": torch.randn(value.shape, generator=source),
            "exp_avg_sq": torch.rand(value.shape, generator=source),
        }
        for key, value in zip(keys, weights.values(), strict=True)
    }
    return {"state": states, "param_groups": [{"lr": 0.125, "betas": (0.9, 0.999), "params": keys}]}


@dataclass(frozen=True, slots=True)
class Format:
    """A way to lay down the model, with entries more at the top of its state.

    `only_tensors`: the format has no place for other values. `is_file`: it is one file, and no directory.
    """

    name: str
    make: Callable[[Path, Tree], object]
    only_tensors: bool = False
    is_file: bool = False
    has_config: bool = False


def _dcp(root: Path, more: Tree) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = {"model": model(), "optimizer": optimizer(model(), 1), "step": STEP, **more}
        dcp.save(tree, checkpoint_id=root, no_dist=True)


def _pt(root: Path, more: Tree) -> None:
    trained.save({"model": model(), "optimizer": optimizer(model(), 1), "step": STEP, **more}, root / "state.pt")


def _lightning(root: Path, more: Tree) -> None:
    weights = {f"model.{name}": value for name, value in model().items()}
    states = [optimizer(weights, 1, ids=True)]
    loops: Tree = {"epoch": 1, "global_step": STEP, "pytorch-lightning_version": "2.5.0", "loops": {}, "callbacks": {}}
    trained.save({"state_dict": weights, "optimizer_states": states, "lr_schedulers": [], **loops, **more}, root)


def _ranks(root: Path, more: Tree) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    root.mkdir(parents=True)
    for rank in range(RANKS):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS)
        try:
            mesh = init_device_mesh("cpu", (RANKS,))
            state = optimizer(model(), 1, ids=True)
            for each in state["state"].values():
                each |= {name: _spread(each[name], mesh) for name in ("exp_avg", "exp_avg_sq")}
            files = {
                "model": {name: _spread(value, mesh) for name, value in model().items()},
                "optim": state,
                "extra_state": {"step": STEP, **more},
            }
            for name, value in files.items():
                torch.save(value, root / f"{name}_world_size_{RANKS}_rank_{rank}.pt")
        finally:
            dist.destroy_process_group()


def _spread(value: Tensor, mesh: Any) -> Any:
    return distribute_tensor(value, mesh, [Shard(0)], src_data_rank=None)


def _zero2(root: Path, more: Tree) -> None:
    trained.zero2(root, model(), STEP, RANKS)
    _add(root / "mp_rank_00_model_states.pt", more)


def _universal(root: Path, more: Tree) -> None:
    trained.universal(root, model(), STEP, RANKS)
    _add(root / "mp_rank_00_model_states.pt", more)


def _megatron(root: Path, more: Tree) -> None:
    torch.manual_seed(0)
    trained.megatron(root, {}, STEP, RANKS)
    for rank in range(RANKS):
        _add(root / f"mp_rank_{rank:02d}" / "model_optim_rng.pt", more)


def _items(root: Path, more: Tree) -> None:
    trained.items(root, model(), STEP, RANKS)
    for name, value in more.items():
        for rank in range(RANKS):
            trained.save(value, root / f"{name}_{rank}.pt")


def _add(path: Path, more: Tree) -> None:
    saved = torch.load(path, weights_only=False)
    trained.save({**saved, **more}, path)


def _hf(root: Path, more: Tree) -> None:
    root.mkdir(parents=True)
    extra = {name: value.clone() for name, value in flatten(more).items()}
    save_file({**model(), **extra}, root / "model.safetensors", metadata={"format": "pt"})
    (root / "config.json").write_text(json.dumps(CONFIG))


def flatten(tree: Any, prefix: str = "") -> dict[str, Tensor]:
    """The tensors of nested dicts and lists by dotted names."""
    if isinstance(tree, Tensor):
        return {prefix: tree}
    pairs: Any = (
        tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, list | tuple) else ()
    )
    return {
        name: leaf
        for key, branch in pairs
        for name, leaf in flatten(branch, f"{prefix}.{key}" if prefix else str(key)).items()
    }


def _trainer(root: Path, more: Tree) -> None:
    """A `checkpoint-N` of transformers' Trainer; what is more is a file by its name."""
    _hf(root, {})
    trained.save(optimizer(model(), 1, ids=True), root / "optimizer.pt")
    trained.save({"last_epoch": STEP, "_last_lr": [0.125]}, root / "scheduler.pt")
    trained.save({"cpu": torch.get_rng_state()}, root / "rng_state.pth")
    (root / "trainer_state.json").write_text(json.dumps({"global_step": STEP, "epoch": 1.0, "log_history": []}))
    for name, value in more.items():
        trained.save(value, root / f"{name}.pt")


def _accelerate(root: Path, more: Tree) -> None:
    """What `accelerator.save_state()` leaves of one model; what is more is a `custom_checkpoint_N.pkl`."""
    root.mkdir(parents=True)
    save_file(model(), root / "model.safetensors", metadata={"format": "pt"})
    trained.save(optimizer(model(), 1, ids=True), root / "optimizer.bin")
    trained.save({"last_epoch": STEP, "_last_lr": [0.125]}, root / "scheduler.bin")
    (root / "random_states_0.pkl").write_bytes(pickle.dumps({"step": STEP}))
    for i, value in enumerate(more.values()):
        trained.save(value, root / f"custom_checkpoint_{i}.pkl")


def _accelerate_fsdp(root: Path, more: Tree) -> None:
    """What accelerate leaves of FSDP with SHARDED_STATE_DICT: a DCP directory for the model and for the optimizer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": model()}, checkpoint_id=root / "pytorch_model_fsdp_0", no_dist=True)
        dcp.save({"optimizer": optimizer(model(), 1)}, checkpoint_id=root / "optimizer_0", no_dist=True)
    trained.save({"last_epoch": STEP, "_last_lr": [0.125]}, root / "scheduler.bin")
    for i, value in enumerate(more.values()):
        trained.save(value, root / f"custom_checkpoint_{i}.pkl")


def _bins(root: Path, more: Tree) -> None:
    trained.bins(root, {**model(), **flatten(more)}, STEP, RANKS)
    (root / "config.json").write_text(json.dumps(CONFIG))


FORMATS = {
    known.name: known
    for known in (
        Format("dcp", _dcp),
        Format("pt", _pt),
        Format("hf", _hf, only_tensors=True, has_config=True),
        Format("bins", _bins, only_tensors=True, has_config=True),
        Format("lightning", _lightning, is_file=True),
        Format("ranks", _ranks),
        Format("zero2", _zero2),
        Format("universal", _universal),
        Format("megatron", _megatron),
        Format("items", _items),
        Format("trainer", _trainer, has_config=True),
        Format("accelerate", _accelerate),
        Format("accelerate-fsdp", _accelerate_fsdp),
    )
}


@cache
def add_of(name: str) -> str:
    """The name of the file or directory that a format's checkpoint is."""
    return f"ckpt-{STEP}.ckpt" if FORMATS[name].is_file else f"ckpt-{STEP}"

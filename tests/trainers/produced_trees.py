"""Trees of trainers that cannot be installed beside the torch of the tests, made with torch as their sources do it.

Composer 0.32.1 needs torch 2.7; OLMo-core 3.0.0, torchtitan 0.3.0 and torchtune 0.6.1 draw in stores, datasets and
loggers. What was read there is said at each.
"""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Mapping
from dataclasses import make_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

from tests.producers import Truth, _on_ranks
from tests.trainers.produced_lightning import Net
from tests.trainers.produced_plain import live_state

FLAT = StateDictOptions(flatten_optimizer_state_dict=True, cpu_offload=True)


def _trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = Net()
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    return model, optimizer


def _whole(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _whole(value) for key, value in state.items()}
    return state.full_tensor() if hasattr(state, "full_tensor") else state


def _save(root: Path) -> Mapping[str, Any]:
    model, optimizer = _trained()
    for save in (_save_composer, _save_newer_composer, _save_olmo, _save_torchtitan):
        save(root, model, optimizer)
    return live_state(model, optimizer)


def _save_composer(root: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """composer/utils/checkpoint.py, `_save_checkpoint`; core/state.py, `State.state_dict`."""
    state: dict[str, Any] = {
        "model": get_model_state_dict(model),
        "optimizers": {"AdamW": get_optimizer_state_dict(model, optimizer)},
        "timestamp": {"Timestamp": {"epoch": 0, "batch": 5, "sample": 40}},
        "schedulers": {"LambdaLR": {"last_epoch": 5}},
        "integrations": {},
        "metadata": {"composer_env_info": {"composer_version": "0.32.1"}},
    }
    generators = [{"python": (3, (1, 2), None), "torch": torch.get_rng_state()} for _ in range(2)]
    rng = {"rng": generators} if dist.get_rank() == 0 else {}  # of shards only rank 0 saves them
    dcp.save({"state": state, **rng}, checkpoint_id=root / "composer" / "ep0-ba5")
    whole = _whole(state)
    if dist.get_rank() == 0:
        torch.save({"state": whole, "rng": generators}, root / "composer" / "ep0-ba6-rank0.pt")
        (root / "composer" / "latest-rank0.pt").symlink_to("ep0-ba6-rank0.pt")
        (root / "composer" / "latest-rank0.symlink").write_text("my-run/checkpoints/ep0-ba5")


def _save_newer_composer(root: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """composer/checkpoint/save.py, `save_checkpoint_to_disk`: here the model in shards, the optimizer in one file."""
    place = root / "newer" / "ep0-ba7"
    dcp.save(get_model_state_dict(model), checkpoint_id=place / "model")
    whole = _whole(get_optimizer_state_dict(model, optimizer))
    if dist.get_rank() == 0:
        (place / "optim").mkdir()
        torch.save(whole, place / "optim" / "optim.pt")
        (place / "composer_metadata.json").write_text(json.dumps({"composer_version": "0.32.1"}))
        (place / "resumption.pkl").write_bytes(pickle.dumps({"timestamp": 7}))


def _save_olmo(root: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """olmo_core/train/checkpoint.py, `Checkpointer.save`; its own writer leaves its own class in `.metadata`."""
    place = root / "olmo" / "step10"
    state = {
        "model": get_model_state_dict(model, options=FLAT),
        "optim": get_optimizer_state_dict(model, optimizer, options=FLAT),
    }
    dcp.save(state, checkpoint_id=place / "model_and_optim")
    (place / "train").mkdir(exist_ok=True)
    train = {"global_step": 10, "world_size": 2, "rng": {"python": dist.get_rank()}}
    torch.save(train, place / "train" / f"rank{dist.get_rank()}.pt")
    if dist.get_rank() == 0:
        (place / ".metadata.json").write_text('{"ephemeral": false}')
        (place / "config.json").write_text('{"model": {"d_model": 6}}')
        _rewrite_places(place / "model_and_optim" / ".metadata")


def _rewrite_places(path: Path) -> None:
    """Give every place the class that OLMo-core has for it."""
    module = ModuleType("olmo_core.distributed.checkpoint.filesystem")
    own = make_dataclass("_StorageInfo", ["relative_path", "offset", "length"])
    own.__module__ = module.__name__
    vars(module)["_StorageInfo"] = own
    metadata = pickle.loads(path.read_bytes())
    places = metadata.storage_data
    metadata.storage_data = {
        index: own(place.relative_path, place.offset, place.length) for index, place in places.items()
    }
    parents = ("olmo_core", "olmo_core.distributed", "olmo_core.distributed.checkpoint")
    sys.modules.update({name: ModuleType(name) for name in parents} | {module.__name__: module})
    try:
        path.write_bytes(pickle.dumps(metadata))
    finally:
        for name in (*parents, module.__name__):
            del sys.modules[name]


def _save_torchtitan(root: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """torchtitan/components/checkpointer/dcp.py: the model at the top, the optimizer flat, a loader for each rank."""
    place = root / "torchtitan" / "step-20"
    loader = {f"dp_rank_{dist.get_rank()}": pickle.dumps({"rows": dist.get_rank()}), "world_size": 2}
    state: dict[str, Any] = {
        **get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=FLAT),
        "lr_scheduler": {"last_epoch": 20},
        "dataloader": loader,
        "train_state": {"step": torch.tensor(20), "ntokens_seen": torch.tensor(640)},
    }
    dcp.save(state, checkpoint_id=place)


def trees(root: Path) -> Truth:
    """One state of FSDP2 on 2 ranks as Composer, OLMo-core and torchtitan save it, each in a run of its own."""
    return _on_ranks(2, _save, root)


def hugging_face_trees(root: Path) -> Truth:
    """A Llama as torchtune and ColossalAI leave it, with their optimizers beside.

    torchtune/training/checkpointing/_checkpointer.py: `epoch_E` with the model, `recipe_state` beside all epochs.
    colossalai/checkpoint_io: the model by the Hub's names, an optimizer with numbers in shards and an index.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(4)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, tie_word_embeddings=False, **sizes))
    states = {i: {"exp_avg": torch.zeros_like(each)} for i, each in enumerate(model.parameters())}
    recipe = {"optimizer": {"state": states, "param_groups": [{"lr": 0.1, "params": list(states)}]}}
    for epoch in range(2):
        model.save_pretrained(root / "torchtune" / f"epoch_{epoch}")
    (root / "torchtune" / "recipe_state").mkdir()
    counts = {"epochs_run": 2, "total_epochs": 3, "max_steps_per_epoch": None, "seed": 0}
    torch.save({**recipe, **counts}, root / "torchtune" / "recipe_state" / "recipe_state.pt")
    colossal = root / "colossal" / "epoch0-step30"
    model.save_pretrained(colossal / "modeling")
    (colossal / "optimizer").mkdir()
    places: dict[str, str] = {}
    for part, numbers in enumerate((range(10), range(10, len(states))), 1):
        file = f"pytorch_optim-0000{part}-of-00002.bin"
        torch.save({i: states[i] for i in numbers}, colossal / "optimizer" / file)
        places |= {str(i): file for i in numbers}
    torch.save([{"lr": 0.1, "params": list(states)}], colossal / "optimizer" / "pytorch_optim_group.bin")
    index = {"metadata": {"param_groups": "pytorch_optim_group.bin"}, "weight_map": places}
    (colossal / "optimizer" / "pytorch_optim.bin.index.json").write_text(json.dumps(index))
    (colossal / "running_states.json").write_text(json.dumps({"epoch": 0, "step": 30}))
    truth: dict[str, Tensor] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return truth

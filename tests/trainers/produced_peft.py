"""Checkpoints of a model with LoRA adapters in training under FSDP2, on two gloo ranks, and what PEFT makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.producers import Truth, _on_ranks

VOCABULARY = 40


def tiny_llama(**more: Any) -> Any:
    """A llama of two layers, of which no two axes have the same extent; the same on every rank."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    return LlamaForCausalLM(LlamaConfig(**(sizes | heads | more)))


def adapted(model: nn.Module, name: str = "default", **config: Any) -> Any:
    """The model with an adapter of random numbers: at first B is 0, and would change nothing."""
    from peft import LoraConfig, get_peft_model

    found = get_peft_model(model, LoraConfig(**config), adapter_name=name)
    fill(found)
    return found


def fill(model: nn.Module) -> None:
    """Give all that belongs to adapters random numbers."""
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name or "tokens_delta" in name:
            with torch.no_grad():
                parameter.copy_(torch.randn(parameter.shape) * 0.3 + ("magnitude" in name))


CONFIG: dict[str, Any] = {
    "r": 4,
    "lora_alpha": 7,
    "target_modules": ["q_proj", "down_proj"],
    "rank_pattern": {"layers.1.mlp.down_proj": 2},
    "alpha_pattern": {"down_proj": 5},
    "modules_to_save": ["lm_head"],
    "task_type": "CAUSAL_LM",
}


def lora(root: Path) -> Truth:
    """A Trainer's checkpoint, the same in files of ranks and in one, adapters alone. The truth is the merged model."""
    return _on_ranks(2, _lora, root)


def _lora(root: Path) -> Truth:
    from peft import get_peft_model_state_dict

    base = tiny_llama()
    if dist.get_rank() == 0:
        base.save_pretrained(root / "base")
    model = adapted(base, **CONFIG)
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    ids = torch.arange(12).reshape(2, 6) % VOCABULARY
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()

    step = root / "run" / "checkpoint-3"
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=step / "pytorch_model_fsdp_0")
    dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=step / "optimizer_0")
    only = get_peft_model_state_dict(model, state_dict=model.state_dict())
    dcp.save({"model": only}, checkpoint_id=root / "only" / "checkpoint-3" / "pytorch_model_fsdp_0")
    ranks = root / "ranks" / "global_step_3" / "actor"
    if dist.get_rank() == 0:
        ranks.mkdir(parents=True)
    dist.barrier()
    torch.save(model.state_dict(), ranks / f"model_world_size_2_rank_{dist.get_rank()}.pt")

    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 0:
        return _judge(root, dict(whole))
    return {}


def _judge(root: Path, whole: dict[str, Any]) -> Truth:
    """What PEFT itself saves of the whole state, and merges."""
    (root / "full").mkdir()
    torch.save(whole, root / "full" / "state.pt")
    model = adapted(tiny_llama(), **CONFIG)
    model.load_state_dict(whole)
    model.save_pretrained(root / "saved")
    config = root / "saved" / "adapter_config.json"
    for place in ("run/checkpoint-3", "only/checkpoint-3", "full"):
        (root / place / config.name).write_bytes(config.read_bytes())
    folder = root / "ranks" / "global_step_3" / "actor" / "lora_adapter"
    folder.mkdir()
    (folder / config.name).write_bytes(config.read_bytes())
    merged = model.merge_and_unload()
    return {name: tensor.clone() for name, tensor in merged.state_dict().items()}

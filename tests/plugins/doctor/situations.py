"""Checkpoints that do not load, made by the libraries whose loads fail: real models, optimizers, shards and files."""

from __future__ import annotations

import json
import re
import shlex
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ckptkit import explain
from ckptkit.cli.commands import app
from ckptkit.errors import CkptError
from tests.producers import Truth, spawn

SIZES = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}


def llama(**more: Any) -> Any:
    """A llama of two layers, the same each time."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **HEADS, "tie_word_embeddings": False, **more}))


def saved(root: Path, **more: Any) -> Path:
    """What `save_pretrained` writes of a llama."""
    llama(**more).save_pretrained(root)
    return root


def adapted() -> Any:
    """A llama with an adapter by LoRA that changes it."""
    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what transformers will not have in its next version
        return get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))


def config_alone(root: Path, **more: Any) -> Path:
    """A directory with the config of a llama, and no weights."""
    llama(**more).config.save_pretrained(root)
    return root


def from_pretrained(root: Path) -> tuple[Any, Mapping[str, Any]]:
    """The model that transformers loads from a directory, and what it says of missing and unexpected tensors."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(root, output_loading_info=True, dtype=torch.float32)


def load_into(state: dict[str, Any], root: Path) -> dict[str, Any]:
    """The state, loaded by torch from shards by one process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        dcp.load(state, checkpoint_id=root, no_dist=True)
    return state


def blank(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state to load into: the same names, shapes and dtypes."""
    return {name: blank(x) if isinstance(x, Mapping) else torch.zeros_like(x) for name, x in state.items()}


def write_hf(root: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Path:
    """A directory as a trainer might leave it: weights by names of its own, and a config."""
    from safetensors.torch import save_file

    root.mkdir(parents=True)
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, root / "model.safetensors")
    (root / "config.json").write_text(json.dumps(config))
    return root


def run(fix: str | None, code: int = 0) -> Path:
    """Run the command that a finding gives, as a user would, and return what it made; `code` is how it ends."""
    assert fix is not None
    first, *words = shlex.split(fix)
    assert first == "ckptkit"
    try:
        ended = app(words, standalone_mode=False) or 0
    except CkptError as error:
        ended = f"{error.exit_code}: {error}"
    assert ended == code, fix
    return [Path(word) for word in words if re.search(r"-(fixed|model|universal)(\.\w+)?$", word)][-1]


def half_trained(weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """The state of an optimizer after a step, by name, in which every second parameter had no gradient."""
    named = {name: nn.Parameter(tensor) for name, tensor in weights.items()}
    for parameter in list(named.values())[::2]:
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW(list(named.items()))
    optimizer.step()
    state = optimizer.state_dict()
    names = list(named)
    groups = [{**group, "params": [names[i] for i in group["params"]]} for group in state["param_groups"]]
    return {"state": {names[i]: entries for i, entries in state["state"].items()}, "param_groups": groups}


# -- a parameter that never had a gradient -----------------------------------------------------------------------------


class Idle(nn.Module):
    """A model of which one part takes no part in training."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(6, 4)
        self.idle = nn.ModuleList(nn.Linear(6, 3) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x).sum()


def idle() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model under FSDP2 and its optimizer, before the first step."""
    model = Idle()
    fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def never_trained(root: Path) -> Truth:
    """A checkpoint `ckpt-1` of two ranks in which some have no state, and in `said` what its load ends with."""
    root.mkdir()
    spawn(2, save_and_load_idle, root)
    return {}


def save_and_load_idle(root: Path) -> None:
    """Do both in one start of the ranks."""
    save_idle(root / "ckpt-1")
    load_idle(root / "ckpt-1", root / "said")


def save_idle(root: Path) -> None:
    """Save after a step: the idle part had no gradient."""
    model, optimizer = idle()
    model(torch.ones(2, 6)).backward()
    optimizer.step()
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": moments}, checkpoint_id=root)


def load_idle(root: Path, said: Path) -> None:
    """Load it into a fresh model, as a resume does, and leave in a file what torch says."""
    model, optimizer = idle()
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optim": moments}
    try:
        dcp.load(state, checkpoint_id=root)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    except BaseException as error:  # noqa: BLE001 - such as a CheckpointException, which is no Exception
        text = str(error)
    else:
        text = "loaded"
    if torch.distributed.get_rank() == 0:
        said.write_text(text)


# -- ZeRO with another number of ranks ---------------------------------------------------------------------------------


def load_zero_and_again(root: Path, said: Path) -> None:
    """Load a checkpoint of ZeRO 1 with DeepSpeed, and again what the command makes of it that explains the first end.

    Leave in a file what DeepSpeed says both times, and the command.
    """
    first = load_zero(root)
    (found,) = explain(first, root)
    second = load_zero(run(found.fix), checkpoint={"load_universal": True})
    said.write_text(json.dumps([first, found.fix, second]))


def load_zero(root: Path, **more: Any) -> str:
    """Load a checkpoint of ZeRO 1 with DeepSpeed, and return what it says."""
    from tests.trainers.produced_zero import KINDS, Model, be_cpu, start

    be_cpu()
    stage, flags = KINDS["zero1"]
    engine = start(Model(flags), stage, flags, **more)
    try:
        path, _ = engine.load_checkpoint(str(root))
    except Exception as error:  # noqa: BLE001 - whatever DeepSpeed raises is what is asked for
        return f"{type(error).__name__}: {error}"
    return "loaded" if path else "nothing"

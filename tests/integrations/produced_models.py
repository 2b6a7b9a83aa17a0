"""Models of transformers as trainings of two ranks save them: shards of DCP, and files of DeepSpeed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.producers import Truth, _on_ranks
from tests.trainers.produced_peft import VOCABULARY, tiny_llama
from tests.trainers.produced_zero import be_cpu, start

KINDS = ("llama", "gpt2", "gemma2", "t5", "jamba", "qwen3_moe", "mixtral", "gpt_oss", "qwen2_vl", "qwen3_vl_moe")
SHARDS = "ckpt-3"


def sharded_models(root: Path) -> Truth:
    """A run `KIND` of each kind, with one checkpoint by the names in memory; the truth has `KIND:NAME`."""
    return _on_ranks(2, _shard_models, root)


def _shard_models(root: Path) -> Mapping[str, Any]:
    from tests.models.names.tiny_models import make_model

    mesh = init_device_mesh("cpu", (2,))
    truth: dict[str, Tensor] = {}
    for kind in KINDS:
        model: Any = tiny_llama(tie_word_embeddings=True) if kind == "llama" else make_model(kind)
        state = dict(model.state_dict())
        shards = {name: distribute_tensor(one, mesh, [Shard(0)]) if one.ndim else one for name, one in state.items()}
        dcp.save({"model": shards}, checkpoint_id=root / kind / SHARDS)
        if dist.get_rank() == 0:
            model.config.architectures = [type(model).__name__]
            model.config.save_pretrained(root / kind / SHARDS)
        truth |= {f"{kind}:{name}": one for name, one in state.items()}
    return truth


def llama_of_zero(root: Path) -> Truth:
    """A llama in the files of DeepSpeed's ZeRO 1 and 3, `zero1` and `zero3`; the truth has `zero3:NAME`."""
    return _on_ranks(2, _train_zero, root)


def _train_zero(root: Path) -> Mapping[str, Any]:
    from deepspeed.utils import safe_get_full_fp32_param

    be_cpu()
    truth: dict[str, Tensor] = {}
    for stage in (1, 3):
        model = tiny_llama()
        config = model.config
        config.architectures = [type(model).__name__]
        engine = start(model, stage, ("bf16",))
        ids = torch.arange(12).reshape(2, 6) % VOCABULARY
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
        engine.save_checkpoint(str(root / f"zero{stage}"))
        if dist.get_rank() == 0:
            config.save_pretrained(root / f"zero{stage}")
        for name, parameter in model.named_parameters():
            whole: Tensor | None = safe_get_full_fp32_param(parameter)
            assert whole is not None
            truth[f"zero{stage}:{name}"] = whole.clone()
    return truth

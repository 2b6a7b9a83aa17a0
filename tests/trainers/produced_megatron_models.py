"""Models of Megatron-Core of types that the Hub has, saved by ranks of every kind, with the logits that it computes.

The library itself splits them: what processes with all of a model saved, 2 ranks of tensors, pipeline and experts load
and save again. Sizes are all different, so that no axis passes for another; the vocabulary is padded.
"""

from __future__ import annotations

import contextlib
import json
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.producers import Truth, _on_ranks
from tests.trainers.produced_megatron import STEP, _replace_what_needs_a_gpu, _track

LAYERS, GROUPS, EXPERTS, HEADS, WIDTH, SHARED, INNER, HIDDEN, VOCABULARY, PADDED = 2, 4, 6, 8, 10, 20, 24, 32, 40, 48
TOKENS = [[3, 1, 39, 0, 17, 17, 8]]

OF_ALL: Mapping[str, Any] = {  # what the configs of all models say
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_query_groups": GROUPS,
    "kv_channels": WIDTH,
    "ffn_hidden_size": INNER,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "use_cpu_initialization": True,
    "pipeline_dtype": torch.float32,
}
MOE = {"num_moe_experts": EXPERTS, "moe_router_topk": 2, "moe_ffn_hidden_size": INNER, "moe_grouped_gemm": False}
GATED_SHARE = {"moe_shared_expert_intermediate_size": SHARED, "moe_shared_expert_gate": True}
TYPES: Mapping[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"add_qkv_bias": True},
    "qwen3": {"qk_layernorm": True},
    "mixtral": MOE,
    "qwen2_moe": {**MOE, **GATED_SHARE, "add_qkv_bias": True, "moe_router_pre_softmax": True},
    "qwen3_moe": {**MOE, "qk_layernorm": True},
}
# by the way that a model is split: how it is saved, by what the library calls that
SPLITS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "whole": {"whole": {}},
    "tensor": {"tensor": {}, "single": {"singleton_local_shards": True}},
    "pipeline": {"pipeline": {}, "numbered": {"non_homogeneous_layers": True}},
    "expert": {"expert": {}},
}
WAYS = tuple(way for ways in SPLITS.values() for way in ways)


def hub_config(model_type: str) -> dict[str, Any]:
    """The config.json of a model, as transformers takes it."""
    config: dict[str, Any] = {
        "model_type": model_type,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "head_dim": WIDTH,
        "vocab_size": VOCABULARY,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "max_position_embeddings": 64,
        "dtype": "float32",
    }
    if model_type == "mixtral":
        return config | {"num_local_experts": EXPERTS, "num_experts_per_tok": 2, "sliding_window": None}
    if model_type.endswith("_moe"):
        more = {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": INNER}
        is_normed = {"norm_topk_prob": model_type == "qwen3_moe"}
        return config | more | is_normed | {"intermediate_size": 28, "shared_expert_intermediate_size": SHARED}
    return config


def megatron_models(root: Path) -> Truth:
    """A run `TYPE/WAY` of each type and way to save it, and the legacy `TYPE/legacy`, `mixtral/legacy-expert`.

    Those of tensors have an optimizer, whose `exp_avg` is twice the weight.
    The truth has `TYPE:NAME` for each tensor as modules call it, and `TYPE:logits` of `TOKENS`. So has the hybrid one.
    """
    return _on_ranks(2, _save_all, root)


def _save_all(root: Path) -> Mapping[str, Any]:
    _replace_what_needs_a_gpu()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.moe import moe_utils

    from tests.trainers.produced_megatron_hybrid import HYBRID, save_hybrid

    CudaRNGStatesTracker.fork = lambda *_, **__: contextlib.nullcontext()
    moe_utils.te_general_gemm = None  # it asks for it also where Transformer Engine is not installed
    truth: dict[str, Tensor] = {}
    for split, ways in SPLITS.items():
        sizes = {f"{name}_model_parallel_size": 2 if name == split else 1 for name in ("tensor", "pipeline", "expert")}
        parallel_state.initialize_model_parallel(**sizes)
        for model_type, kinds in TYPES.items():
            if split == "expert" and "num_moe_experts" not in kinds:
                continue
            model = _model(model_type, sizes)
            _fill(model, None if split == "whole" else root / model_type / "whole" / STEP)
            if split == "whole":
                (root / model_type).mkdir(parents=True, exist_ok=True)
                (root / model_type / "config.json").write_text(json.dumps(hub_config(model_type)))
                truth |= {f"{model_type}:{name}": value for name, value in _tensors_of(model).items()}
                truth[f"{model_type}:logits"] = _logits(model)
            args = _args(model_type, sizes)
            for way, metadata in ways.items():
                _save(model, root / model_type / way / STEP, metadata, args)
            if split == "tensor":
                _save_legacy(model, root / model_type / "legacy", dist.get_rank(), 0, args)
            elif split == "expert" and model_type == "mixtral":
                _save_legacy(model, root / model_type / "legacy-expert", 0, dist.get_rank(), args)
        parallel_state.destroy_model_parallel()
    return truth | save_hybrid(root / HYBRID)


def _model(model_type: str, sizes: Mapping[str, int]) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    more = TYPES[model_type]
    config = TransformerConfig(
        num_layers=LAYERS,
        **OF_ALL,
        layernorm_epsilon=1e-6,
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        **sizes,
        **more,
    )
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, normalization="RMSNorm", qk_layernorm=config.qk_layernorm
    )
    return GPTModel(
        config,
        spec,
        vocab_size=PADDED,
        max_sequence_length=64,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    )


def _fill(model: Any, whole: Path | None) -> None:
    """Give a model the weights that lie in a checkpoint; random ones if there is none."""
    from megatron.core import dist_checkpointing as library

    if whole is not None:
        model.load_state_dict(library.load({"model": _sharded(model, {})}, str(whole))["model"])
        return
    random = torch.Generator().manual_seed(7)
    for name, parameter in model.named_parameters():
        about = 1.0 if "norm" in name else 0.0
        parameter.data.normal_(about, 0.2, generator=random)


def _sharded(model: Any, metadata: Mapping[str, Any]) -> Any:
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return model.sharded_state_dict(metadata={"dp_cp_group": group, **metadata})


def _args(model_type: str, sizes: Mapping[str, int]) -> Namespace:
    """Those of Megatron-LM's arguments that say what the model is and how it is split."""
    return Namespace(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        group_query_attention=True,
        num_query_groups=GROUPS,
        kv_channels=WIDTH,
        swiglu=True,
        apply_layernorm_1p=False,
        rotary_interleaved=False,
        num_experts=TYPES[model_type].get("num_moe_experts"),
        **sizes,
    )


def _optimizer(model: Any) -> torch.optim.AdamW:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for parameter in model.parameters():
        optimizer.state[parameter]["exp_avg"].copy_(2 * parameter.data)
    return optimizer


def _save(model: Any, there: Path, metadata: Mapping[str, Any], args: Namespace) -> None:
    from megatron.core import dist_checkpointing as library
    from megatron.core.dist_checkpointing import optimizer as sharding

    there.mkdir(parents=True, exist_ok=True)
    state = {"model": _sharded(model, metadata), "iteration": 3, "checkpoint_version": 3.0, "args": args}
    if there.parent.name == "tensor":
        state["optimizer"] = _optimizer(model).state_dict()
        by_number = sharding.get_param_id_to_sharded_param_map(_sharded(model, metadata), model.parameters())
        sharding.optim_state_to_sharding_state(state["optimizer"], by_number, exclude_keys=("step",))
    library.save(state, str(there))
    _track(there.parent)


def _save_legacy(model: Any, run: Path, tensor: int, expert: int, args: Namespace) -> None:
    ranks = f"mp_rank_{tensor:02d}" + (f"_{expert:03d}" if "expert" in run.name else "")
    there = run / STEP / ranks
    there.mkdir(parents=True)
    state = {"model": model.state_dict_for_save_checkpoint(), "iteration": 3, "checkpoint_version": 3.0, "args": args}
    if run.name == "legacy":
        state["optimizer"] = _optimizer(model).state_dict()
    torch.save(state, there / "model_optim_rng.pt")
    _track(run)


def _tensors_of(model: Any) -> dict[str, Tensor]:
    return {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}


def _logits(model: Any) -> Tensor:
    tokens = torch.tensor(TOKENS)
    length = tokens.shape[1]
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    with torch.no_grad():
        found: Tensor = model.eval()(tokens, torch.arange(length)[None], mask)
    return found


def load(root: Path) -> Truth:
    """What the library loads of `TYPE` in `root`, into a model whose layers have numbers: `TYPE:NAME` by modules."""
    return _on_ranks(1, _load, root)


def _load(root: Path) -> Mapping[str, Any]:
    _replace_what_needs_a_gpu()
    from megatron.core import dist_checkpointing as library
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel()
    found: dict[str, Tensor] = {}
    for model_type in TYPES:
        state = _sharded(_model(model_type, {}), {"non_homogeneous_layers": True})
        for sharded in state.values():
            if "num_moe_experts" in TYPES[model_type]:  # as Transformer Engine's layers call it, which need a GPU
                sharded.key = sharded.key.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
        loaded, unasked, absent = library.load({"model": state}, str(root / model_type), strict="return_all")
        assert not unasked
        assert all("_extra_state" in name for name in absent), absent
        tensors = {name: value for name, value in loaded["model"].items() if isinstance(value, Tensor)}
        found |= {f"{model_type}:{name}": value for name, value in tensors.items()}
    return found

"""A hybrid model of Megatron-Core, of Mamba, attention, experts and MLP, saved by ranks of every kind, with its logits.

The library's own classes are split and saved. Its Mamba runs on kernels for GPUs, `mamba_ssm` and triton: stand-ins for
these compute the same by the formulas of Mamba 2. Modules of Transformer Engine have the norms inside of the layers
behind them, so the local ones are saved under those names, as `sharded_state_dict_keys_map` is for.
"""

from __future__ import annotations

import contextlib
import json
import sys
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.producers import Truth, _on_ranks
from tests.trainers.produced_megatron import STEP, _replace_what_needs_a_gpu
from tests.trainers.produced_megatron_models import (
    EXPERTS,
    GROUPS,
    HEADS,
    HIDDEN,
    INNER,
    OF_ALL,
    PADDED,
    SHARED,
    VOCABULARY,
    WIDTH,
    _fill,
    _logits,
    _save,
    _save_legacy,
    _sharded,
    _tensors_of,
)

HYBRID, PATTERN = "nemotron_h", "M*E-"
EXPERT = 28  # rows of one
MAMBA = {"mamba_num_heads": 4, "mamba_head_dim": 16, "mamba_num_groups": 2, "mamba_state_dim": 6}
WAYS = ("whole", "tensor", "pipeline", "expert")
CONFIG: Mapping[str, Any] = {
    "model_type": HYBRID,
    "layers_block_type": ["linear_attention", "full_attention", "moe", "mlp"],
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "head_dim": WIDTH,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 6,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": EXPERT,
    "moe_shared_expert_intermediate_size": SHARED,
    "tie_word_embeddings": False,
    "dtype": "float32",
}


class GatedNorm(nn.Module):
    """The norm of the gated output, in groups: what `mamba_ssm` has a kernel for."""

    def __init__(self, size: int, *, eps: float, group_size: int, dtype: torch.dtype, **_: object) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype))
        self.eps, self.group_size = eps, group_size

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        groups = (x * nn.functional.silu(z)).unflatten(-1, (-1, self.group_size))
        return (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.eps)).flatten(-2) * self.weight


def scan(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, _: int, **more: Any) -> Tensor | tuple[Tensor, Tensor]:
    """The outputs and the last state of Mamba 2, a token at a time: state = state * exp(dt * a) + dt * x * b."""
    dt = nn.functional.softplus(dt + more["dt_bias"])
    heads = x.shape[2] // b.shape[2]
    b, c = b.repeat_interleave(heads, 2), c.repeat_interleave(heads, 2)
    state = x.new_zeros(x.shape[0], *x.shape[2:], b.shape[-1])
    out = []
    for i in range(x.shape[1]):
        added = (dt[:, i, :, None] * x[:, i])[..., None] * b[:, i, :, None]
        state = state * (dt[:, i] * a)[..., None, None].exp() + added
        out.append((state * c[:, i, :, None]).sum(-1) + more["D"][:, None] * x[:, i])
    return (torch.stack(out, 1), state) if more["return_final_states"] else torch.stack(out, 1)


def _replace_kernels() -> None:
    triton = "megatron.core.inference.contexts.attention_context.triton"  # of an inference that is not run
    names = ("tensor_get_slice_after", "tensor_masked_update", "tensor_merge")
    found: dict[str, dict[str, Any]] = {
        triton: {},
        f"{triton}.tensor_ops": dict.fromkeys(names),
        **{name: {} for name in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton")},
        "mamba_ssm.ops.triton.layernorm_gated": {"RMSNorm": GatedNorm},
        "mamba_ssm.ops.triton.ssd_combined": {
            "mamba_chunk_scan_combined": scan,
            "mamba_split_conv1d_scan_combined": None,
        },
    }
    for name, members in found.items():
        module = ModuleType(name)
        module.__dict__.update({**members, "__path__": []})
        sys.modules[name] = module


def save_hybrid(root: Path) -> dict[str, Tensor]:
    """Save a run of each way to split the model, and `legacy`, on both ranks; for its truth see `megatron_models`."""
    _replace_kernels()
    from megatron.core import parallel_state

    root.mkdir(parents=True, exist_ok=True)
    (root / "config.json").write_text(json.dumps(CONFIG))
    truth: dict[str, Tensor] = {}
    for way in WAYS:
        sizes = {f"{name}_model_parallel_size": 2 if name == way else 1 for name in WAYS[1:]}
        parallel_state.initialize_model_parallel(**sizes)
        model = _model(sizes)
        _fill(model, None if way == "whole" else root / "whole" / STEP)
        if way == "whole":
            model.decoder.layers[2].mlp.router.expert_bias.normal_()
            truth = {f"{HYBRID}:{name}": value for name, value in _tensors_of(model).items()}
            truth[f"{HYBRID}:logits"] = _logits(model)
        args = _args(sizes)
        _save(model, root / way / STEP, {}, args)
        if way == "tensor":
            _save_legacy(model, root / "legacy", dist.get_rank(), 0, args)
        parallel_state.destroy_model_parallel()
    return truth


def _args(sizes: Mapping[str, int]) -> Namespace:
    attention = {"num_attention_heads": HEADS, "num_query_groups": GROUPS, "kv_channels": WIDTH}
    of_all = {"num_layers": len(PATTERN), "hidden_size": HIDDEN, "swiglu": False, "hybrid_override_pattern": PATTERN}
    return Namespace(**attention, **of_all, **MAMBA, **sizes)


def _model(sizes: Mapping[str, int]) -> Any:
    from megatron.core import parallel_state
    from megatron.core.activations import squared_relu
    from megatron.core.models.mamba.mamba_model import MambaModel
    from megatron.core.ssm import mamba_block
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_config import TransformerConfig

    mamba_block.TENorm = WrappedTorchNorm  # that of Transformer Engine, which needs a GPU
    config = TransformerConfig(
        num_layers=len(PATTERN),
        **OF_ALL,
        layernorm_epsilon=1e-5,
        activation_func=squared_relu,
        num_moe_experts=EXPERTS,
        moe_router_topk=2,
        moe_ffn_hidden_size=EXPERT,
        moe_shared_expert_intermediate_size=SHARED,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_grouped_gemm=False,
        is_hybrid_model=True,
        use_mamba_mem_eff_path=False,
        **MAMBA,
        **sizes,
    )
    return MambaModel(
        config,
        _spec(),
        vocab_size=PADDED,
        max_sequence_length=64,
        hybrid_override_pattern=PATTERN,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
        position_embedding_type="none",
    )


def _spec() -> Any:
    """`mamba_stack_spec` of mamba_layer_specs.py with the local layers in place of Transformer Engine's."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add as bda
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.ssm.mamba_block import MambaStack, MambaStackSubmodules
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.tensor_parallel import ColumnParallelLinear as Columns
    from megatron.core.tensor_parallel import RowParallelLinear as Rows
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec as Spec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm as Norm
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    def layer(kind: Any, **members: Any) -> Any:
        return Spec(kind, submodules=TransformerLayerSubmodules(**members))

    mixer = Spec(MambaMixer, submodules=MambaMixerSubmodules(in_proj=Columns, out_proj=Rows))
    mamba = MambaLayerSubmodules(
        norm=Norm, mixer=mixer, mamba_bda=bda, sharded_state_dict_keys_map={"norm.": "mixer.in_proj.layer_norm_"}
    )
    attention = SelfAttentionSubmodules(linear_qkv=Columns, core_attention=DotProductAttention, linear_proj=Rows)
    return Spec(
        MambaStack,
        submodules=MambaStackSubmodules(
            mamba_layer=Spec(MambaLayer, submodules=mamba),
            attention_layer=layer(
                TransformerLayer,
                input_layernorm=Norm,
                self_attention=Spec(SelfAttention, {"attn_mask_type": AttnMaskType.causal}, submodules=attention),
                self_attn_bda=bda,
                sharded_state_dict_keys_map={"input_layernorm.": "self_attention.linear_qkv.layer_norm_"},
            ),
            mlp_layer=layer(
                MLPLayer,
                pre_mlp_layernorm=Norm,
                mlp=Spec(MLP, submodules=MLPSubmodules(linear_fc1=Columns, linear_fc2=Rows)),
                mlp_bda=bda,
                sharded_state_dict_keys_map={"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"},
            ),
            moe_layer=layer(
                TransformerLayer,
                pre_mlp_layernorm=Norm,
                mlp=get_moe_module_spec(use_te=False, num_experts=EXPERTS, moe_grouped_gemm=False),
                mlp_bda=bda,
            ),
        ),
    )


def load(root: Path) -> Truth:
    """What the library loads of a checkpoint, by modules."""
    return _on_ranks(1, _load, root)


def _load(root: Path) -> Mapping[str, Any]:
    _replace_what_needs_a_gpu()
    _replace_kernels()
    from megatron.core import dist_checkpointing as library
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    CudaRNGStatesTracker.fork = lambda *_, **__: contextlib.nullcontext()
    parallel_state.initialize_model_parallel()
    loaded, unasked, absent = library.load({"model": _sharded(_model({}), {})}, str(root), strict="return_all")
    assert not unasked, unasked
    assert all("_extra_state" in name for name in absent), absent
    return {name: value for name, value in loaded["model"].items() if isinstance(value, Tensor)}

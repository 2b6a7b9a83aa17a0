"""Decide by name how the tensors of Megatron's layers are split over tensor-parallel ranks.

Source: megatron/core/tensor_parallel/layers.py, transformer/{attention,mlp}.py, transformer/moe/{experts,router}.py: a
ColumnParallelLinear splits the rows of weight and bias, a RowParallelLinear splits the columns of its weight and copies
its bias. A rank has the gates of a gated layer first, then the up projection. Queries, keys and values are interleaved
by groups, and each rank has full groups. The names before Megatron-Core come from megatron/legacy/model. In a Mamba
layer (megatron/core/ssm/mamba_mixer.py) each rank has some heads and groups, and its rows of z, x, B, C and dt follow
each other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ckptkit.errors import Corrupt, Unsupported
from ckptkit.formats.shards.join_ranks import (
    BY_COLUMNS,
    BY_HALVES,
    BY_ROWS,
    COPIED,
    JoinRule,
    JoinRules,
    require_join_rule,
)
from ckptkit.layout import Spec

_RULES: JoinRules = (
    (r"(.*\.)?word_embeddings\.weight", BY_ROWS),
    (r"(.*\.)?output_layer\.(weight|bias)", BY_ROWS),
    (r".*\.linear_qkv\.(weight|bias)", BY_ROWS),
    (r".*\.query_key_value\.(weight|bias)", BY_ROWS),
    (r".*\.linear_q(_up)?_proj\.weight|.*\.linear_kv_up_proj\.weight", BY_ROWS),
    (r".*\.linear_proj\.weight", BY_COLUMNS),
    (r".*\.(self|inter)_attention\.dense\.weight", BY_COLUMNS),
    (r".*\.linear_fc2\.weight[0-9]*", BY_COLUMNS),
    (r".*\.dense_4h_to_h\.weight", BY_COLUMNS),
    (r".*\.(linear_proj|linear_fc2|dense|dense_4h_to_h)\.bias[0-9]*", COPIED),
    (r".*(layernorm|layer_norm)[._](weight|bias)", COPIED),
    (r"(.*\.)?(position|tokentype)_embeddings\.weight", COPIED),
    (r".*\.router\.(weight|bias|expert_bias|local_tokens_per_expert)", COPIED),
    (r".*\.shared_experts\.gate_weight", COPIED),
    (r".*\.eh_proj\.weight", BY_ROWS),
    (r".*\.(enorm|hnorm)\.weight", COPIED),
    (r"(.*\.)?rotary_pos_emb\.inv_freq", COPIED),
    (r".*\.mixer\.(A_log|D|dt_bias|norm\.weight)", BY_ROWS),
    (r".*\.mixer\.out_proj\.weight", BY_COLUMNS),
    (r"(.*\.)?(final_)?norm\.weight", COPIED),
)
_MAMBA = re.compile(r"(.*\.mixer\.)(?:(in_proj\.weight)|conv1d[._](?:weight|bias))")
_FIRST = re.compile(r"(.*\.)(?:linear_fc1|dense_h_to_4h)\.(?:weight|bias)([0-9]*)")
_SECOND = ("linear_fc2", "dense_4h_to_h")
_NARROWED = re.compile(r"(?:.*\.)?linear_(q|kv)_down_proj\.weight")
_SIZES = {"q": ("q_lora_rank",), "kv": ("kv_lora_rank", "qk_pos_emb_head_dim")}


def join_rule_for(name: str, specs: Mapping[str, Spec], ranks: int, args: Mapping[str, int | float]) -> JoinRule:
    """Return how the ranks split a tensor; `specs` are all tensors of one rank by the same names.

    `args` are the arguments of the job. Raises `Unsupported` for an unknown name.
    """
    narrow = _NARROWED.fullmatch(name)
    if narrow is not None:
        # multi_latent_attention.py: Transformer Engine copies it to every rank, other implementations split its rows
        narrow_sizes = [args.get(size) for size in _SIZES[narrow[1]]]
        if not all(type(size) is int for size in narrow_sizes):
            message = "the job's `args` do not give the size: cannot tell whether every rank has the whole tensor"
            raise Unsupported(message)
        found, wanted = specs[name].shape[0], sum(size for size in narrow_sizes if isinstance(size, int))
        if wanted not in (found, found * ranks):
            raise Corrupt(f"expected {wanted} rows in all (the job's `args`), found {found} on each of {ranks} ranks")
        return COPIED if found == wanted else BY_ROWS
    mamba = _MAMBA.fullmatch(name)
    if mamba is not None:
        others = specs.get(f"{mamba[1]}out_proj.weight"), specs.get(f"{mamba[1]}dt_bias")
        return join_rule_for_mamba(specs[name].shape[0], others, has_gates=mamba[2] is not None)
    match = _FIRST.fullmatch(name)
    if match is None:
        return require_join_rule(name, _RULES, ranks)
    second = next((spec for layer in _SECOND if (spec := specs.get(f"{match[1]}{layer}.weight{match[2]}"))), None)
    if second is None or len(second.shape) != 2:
        message = f"{' or '.join(_SECOND)} is missing, whose shape shows whether this layer is gated"
        raise Unsupported(message, tensor=name)
    rows, inner = specs[name].shape[0], second.shape[1]
    if rows not in (inner, 2 * inner):
        raise Corrupt(
            f"expected {inner} or {2 * inner} rows on each rank (columns of the next layer), found {rows}", tensor=name
        )
    return BY_HALVES if rows == 2 * inner else BY_ROWS


def join_rule_for_mamba(rows: int, others: tuple[Spec | None, Spec | None], *, has_gates: bool) -> JoinRule:
    """Return how ranks split a Mamba tensor with rows of x, B and C, and with `has_gates` also of z and dt.

    `others` are the output projection, whose columns are the channels of x, and the bias of dt, which has one value per
    head.
    """
    out, bias = others
    if out is None or bias is None or len(out.shape) != 2 or len(bias.shape) != 1:
        raise Unsupported("out_proj or dt_bias is missing, whose shapes show where the parts of this tensor begin")
    (inner, heads) = out.shape[1], bias.shape[0]
    front, back = ((inner, inner), (heads,)) if has_gates else ((inner,), ())
    states, odd = divmod(rows - sum(front) - sum(back), 2)
    if odd or states < 0:
        least = sum(front) + sum(back)
        raise Corrupt(f"expected {least} rows ({inner} channels, {heads} heads) and an even number more, found {rows}")
    return JoinRule(0, extents=(*front, states, states, *back))

"""Llama in plain torch.

It has the tensor names of Hugging Face's Llama and the same logits bit for bit. Documents packed into one sequence do
not attend to each other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ckptkit.training.models.config import ModelConfig


def causal_document_mask(positions: Tensor) -> Tensor:
    """Return an attention mask, bool [batch, 1, query, key]: True for earlier keys of the query's document.

    `positions` int64 [batch, length] count from 0 in each document.
    """
    document = (positions == 0).cumsum(dim=1)
    same = document[:, :, None] == document[:, None, :]
    return same.tril()[:, None]


class RMSNorm(nn.Module):
    """RMS normalization over the last dimension, computed in fp32, with a weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., size] to the same shape and dtype."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Rope(nn.Module):
    """Rotary position embedding. `inv_freq` stays fp32, because bf16 is too coarse for distant positions."""

    inv_freq: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("inv_freq", torch.empty(config.head_dim // 2), persistent=False)
        self.recompute_frequencies()

    def recompute_frequencies(self) -> None:
        """Compute the frequencies again. Needed after `to_empty`, because checkpoints do not contain them."""
        # Always on the CPU, as Hugging Face does: `pow` of another device may differ in the last bit.
        channels = torch.arange(0, self.config.head_dim, 2, dtype=torch.float32, device="cpu")
        inv_freq = 1.0 / self.config.rope_theta ** (channels / self.config.head_dim)
        scaling = self.config.rope_scaling
        if scaling is not None and scaling.rope_type == "linear":
            inv_freq = inv_freq / scaling.factor
        elif scaling is not None:
            # llama3: only the low frequencies are divided by the factor, with a smooth transition.
            # Source: `_compute_llama3_parameters` in transformers/modeling_rope_utils.py.
            wavelength = 2 * math.pi / inv_freq
            context = scaling.original_max_position_embeddings
            low, high = scaling.low_freq_factor, scaling.high_freq_factor
            slow, fast = wavelength > context / low, wavelength < context / high
            kept = (context / wavelength - low) / (high - low)
            between = (1 - kept) * inv_freq / scaling.factor + kept * inv_freq
            inv_freq = torch.where(slow, inv_freq / scaling.factor, torch.where(fast, inv_freq, between))
        self.inv_freq.copy_(inv_freq)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of int64 positions [batch, length], each [batch, 1, length, head_dim] in `dtype`."""
        angles = positions[:, None, :, None].float() * self.inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(dtype), angles.sin().to(dtype)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the channel pairs (i, i + head_dim/2) of [..., length, head_dim] by the angles of their positions."""
    first, second = x.tensor_split(2, dim=-1)
    return (x * cos) + (torch.cat((-second, first), dim=-1) * sin)


class Attention(nn.Module):
    """Causal attention; several query heads share one key and value head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        wide, narrow = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.queries_per_key = config.num_attention_heads // config.num_key_value_heads
        self.q_proj = nn.Linear(config.hidden_size, wide, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, narrow, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, narrow, bias=False)
        self.o_proj = nn.Linear(wide, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        """Map [batch, length, hidden] to the same shape. Without a mask attention is causal."""
        projected = (projection(x) for projection in (self.q_proj, self.k_proj, self.v_proj))
        # [batch, length, heads * head_dim] to [batch, heads, length, head_dim]
        q, k, v = (wide.view(*wide.shape[:-1], -1, self.head_dim).transpose(1, 2) for wide in projected)
        q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        grouped = self.queries_per_key > 1
        if mask is not None and grouped:  # CUDA's fused kernels support a mask only without grouped heads
            k, v = (heads.repeat_interleave(self.queries_per_key, dim=1) for heads in (k, v))
            grouped = False
        mixed = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.head_dim**-0.5, enable_gqa=grouped
        )
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out


class MLP(nn.Module):
    """The gated feed-forward layer of a block (SwiGLU)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., hidden] to the same shape."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class LlamaBlock(nn.Module):
    """One transformer block; an FSDP unit."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        """Map [batch, length, hidden] to the same shape."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Decoder(nn.Module):
    """Embedding, blocks and the last norm: the module `model` of Hugging Face's Llama."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(LlamaBlock(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = Rope(config)

    def forward(self, tokens: Tensor, positions: Tensor | None) -> Tensor:
        """Map int64 [batch, length] to [batch, length, hidden]."""
        x = self.embed_tokens(tokens)
        mask = None if positions is None else causal_document_mask(positions)
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        cos, sin = self.rotary_emb(positions, x.dtype)
        for block in self.layers:
            x = block(x, cos, sin, mask)
        out: Tensor = self.norm(x)
        return out


class Llama(nn.Module):
    """A Llama language model with the state-dict names of Hugging Face's `LlamaForCausalLM`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.tie_head()

    def tie_head(self) -> None:
        """Tie `lm_head` to the embedding if the config says so. Needed again after `to_empty`."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Map int64 token ids [batch, length] to logits [batch, length, vocab_size].

        `positions`, int64 of the same shape, count from 0 in each document of a packed sequence.
        """
        logits: Tensor = self.lm_head(self.model(tokens, positions))
        return logits


class LlamaBlueprint:
    """The `Blueprint` of the built-in Llama; see `ckptkit.training.models.blueprint`."""

    weights: Path | None = None

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.vocab_size = config.vocab_size
        self.max_length = config.max_position_embeddings
        self.layers = config.num_hidden_layers
        self.attention_width = config.num_attention_heads * config.head_dim

    def build(self) -> nn.Module:
        return Llama(self.config)

    def transformer_blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        return list(cast(Llama, model).model.layers)

    def initialize_direct_tensors(self, name: str, module: nn.Module) -> None:
        """Initialize `module` without its children: normal matrices, norms of ones, RoPE frequencies."""
        match module:
            case nn.Linear() | nn.Embedding():
                # Output projections add up over the depth of the residual stream: scale them down, as GPT-2 does.
                depth = 2 * self.layers if name.endswith(("o_proj", "down_proj")) else 1
                nn.init.normal_(module.weight, std=self.config.initializer_range * depth**-0.5)
            case RMSNorm():
                nn.init.ones_(module.weight)
            case Rope():
                module.recompute_frequencies()

    def tie_weights(self, model: nn.Module) -> None:
        cast(Llama, model).tie_head()

    def compute_logits(self, model: nn.Module, tokens: Tensor, positions: Tensor | None) -> Tensor:
        logits: Tensor = model(tokens, positions)
        return logits

    def model_files(self) -> Mapping[str, bytes]:
        """Return the config.json with which transformers loads the weights."""
        return {"config.json": self.config.to_json().encode()}

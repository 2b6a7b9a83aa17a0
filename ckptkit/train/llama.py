"""Llama in plain torch: the tensor names of Hugging Face's, and its logits bit for bit. Knows no ranks, no files."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ckptkit.train.model_config import ModelConfig


class RMSNorm(nn.Module):
    """Divides by the root mean square of the last dimension, in fp32, and scales by a weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] to the same shape and dtype."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Rope(nn.Module):
    """The angles of rotary position embedding. `inv_freq` stays fp32: bf16 would ruin far positions."""

    inv_freq: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("inv_freq", torch.empty(config.head_dim // 2), persistent=False)
        self.reset()

    def reset(self) -> None:
        """Compute the frequencies again: needed after `to_empty`, since no checkpoint holds them."""
        # On the CPU whatever the device, as Hugging Face does: another device's `pow` may differ in the last bit.
        channels = torch.arange(0, self.config.head_dim, 2, dtype=torch.float32, device="cpu")
        self.inv_freq.copy_(1.0 / self.config.rope_theta ** (channels / self.config.head_dim))

    def forward(self, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines of positions 0 to `length`, each [length, head_dim] in `dtype`."""
        positions = torch.arange(length, device=self.inv_freq.device).float()
        angles = positions[:, None] * self.inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn channel pairs (i, i + head_dim/2) of [..., length, head_dim] by the angles of their positions."""
    first, second = x.tensor_split(2, dim=-1)
    return (x * cos) + (torch.cat((-second, first), dim=-1) * sin)


class Attention(nn.Module):
    """Causal attention; several query heads share one key and value head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        wide, narrow = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.grouped = wide != narrow
        self.q_proj = nn.Linear(config.hidden_size, wide, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, narrow, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, narrow, bias=False)
        self.o_proj = nn.Linear(wide, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[batch, length, hidden] to the same shape."""
        q, k, v = (self._heads(projection(x)) for projection in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self.head_dim**-0.5, enable_gqa=self.grouped
        )
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out

    def _heads(self, x: Tensor) -> Tensor:
        """[batch, length, heads * head_dim] to [batch, heads, length, head_dim]."""
        return x.view(*x.shape[:-1], -1, self.head_dim).transpose(1, 2)


class MLP(nn.Module):
    """The gated feed-forward half of a block (SwiGLU)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] to the same shape."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """One transformer block: the unit that FSDP gathers and frees."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[batch, length, hidden] to the same shape."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Decoder(nn.Module):
    """Embedding, blocks and the last norm: the part that Hugging Face calls `model`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = Rope(config)

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 [batch, length] to [batch, length, hidden]."""
        x = self.embed_tokens(tokens)
        cos, sin = self.rotary_emb(tokens.shape[1], x.dtype)
        for block in self.layers:
            x = block(x, cos, sin)
        out: Tensor = self.norm(x)
        return out


class Llama(nn.Module):
    """A Llama language model whose state dict is that of Hugging Face's `LlamaForCausalLM`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.restore()

    def restore(self) -> None:
        """Tie the embeddings and recompute RoPE: what `to_empty` undoes and no checkpoint brings back."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.model.rotary_emb.reset()

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 token ids [batch, length] to logits [batch, length, vocab_size]."""
        logits: Tensor = self.lm_head(self.model(tokens))
        return logits


def initial_weight(name: str, shape: torch.Size, config: ModelConfig, seed: int) -> Tensor:
    """The fp32 weight that tensor `name` starts from: a function of the seed and the name, of no rank and no order."""
    if len(shape) == 1:
        return torch.ones(shape)
    # The projections that end a block add up over the depth: smaller ones keep the sum's size (GPT-2).
    ends_block = name.endswith(("o_proj.weight", "down_proj.weight"))
    depth = 2 * config.num_hidden_layers if ends_block else 1
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return torch.empty(shape).normal_(0.0, config.initializer_range * depth**-0.5, generator=generator)

"""A GPT as nanoGPT has it, small: Linear where GPT-2 on the Hub has Conv1D, the head tied to the embedding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention


@dataclass(frozen=True)
class Widths:
    """The numbers of a model, all of them different."""

    n_layer: int = 2
    n_head: int = 4
    n_embd: int = 32
    block_size: int = 24
    vocab_size: int = 48
    bias: bool = True


class Attention(nn.Module):
    def __init__(self, of: Widths) -> None:
        super().__init__()
        self.n_head = of.n_head
        self.c_attn = nn.Linear(of.n_embd, 3 * of.n_embd, bias=of.bias)
        self.c_proj = nn.Linear(of.n_embd, of.n_embd, bias=of.bias)
        self.register_buffer("bias", torch.ones(of.block_size, of.block_size).tril()[None, None])  # a mask, in old ones

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.c_attn(x).split(width, dim=2)
        q, k, v = (one.view(batch, length, self.n_head, -1).transpose(1, 2) for one in parts)
        found = scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.c_proj(found.transpose(1, 2).reshape(batch, length, width))
        return out


class Inner(nn.Module):
    def __init__(self, of: Widths) -> None:
        super().__init__()
        self.c_fc = nn.Linear(of.n_embd, 4 * of.n_embd, bias=of.bias)
        self.c_proj = nn.Linear(4 * of.n_embd, of.n_embd, bias=of.bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.c_proj(gelu(self.c_fc(x)))
        return out


class Block(nn.Module):
    def __init__(self, of: Widths) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = (nn.LayerNorm(of.n_embd, bias=of.bias) for _ in range(2))
        self.attn, self.mlp = Attention(of), Inner(of)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out


class GPT(nn.Module):
    """The model: token ids [batch, length] to logits [batch, length, vocabulary]."""

    def __init__(self, of: Widths) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(of.vocab_size, of.n_embd),
                "wpe": nn.Embedding(of.block_size, of.n_embd),
                "h": nn.ModuleList(Block(of) for _ in range(of.n_layer)),
                "ln_f": nn.LayerNorm(of.n_embd, bias=of.bias),
            }
        )
        self.lm_head = nn.Linear(of.n_embd, of.vocab_size, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight  # type: ignore[assignment]

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.transformer["wte"](tokens) + self.transformer["wpe"](torch.arange(tokens.shape[1]))
        for block in self.transformer["h"]:  # type: ignore[attr-defined]
            x = block(x)
        logits: Tensor = self.lm_head(self.transformer["ln_f"](x))
        return logits

"""A Llama as torchtitan publishes it, small: rotary embeddings turn neighbors, and names are its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu


@dataclass(frozen=True)
class Widths:
    """The numbers of a model, all of them different."""

    layers: int = 2
    hidden: int = 32
    heads: int = 4
    key_heads: int = 2
    head: int = 8
    inner: int = 24
    vocabulary: int = 40
    theta: float = 10000.0


class Projections(nn.Module):
    def __init__(self, of: Widths) -> None:
        super().__init__()
        self.wq = nn.Linear(of.hidden, of.heads * of.head, bias=False)
        self.wk = nn.Linear(of.hidden, of.key_heads * of.head, bias=False)
        self.wv = nn.Linear(of.hidden, of.key_heads * of.head, bias=False)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [self.wq(x), self.wk(x), self.wv(x)]


class Attention(nn.Module):
    def __init__(self, of: Widths) -> None:
        super().__init__()
        self.of = of
        self.qkv_linear = Projections(of)
        self.wo = nn.Linear(of.heads * of.head, of.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (one.view(batch, length, -1, self.of.head) for one in self.qkv_linear(x))
        q, k = self.turn(q), self.turn(k)
        repeats = self.of.heads // self.of.key_heads
        k, v = (one.repeat_interleave(repeats, 2).transpose(1, 2) for one in (k, v))
        found = scaled_dot_product_attention(q.transpose(1, 2), k, v, is_causal=True)
        out: Tensor = self.wo(found.transpose(1, 2).reshape(batch, length, -1))
        return out

    def turn(self, x: Tensor) -> Tensor:
        """Rotate pairs of neighbors as complex numbers."""
        width = self.of.head
        rates = 1.0 / self.of.theta ** (torch.arange(0, width, 2).float() / width)
        angles = torch.outer(torch.arange(x.shape[1]).float(), rates)
        turns = torch.polar(torch.ones_like(angles), angles)[None, :, None]
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turns).flatten(3)


class FeedForward(nn.Module):
    def __init__(self, of: Widths) -> None:
        super().__init__()
        self.w1 = nn.Linear(of.hidden, of.inner, bias=False)
        self.w2 = nn.Linear(of.inner, of.hidden, bias=False)
        self.w3 = nn.Linear(of.hidden, of.inner, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(silu(self.w1(x)) * self.w3(x))
        return out


class Block(nn.Module):
    def __init__(self, of: Widths) -> None:
        super().__init__()
        self.attention = Attention(of)
        self.feed_forward = FeedForward(of)
        self.attention_norm = nn.RMSNorm(of.hidden, eps=1e-6)
        self.ffn_norm = nn.RMSNorm(of.hidden, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.feed_forward(self.ffn_norm(x))
        return out


class Titan(nn.Module):
    """The model: token ids [batch, length] to logits [batch, length, vocabulary]."""

    def __init__(self, of: Widths) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(of.vocabulary, of.hidden)
        self.layers = nn.ModuleDict({str(i): Block(of) for i in range(of.layers)})
        self.norm = nn.RMSNorm(of.hidden, eps=1e-6)
        self.lm_head = nn.Linear(of.hidden, of.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for block in self.layers.values():
            x = block(x)
        logits: Tensor = self.lm_head(self.norm(x))
        return logits

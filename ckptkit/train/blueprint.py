"""Blueprints: a model that is not built yet, as the loop needs to know it. Knows no ranks and no steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor, nn


class Blueprint(Protocol):
    """What the loop asks of a model: the built-in Llama's and transformers' answer alike."""

    vocab_size: int
    max_length: int  # tokens that a sequence may have
    layers: int  # transformer blocks
    attention_width: int  # query heads times the size of one
    weights: Path | None  # a directory with the weights it was trained to, if it has any

    def build(self) -> nn.Module:
        """The model, tied where it should be, on torch's default device: `meta`, when the loop asks."""

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """Its transformer blocks in the order of the forward pass: the units that FSDP gathers and frees."""

    def initialise(self, model: nn.Module, name: str, module: nn.Module) -> None:
        """Give the parameters and buffers of `module` itself, not of its children, their first values.

        They are whole and on a real device, and hold garbage; torch's random numbers are seeded for this module.
        `name` is the module's in `model`.
        """

    def tie(self, model: nn.Module) -> None:
        """Tie again what was tied: moving a model off `meta` undoes it."""

    def logits(self, model: nn.Module, tokens: Tensor, positions: Tensor | None) -> Tensor:
        """Logits [batch, length, vocabulary] of int64 token ids [batch, length].

        `positions` int64 [batch, length] count from 0 in each document, and no token sees another document's; None
        is one document per sequence.
        """

    def files(self) -> Mapping[str, bytes]:
        """The small files with which others open its weights: config.json, and what belongs to it."""

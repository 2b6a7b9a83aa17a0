"""Compute a model's parameters and activation widths from its config, without weights."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from ckptkit.errors import Unsupported
from ckptkit.layout.box import Shape
from ckptkit.models.expected import expected_model
from ckptkit.models.known_types import sizes_by_letter

_UNIT = re.compile(r".*?\.\d+\.")  # `model.layers.0.`, `transformer.h.0.`: a module in a ModuleList


@dataclass(frozen=True)
class Architecture:
    """A model described by its config.

    `parameters` are shapes by name, each tensor once; `tied` are the other state-dict names of some of them. Widths are
    elements per token: of the residual stream (`hidden`), the queries, the keys (equal to the values), the feed-forward
    intermediate (`inner`), and each norm in a block. `max_length` is the longest sequence in tokens, 0 if unknown.
    `is_llama` is true if the blocks compute the same as Llama blocks.
    """

    model_type: str
    parameters: Mapping[str, Shape]
    tied: Mapping[str, Shape]
    layers: int
    vocabulary: int
    heads: int
    hidden: int
    query: int
    key: int
    inner: int
    norms: tuple[int, ...]
    max_length: int
    is_llama: bool

    @cached_property
    def numel(self) -> int:
        return sum(map(prod, self.parameters.values()))

    @cached_property
    def largest_block_numel(self) -> int:
        """Return the parameters of the largest transformer block, which is one FSDP unit."""
        return max(self._blocks.values(), default=0)

    @cached_property
    def all_blocks_numel(self) -> int:
        return sum(self._blocks.values())

    @property
    def root_unit_numel(self) -> int:
        """Return the parameters of the root FSDP unit: embedding, head and last norm, all outside the blocks."""
        return self.numel - self.all_blocks_numel

    @cached_property
    def largest_unit_matrix_numel(self) -> int:
        """Return the parameters of the largest matrix outside the blocks: the head, or a matrix of the same size."""
        return max((prod(shape) for name, shape in self.parameters.items() if not _UNIT.match(name)), default=0)

    @cached_property
    def _blocks(self) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for name, shape in self.parameters.items():
            if match := _UNIT.match(name):
                sizes[match[0]] = sizes.get(match[0], 0) + prod(shape)
        return sizes


def read_architecture(config: Mapping[str, Any]) -> Architecture:
    """Return the architecture that a config.json describes, from ckptkit's tables or from transformers.

    Raises `Unsupported` if both do not know the model, or if the config lacks a size.
    """
    model = expected_model({key: value for key, value in config.items() if key != "quantization_config"})
    described = model.sizes
    parameters = {name: shape or (1,) for name, shape in model.parameters.items()}
    try:  # under the names of Llama's config
        sizes, layers = sizes_by_letter(described), int(described["num_hidden_layers"])
        max_length = int(described.get("max_position_embeddings") or 0)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        message = f"the config of this `{described.get('model_type')}` lacks a size: {error!r}"
        raise Unsupported(message) from error
    if (smallest := min(layers, *sizes.values())) < 1:
        message = f"expected sizes of 1 or more in the config of this `{described.get('model_type')}`, found {smallest}"
        raise Unsupported(message)
    # elements per token of the norms in the first block; two norms if it has none
    widths = {"q_norm": sizes["q"], "k_norm": sizes["k"]}
    norms = [name.split(".")[-2] for name in parameters if re.match(r".*?\.0\..*norm\.weight$", name)]
    return Architecture(
        model_type=str(described["model_type"]),
        parameters=parameters,
        tied={name: model.shapes[name] for name in model.tied},
        layers=layers,
        vocabulary=sizes["v"],
        heads=int(described["num_attention_heads"]),
        hidden=sizes["h"],
        query=sizes["q"],
        key=sizes["k"],
        inner=sizes["i"],
        norms=tuple(widths.get(norm, sizes["h"]) for norm in norms) or (sizes["h"],) * 2,
        max_length=max_length,
        is_llama=model.is_llama,
    )

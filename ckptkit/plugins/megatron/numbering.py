"""Number layers and experts through: each stage of a pipeline counts its layers from 0, each rank its experts.

Source: megatron/core/transformer/transformer_layer.py, get_transformer_layer_offset, and moe/experts.py. With a virtual
pipeline each stage has several runs of layers; the first run of every stage comes before the second of any.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ckptkit.errors import Corrupt

_LAYER = re.compile(r"((?:.*?\.)?layers\.)([0-9]+)(\..*)", re.DOTALL)
_EXPERT = re.compile(r"(.*\.experts\.(?:local_experts\.|linear_fc[12]\.(?:weight|bias)))([0-9]+)(.*)", re.DOTALL)
_MOST = 1 << 20  # layers or experts; ten times those of any model

Run = tuple[int, int]  # the number of a run of layers in its stage, and that of the stage: in the order of the layers


@dataclass(frozen=True, slots=True)
class Numbering:
    """The layers of each run and stage, by what they are in: numbers in the model; and how many experts a rank has."""

    layers: Mapping[tuple[str, Run], range]
    experts: int

    def name(self, name: str, run: Run, expert_rank: int) -> str:
        """Return what a tensor is called in the whole model."""
        experts = range(expert_rank * self.experts, (expert_rank + 1) * self.experts)
        match = _LAYER.fullmatch(name)
        if match:
            name = f"{match[1]}{pick(self.layers.get((match[1], run), range(0)), match[2])}{match[3]}"
        match = _EXPERT.fullmatch(name)
        return f"{match[1]}{pick(experts, match[2])}{match[3]}" if match else name


def number(names: Mapping[Run, Iterable[str]]) -> Numbering:
    """Return how to number through what one rank of each run and stage has, by the names of its tensors."""
    layers: dict[tuple[str, Run], range] = {}
    reached: dict[str, int] = {}
    experts = 0
    for run in sorted(names):
        here: dict[str, int] = {}
        for name in names[run]:
            match, expert = _LAYER.fullmatch(name), _EXPERT.fullmatch(name)
            if match:
                here[match[1]] = max(here.get(match[1], 0), 1 + as_number(match[2]))
            if expert:
                experts = max(experts, 1 + as_number(expert[2]))
        for stack, count in here.items():
            first = reached.get(stack, 0)
            layers[stack, run] = range(first, first + count)
            reached[stack] = first + count
    return Numbering(layers, experts)


def count_layers(names: Iterable[str]) -> dict[str, int]:
    """Return how many layers there are, by what they are in."""
    found: dict[str, set[int]] = {}
    for name in names:
        match = _LAYER.fullmatch(name)
        if match:
            found.setdefault(match[1], set()).add(int(match[2]))
    return {stack: len(numbers) for stack, numbers in found.items()}


def pick(numbers: range, text: str) -> int:
    """Return the one of the numbers that a local number means. Raises `Corrupt` if the first rank had not as many."""
    local = as_number(text)
    if local >= len(numbers):
        raise Corrupt(
            f"expected {len(numbers)} layers or experts, as the first of these ranks has, found number {local}"
        )
    return numbers[local]


def as_number(text: str) -> int:
    """Return the number of a layer or an expert. Raises `Corrupt` for one that no model has."""
    if len(text) > 8 or int(text) >= _MOST:
        raise Corrupt(f"expected numbers of layers and experts below {_MOST}, found {text[:20]}")
    return int(text)

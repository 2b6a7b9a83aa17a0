"""Say whether the weights of a checkpoint are quantized, and whether ckptkit can compute them."""

from __future__ import annotations

from dataclasses import dataclass

from ckptkit.checkpoints.component import Component
from ckptkit.errors import Corrupt, Mismatch, Unsupported
from ckptkit.layout.box import Shape
from ckptkit.models.companions import find_config
from ckptkit.state.quantized.find import Quantized, find_quantized


@dataclass(frozen=True, slots=True)
class InspectedQuantized:
    """Quantized weights at a glance: the method, and the boxes of a weight that have one scale, each size once.

    The size is () where one is for the whole weight. `stored` are the elements of all tensors that they are kept in.
    `refusal` says why `--dtype` cannot make plain weights of them,
    None if it can.
    """

    method: str
    weights: int
    parameters: int
    stored: int
    sizes: tuple[Shape, ...]
    refusal: str | None


def inspect_quantized(part: Component) -> InspectedQuantized | None:
    """Return what is quantized in the part with the model; None where nothing is."""
    try:
        found = find_quantized(part.layout, find_config(part.path))
    except (Corrupt, Mismatch, Unsupported) as error:
        where = f"`{error.tensor}`: " if error.tensor else ""
        return InspectedQuantized("unknown", 0, 0, 0, (), f"{where}{error.message}")
    return look(found) if found else None


def look(found: Quantized) -> InspectedQuantized:
    """Look at quantized weights."""
    sizes = tuple(sorted({packed.group for packed in found.weights.values()}))
    stored = sum(found.layout.tensors[name].spec.numel for name in found.members) if found.weights else 0
    return InspectedQuantized(found.method, len(found.weights), found.parameters, stored, sizes, found.refusal)

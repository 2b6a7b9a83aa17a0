"""Read what a config.json says of how a model was quantized. Believes nothing that could not be so.

Sources: transformers/utils/quantization_config.py and compressed_tensors/quantization/quant_args.py. The blocks of
DeepSeek's models are 128 x 128 where nothing says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ckptkit.errors import Corrupt
from ckptkit.quantized.signs import KEYS

_PLAIN = (None, "fp8", "fbgemm_fp8", "compressed-tensors", "mxfp4")  # the methods that ckptkit can undo
_USUAL = (128, 128)
_LARGEST = 1 << 16  # ten times the widest block of any model

Block = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Said:
    """The words of a config: the method, None if it says nothing, and the blocks of rows and columns with one scale."""

    method: str | None = None
    blocks: tuple[Block, ...] = (_USUAL,)

    @property
    def is_known(self) -> bool:
        """Return whether ckptkit knows the method."""
        return self.method in _PLAIN


def read_said(config: Mapping[str, Any] | None) -> Said:
    """Return what a config says of quantized weights. Raises `Corrupt` for blocks of a size that there cannot be."""
    found = next((config[key] for key in KEYS if isinstance(config.get(key), dict)), None) if config else None
    if found is None:
        return Said()
    blocks = tuple(dict.fromkeys(blocks_in(found)))
    return Said(str(found.get("quant_method", "compressed-tensors")), blocks or (_USUAL,))


def blocks_in(said: Mapping[str, Any]) -> Iterator[Block]:
    """Yield the sizes of blocks: of the whole model, or of groups of modules."""
    if said.get("weight_block_size") is not None:
        yield as_block(said["weight_block_size"])
    groups = said.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict) and weights.get("block_structure") is not None:
            yield as_block(weights["block_structure"])
        elif isinstance(weights, dict) and weights.get("strategy") == "group":
            yield as_block([1, weights.get("group_size")])


def as_block(value: object) -> Block:
    """Return rows and columns of a block. Raises `Corrupt` for anything else."""
    match value:
        case [int(rows), int(columns)] if 0 < rows <= _LARGEST and 0 < columns <= _LARGEST:
            return rows, columns
    raise Corrupt(f"config.json says that the blocks of quantized weights are {value}: two sizes are needed")


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config of the same model with its weights as plain numbers."""
    return {key: value for key, value in config.items() if key not in KEYS}

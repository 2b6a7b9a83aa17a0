"""The ways in which ckptkit quantizes: names of scales, grids, and entries of config.json.

Sources: transformers/quantizers/quantizer_finegrained_fp8.py, and the preset FP8_DYNAMIC in
compressed_tensors/quantization/quant_scheme.py. Both keep inputs in 8 bits too, with scales that are found while the
model runs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptkit.layout.box import Shape
from ckptkit.layout.dtypes import DTYPES, DType
from ckptkit.state.quantized.config import Block

_EXPERTS = ".experts"  # the last part of the name of a module that has several


@dataclass(frozen=True, slots=True)
class Scheme:
    """A way to quantize matrices: the suffix of the names of scales, and the box with one scale, None for each row.

    Scales may be powers of 2, of which only `exponents` are stored: UE8M0.
    """

    name: str
    suffix: str
    block: Block | None
    exponents: bool = False

    def scales(self, shape: Shape) -> Shape | None:
        """Return the shape of the scales of a matrix; None if its boxes would not be whole.

        What loaders make of smaller boxes at the edges is not the same in all of them: transformers takes rows over
        rows of scales for the size of a box.
        """
        rows, columns = shape
        high, wide = self.box(shape)
        return (rows // high, columns // wide) if rows % high == columns % wide == 0 else None

    def box(self, shape: Shape) -> Block:
        """Return the rows and columns that have one scale in a matrix."""
        return self.block or (1, shape[1])

    def dtype(self, dtype: DType) -> DType:
        """Return the dtype of the scales in a model of this dtype."""
        if self.exponents:
            return DTYPES["float8_e8m0fnu"]
        is_half = self.block is None and dtype.name == "bfloat16"
        return DTYPES["bfloat16" if is_half else "float32"]

    def config(self, left: Sequence[str]) -> Mapping[str, Any]:
        """Return what config.json says of a model that is quantized so, but for the modules that are `left`."""
        if self.block is None:
            return in_channels(left)
        words = in_blocks(self.block, left)
        return {**words, "scale_fmt": "ue8m0"} if self.exponents else words


def in_blocks(block: Block, left: Sequence[str]) -> Mapping[str, Any]:
    """Return the words of transformers' `FineGrainedFP8Config`, which vLLM reads too."""
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(block),
        "modules_to_not_convert": list(left),
    }


def in_channels(left: Sequence[str]) -> Mapping[str, Any]:
    """Return the words of compressed-tensors, for a scale for each row of a weight, and for each token of an input."""
    common = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**common, "strategy": "channel", "dynamic": False},
        "input_activations": {**common, "strategy": "token", "dynamic": True},
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [rf"re:{re.escape(name)}\..*" if name.endswith(_EXPERTS) else name for name in left],
    }


_BLOCK = (128, 128)
_SCHEMES = (
    Scheme("fp8-block", "_scale_inv", _BLOCK),
    Scheme("fp8-channel", "_scale", None),
    Scheme("fp8-block-ue8m0", "_scale_inv", _BLOCK, exponents=True),
)
SCHEMES = {scheme.name: scheme for scheme in _SCHEMES}

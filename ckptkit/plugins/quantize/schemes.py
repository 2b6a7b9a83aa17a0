"""The quantization schemes: names of scales, grids, and entries of config.json.

Sources: transformers/quantizers/quantizer_finegrained_fp8.py, and the preset FP8_DYNAMIC in
compressed_tensors/quantization/quant_scheme.py. Both also quantize inputs to 8 bits, with scales computed while the
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

_EXPERTS = ".experts"  # suffix of a module that contains several experts


@dataclass(frozen=True, slots=True)
class Scheme:
    """A quantization scheme: the name suffix of scales, and the box that shares one scale (None: one scale per row).

    With `exponents`, scales are powers of 2 and only their exponents are stored: UE8M0.
    """

    name: str
    suffix: str
    block: Block | None
    exponents: bool = False

    def find_scale_shape(self, shape: Shape) -> Shape | None:
        """Return the shape of the scales of a matrix; None if the boxes do not divide the matrix.

        Loaders disagree about smaller boxes at the edges: transformers computes the box size as rows divided by rows of
        scales.
        """
        rows, columns = shape
        box_rows, box_columns = self.box_shape(shape)
        return (rows // box_rows, columns // box_columns) if rows % box_rows == columns % box_columns == 0 else None

    def box_shape(self, shape: Shape) -> Block:
        """Return the rows and columns that share one scale in a matrix of this shape."""
        return self.block or (1, shape[1])

    def scale_dtype(self, dtype: DType) -> DType:
        if self.exponents:
            return DTYPES["float8_e8m0fnu"]
        is_half = self.block is None and dtype.name == "bfloat16"
        return DTYPES["bfloat16" if is_half else "float32"]

    def quantization_config(self, unquantized: Sequence[str]) -> Mapping[str, Any]:
        """Return the `quantization_config` for config.json; the modules in `unquantized` are unquantized."""
        if self.block is not None:  # the entries of transformers' `FineGrainedFP8Config`, which vLLM reads too
            config = {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": list(self.block),
                "modules_to_not_convert": list(unquantized),
            }
            return {**config, "scale_fmt": "ue8m0"} if self.exponents else config
        # the entries of compressed-tensors, with one scale per weight row and per input token
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
            "ignore": [rf"re:{re.escape(name)}\..*" if name.endswith(_EXPERTS) else name for name in unquantized],
        }


_BLOCK = (128, 128)
_SCHEMES = (
    Scheme("fp8-block", "_scale_inv", _BLOCK),
    Scheme("fp8-channel", "_scale", None),
    Scheme("fp8-block-ue8m0", "_scale_inv", _BLOCK, exponents=True),
)
SCHEMES = {scheme.name: scheme for scheme in _SCHEMES}

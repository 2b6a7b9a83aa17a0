"""List the ways in which quantized weights are stored. Each finds its own weights by names, dtypes and shapes."""

from __future__ import annotations

from ckptkit.quantized.packed import Finder
from ckptkit.quantized.stored import affine, floats4, floats8, integers, mxfp4

FINDERS: tuple[Finder, ...] = (floats8.find, mxfp4.find, integers.find, floats4.find, affine.find)

"""The storage schemes of quantized weights, one module each, which finds its weights by names, dtypes and shapes."""

from __future__ import annotations

from typing import NamedTuple

from ckptkit.entry_points import PluginTable


class KnownScheme(NamedTuple):
    """A storage scheme: the `module:function` (a `Finder`) that finds its weights.

    `method` is the `quant_method` in config.json that this scheme adds; "" if ckptkit knows it anyway.
    """

    find: str
    method: str = ""


_HERE = "ckptkit.state.quantized.stored"
SCHEMES = PluginTable(
    "ckptkit.quantizations",
    KnownScheme,
    {
        "floats8": KnownScheme(f"{_HERE}.floats8:find"),
        "mxfp4": KnownScheme(f"{_HERE}.mxfp4:find"),
        "integers": KnownScheme(f"{_HERE}.integers:find"),
        "floats4": KnownScheme(f"{_HERE}.floats4:find"),
        "affine": KnownScheme(f"{_HERE}.affine:find"),
    },
)

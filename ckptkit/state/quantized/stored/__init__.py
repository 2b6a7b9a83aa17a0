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


SCHEMES = PluginTable(
    "ckptkit.quantizations",
    KnownScheme,
    {
        name: KnownScheme(f"ckptkit.state.quantized.stored.{name}:find")
        for name in ("floats8", "mxfp4", "integers", "floats4", "affine")
    },
)

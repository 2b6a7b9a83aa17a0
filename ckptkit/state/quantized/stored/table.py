"""List the ways in which quantized weights are stored. Each finds its own weights by names, dtypes and shapes."""

from __future__ import annotations

from typing import NamedTuple

from ckptkit.entry_points import PluginTable


class KnownScheme(NamedTuple):
    """A way to store quantized weights: the `module:function`, a `Finder`, that finds them."""

    find: str


SCHEMES = PluginTable(
    "ckptkit.quantizations",
    KnownScheme,
    {
        name: KnownScheme(f"ckptkit.state.quantized.stored.{name}:find")
        for name in ("floats8", "mxfp4", "integers", "floats4", "affine")
    },
)

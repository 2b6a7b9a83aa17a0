"""ckptkit: converts and manages checkpoints of PyTorch distributed training. Importing it imports no torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from ckptkit.errors import CkptError
    from ckptkit.formats import open_layout
    from ckptkit.ops.consolidate import consolidate
    from ckptkit.ops.convert import convert
    from ckptkit.ops.converted import Converted
    from ckptkit.ops.estimate import Estimated, estimate
    from ckptkit.ops.finalize import finalize
    from ckptkit.ops.inspect import Inspected, inspect
    from ckptkit.ops.reshard import reshard
    from ckptkit.train.saving.run import Run

__all__ = [
    "CkptError",
    "Converted",
    "Estimated",
    "Inspected",
    "Run",
    "__version__",
    "consolidate",
    "convert",
    "estimate",
    "finalize",
    "inspect",
    "open_layout",
    "reshard",
]

_HOMES = {
    "CkptError": "ckptkit.errors",
    "Converted": "ckptkit.ops.converted",
    "Estimated": "ckptkit.ops.estimate",
    "Inspected": "ckptkit.ops.inspect",
    "Run": "ckptkit.train.saving.run",
    "consolidate": "ckptkit.ops.consolidate",
    "convert": "ckptkit.ops.convert",
    "estimate": "ckptkit.ops.estimate",
    "finalize": "ckptkit.ops.finalize",
    "inspect": "ckptkit.ops.inspect",
    "open_layout": "ckptkit.formats",
    "reshard": "ckptkit.ops.reshard",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: `import ckptkit` itself must cost nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module 'ckptkit' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
